"""Checks the body of `POST /v3/mail/send` by the rules of SendGrid's documentation, for the fields that we send.

A JSON Schema describes the structure (https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send).
Functions check the rules that a schema cannot express (…/mail-send/errors). The schema is stricter than the published
one, because it allows only the fields that we send.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import jsonschema

MAILBOX: Final = {
    "type": "object",
    "properties": {
        # The address must be ASCII, except for the local part, which the documentation does not restrict.
        "email": {"type": "string", "pattern": r"^[^@\s]+@[A-Za-z0-9.-]+$", "maxLength": 320},
        "name": {"type": "string", "minLength": 1},
    },
    "required": ["email"],
    "additionalProperties": False,
}
MAILBOXES: Final = {"type": "array", "items": MAILBOX, "minItems": 1, "maxItems": 1000}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "personalizations": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1000,
            "items": {
                "type": "object",
                "properties": {
                    "to": MAILBOXES,
                    "cc": MAILBOXES,
                    "bcc": MAILBOXES,
                    "custom_args": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}},
                    "dynamic_template_data": {"type": "object"},
                    "subject": {"type": "string", "minLength": 1},
                    "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "required": ["to"],
                "additionalProperties": False,
            },
        },
        "from": MAILBOX,
        "reply_to": MAILBOX,
        "reply_to_list": {**MAILBOXES, "uniqueItems": True},
        "subject": {"type": "string", "minLength": 1},
        "content": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text/plain", "text/html"]},
                    "value": {"type": "string", "minLength": 1},
                },
                "required": ["type", "value"],
                "additionalProperties": False,
            },
        },
        "attachments": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "type": {"type": "string", "pattern": r"^[^;\r\n]+$"},
                    "filename": {"type": "string", "pattern": r"^[^\r\n]+$"},
                    "disposition": {"enum": ["attachment", "inline"]},
                },
                "required": ["content", "filename"],
                "additionalProperties": False,
            },
        },
        "template_id": {"type": "string", "minLength": 1},
        "headers": {
            "type": "object",
            "propertyNames": {"pattern": r"^[!-9;-~]+$"},
            # The client must encode values that are not ASCII.
            "additionalProperties": {"type": "string", "pattern": r"^[ -~]*$"},
        },
        "categories": {
            "type": "array",
            "minItems": 1,
            "maxItems": 10,
            "uniqueItems": True,
            "items": {"type": "string", "maxLength": 255, "pattern": r"^[ -~]+$"},
        },
        "mail_settings": {
            "type": "object",
            "properties": {
                "sandbox_mode": {
                    "type": "object",
                    "properties": {"enable": {"type": "boolean"}},
                    "required": ["enable"],
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
    },
    "required": ["personalizations", "from"],
    "additionalProperties": False,
}
RESERVED_HEADERS: Final = frozenset(
    {"x-sg-id", "x-sg-eid", "received", "dkim-signature", "content-type", "content-transfer-encoding"}
    | {"to", "from", "subject", "reply-to", "cc", "bcc"}
)
MAX_RECIPIENTS: Final = 1000
MAX_CUSTOM_OCTETS: Final = 10_000
MISREAD_IN_NAMES: Final = frozenset("(),:;<>@[]")

_VALIDATOR: Final = jsonschema.Draft202012Validator(SCHEMA)


def check(document: dict[str, Any]) -> None:
    """Fail if SendGrid would refuse or misread a body."""
    _VALIDATOR.validate(document)
    _check_recipients(document)
    _check_content(document)
    assert not RESERVED_HEADERS & {name.lower() for name in document.get("headers", {})}
    assert not ("reply_to" in document and "reply_to_list" in document)
    for file in document.get("attachments", ()):
        base64.b64decode(file["content"], validate=True)


def _check_recipients(document: dict[str, Any]) -> None:
    everybody = []
    for person in document["personalizations"]:
        listed = [one for field in ("to", "cc", "bcc") for one in person.get(field, ())]
        assert len({one["email"].lower() for one in listed}) == len(listed), "an address occurs twice"
        everybody += listed
        for one in listed:
            name = one.get("name", "")
            is_quoted = name.startswith('"') and name.endswith('"')
            assert is_quoted or not MISREAD_IN_NAMES & set(name), "SendGrid would misread a name"
        assert not RESERVED_HEADERS & {name.lower() for name in person.get("headers", {})}
        arguments = person.get("custom_args", {})
        assert sum(len(f"{name}{value}".encode()) for name, value in arguments.items()) <= MAX_CUSTOM_OCTETS
    assert len(everybody) <= MAX_RECIPIENTS
    assert len({one["email"].lower() for one in everybody}) == len(everybody), (
        "an address occurs in two personalizations"
    )


def _check_content(document: dict[str, Any]) -> None:
    has_template = "template_id" in document
    assert has_template or "subject" in document
    assert has_template or "content" in document
    types = [part["type"] for part in document.get("content", ())]
    assert types == sorted(types, reverse=True), "text/plain comes first"
    assert len(set(types)) == len(types)
