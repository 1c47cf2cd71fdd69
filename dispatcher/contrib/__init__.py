"""What other frameworks call. Nothing else imports these packages, and each needs the framework that it is for."""
