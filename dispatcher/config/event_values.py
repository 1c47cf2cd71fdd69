"""Parsers of the settings about providers' events. Each takes the text of a setting and returns the setting's value.

If the text is invalid, a parser raises ValueError. The message follows the variable's name, as in `values`.
"""

from __future__ import annotations

import base64
import re
from typing import Final
from urllib.parse import urlsplit

from dispatcher.config.values import LOOPBACKS, mailbox, texts, url, webhook_secret

_P256_PREFIX: Final = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")
"""The first bytes of every P-256 public key in DER form. The key's point on the curve follows."""
_P256_POINT_OCTETS: Final = 65
_TOPIC: Final = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_.-]{1,256}", re.ASCII)


def public_keys(text: str) -> tuple[str, ...]:
    """Parses P-256 public keys in base64 (SPKI in DER), separated by commas or white space."""
    found = tuple(re.split(r"[\s,]+", text.strip(", \n")))
    for number, key in enumerate(found, 1):
        try:
            der = base64.b64decode(key, validate=True)
        except ValueError:
            der = b""
        if not der.startswith(_P256_PREFIX) or len(der) != len(_P256_PREFIX) + _P256_POINT_OCTETS:
            raise ValueError(
                f"has a text at position {number} that is not a P-256 public key in base64; copy the verification key "
                "from SendGrid's settings, without BEGIN and END lines"
            )
    return found


def webhook_secrets(text: str) -> tuple[str, ...]:
    """Parses the signing secrets of webhooks, separated by commas or white space."""
    try:
        return tuple(map(webhook_secret, re.split(r"[\s,]+", text.strip(", \n"))))
    except ValueError:
        raise ValueError("must be signing secrets of Resend's webhooks: whsec_ and base64, comma-separated") from None


def topics(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of ARNs of SNS topics."""
    found = texts(text)
    if not found or not all(_TOPIC.fullmatch(each) for each in found):
        raise ValueError(
            "must be a comma-separated list of ARNs of SNS topics, such as "
            "arn:aws:sns:eu-west-1:123456789012:ses-events"
        )
    return found


def queue_url(text: str) -> str:
    parts = urlsplit(url("https", "http")(text))
    if parts.scheme == "http" and parts.hostname not in LOOPBACKS:
        raise ValueError("must begin with https://: over http://, the signed requests to SQS would not be encrypted")
    if parts.username is not None or parts.query or parts.fragment or parts.path in ("", "/"):
        raise ValueError("must be a queue's URL, such as https://sqs.eu-west-1.amazonaws.com/123456789012/ses-events")
    return text


def bounce_mailbox(text: str) -> str:
    """Parses an address whose part before the @ is so short that the dispatcher can add a token there."""
    from dispatcher.domain.bounce_address import MAX_MAILBOX_OCTETS  # loaded late, because few commands need it

    found = mailbox(text)
    local = found.rpartition("@")[0]
    if "+" in local or len(local) > MAX_MAILBOX_OCTETS:
        raise ValueError(
            f"must have at most {MAX_MAILBOX_OCTETS} characters and no + before the @, "
            "because the dispatcher adds a + and a token there for each email"
        )
    return found


def signing_keys(text: str) -> tuple[bytes, ...]:
    """Parses a comma-separated list of secrets. Each secret must have at least 32 characters."""
    keys = tuple(key.strip() for key in text.split(","))
    if not all(key.isascii() and key.isprintable() and " " not in key and len(key) >= 32 for key in keys):
        raise ValueError("must be keys of at least 32 characters; create one with: openssl rand -base64 32")
    return tuple(key.encode() for key in keys)
