"""Adapters to those who deliver email; the only package that imports HTTP, SMTP and AWS clients."""
