"""One adapter per provider. Only this package imports the clients of SendGrid and AWS."""
