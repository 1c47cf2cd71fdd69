"""Receives, verifies, stores and applies events: what providers report about an email after they accepted the email."""
