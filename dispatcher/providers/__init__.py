"""The adapters, one for each provider. Only this package imports the libraries of SendGrid and AWS."""
