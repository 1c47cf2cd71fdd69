"""The form of Twilio's `POST /Messages.json`: https://www.twilio.com/docs/messaging/api/message-resource"""

from __future__ import annotations

import math
from typing import Final
from urllib.parse import urlencode

from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.text import body_fault
from dispatcher.transport.mime_headers import UnrenderableEmail

MAX_CHARACTERS: Final = 1600
MAX_VALIDITY_SECONDS: Final = 36_000
"""Twilio's default and longest `ValidityPeriod`. After this time, Twilio discards an SMS that is still in its queue."""


def form_of(email: OutgoingEmail, default_sender: str, callback_url: str | None, expires_in: float | None) -> bytes:
    """The request's form.

    Args:
        default_sender: The sender of an SMS that has no sender; empty if no default is configured.
        callback_url: The URL to which Twilio posts the SMS's status; None if Twilio posts nothing. This function adds
            the SMS's id to the URL.
        expires_in: The seconds until the SMS expires; None if it never expires.

    Raises:
        UnrenderableEmail: Twilio would refuse the SMS. The error names the field, and never quotes its value.
    """
    text, sender = email.text or "", email.sender or default_sender
    if not text:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "the SMS has no text")
    if len(text) > MAX_CHARACTERS:
        raise UnrenderableEmail(
            Reason.INVALID_CONTENT, f"text has {len(text):,} characters; Twilio accepts at most {MAX_CHARACTERS:,}"
        )
    if fault := body_fault(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"text {fault}")
    if len(email.to) != 1 or not email.to[0].startswith("+"):
        raise UnrenderableEmail(
            Reason.REJECTED_RECIPIENT,
            "the SMS must have exactly one recipient, a phone number in E.164 format, such as +4915112345678",
        )
    if not sender:
        raise UnrenderableEmail(
            Reason.REJECTED_SENDER, "the SMS has no sender, and DISPATCHER_TWILIO_SENDER is not set"
        )
    form = {"To": email.to[0], "MessagingServiceSid" if sender.startswith("MG") else "From": sender, "Body": text}
    if expires_in is not None:
        # Round down, because the period begins a little later: when Twilio accepts the SMS.
        form["ValidityPeriod"] = str(max(1, min(math.floor(expires_in), MAX_VALIDITY_SECONDS)))
    if callback_url is not None:
        form["StatusCallback"] = f"{callback_url}?email_id={email.email_id}"
    return urlencode(form).encode()
