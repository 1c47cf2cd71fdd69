"""Sends with SendGrid's own package as in its README: each email gets a new client, which opens a connection."""

from __future__ import annotations

from sendgrid import SendGridAPIClient
from sendgrid.helpers.mail import CustomArg, Mail

from benchmarks.peers.application import Email


def send(email: Email, host: str) -> str:
    """Send the email; return SendGrid's id. Raises python_http_client's errors for any response other than 2xx."""
    mail = Mail(
        from_email=email.sender, to_emails=email.recipient, subject=email.subject, plain_text_content=email.body
    )
    mail.add_custom_arg(CustomArg("email_id", str(email.email_id)))
    response = SendGridAPIClient("SG.benchmark", host=host).send(mail)
    return str(response.headers["X-Message-Id"])
