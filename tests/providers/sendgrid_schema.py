"""Checks the body of `POST /v3/mail/send` by the rules of SendGrid's documentation, for the fields that we send.

A JSON Schema describes the structure (https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send).
Functions check the rules that a schema cannot express (…/mail-send/errors). The schema is stricter than the published
one, because it allows only the fields that we send.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import jsonschema

Schema = dict[str, Any]
TEXT: Final[Schema] = {"type": "string", "minLength": 1}


def _only(required: str, **properties: Schema) -> Schema:
    """An object with no other properties. `required`: the names of those that it must have."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def _some(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "minItems": 1, "items": items, **limits}


def _each(values: Schema, **limits: Any) -> Schema:
    return {"type": "object", "additionalProperties": values, **limits}


MAILBOX: Final = _only(
    "email",
    # The address must be ASCII, except for the local part, which the documentation does not restrict.
    email={"type": "string", "pattern": r"^[^@\s]+@[A-Za-z0-9.-]+$", "maxLength": 320},
    name=TEXT,
)
MAILBOXES: Final = _some(MAILBOX, maxItems=1000)
PERSONALIZATION: Final = _only(
    "to",
    to=MAILBOXES,
    cc=MAILBOXES,
    bcc=MAILBOXES,
    custom_args=_each({"type": "string"}, minProperties=1),
    dynamic_template_data={"type": "object"},
    subject=TEXT,
    headers=_each({"type": "string"}),
)
ATTACHMENT: Final = _only(
    "content filename",
    content=TEXT,
    type={"type": "string", "pattern": r"^[^;\r\n]+$"},
    filename={"type": "string", "pattern": r"^[^\r\n]+$"},
    disposition={"enum": ["attachment", "inline"]},
)
# The client must encode values that are not ASCII.
HEADERS: Final = _each({"type": "string", "pattern": r"^[ -~]*$"}, propertyNames={"pattern": r"^[!-9;-~]+$"})
CATEGORY: Final[Schema] = {"type": "string", "maxLength": 255, "pattern": r"^[ -~]+$"}
PROPERTIES: Final[Schema] = {
    "personalizations": _some(PERSONALIZATION, maxItems=1000),
    "from": MAILBOX,
    "reply_to": MAILBOX,
    "reply_to_list": {**MAILBOXES, "uniqueItems": True},
    "subject": TEXT,
    "content": _some(_only("type value", type={"enum": ["text/plain", "text/html"]}, value=TEXT)),
    "attachments": _some(ATTACHMENT),
    "template_id": TEXT,
    "headers": HEADERS,
    "categories": _some(CATEGORY, maxItems=10, uniqueItems=True),
    "mail_settings": _only("", sandbox_mode=_only("enable", enable={"type": "boolean"})),
}
SCHEMA: Final = _only("personalizations from", **PROPERTIES)
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
