"""An email as JSON Schema (2020-12), for readers and code generators.

What decides is the domain (`domain.email_rules`), whose bounds stand here by name. A schema cannot say everything,
so it is never narrower than the domain: what it refuses, the domain refuses too. A test holds both to it.
"""

from __future__ import annotations

from typing import Any, Final

from dispatcher.domain import email_rules as rules
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.domain.outgoing import MAX_FILENAME_CHARACTERS
from dispatcher.domain.status import OnUncertain

_ADDRESS: Final = {
    "type": "string",
    "minLength": 3,
    "maxLength": 774,
    "pattern": "@",
    "description": "`local@domain` or `Name <local@domain>`.",
}


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _addresses(about: str) -> dict[str, Any]:
    listed = {"type": "array", "items": {"$ref": "#/components/schemas/Address"}, "maxItems": rules.MAX_RECIPIENTS}
    one = {"$ref": "#/components/schemas/Address"}
    return {"anyOf": [one, listed, {"type": "null"}], "description": about}


def _text(longest: int, about: str, *, shortest: int = 0, pattern: str | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": longest, "description": about}
    if shortest:
        schema["minLength"] = shortest
    if pattern:
        schema["pattern"] = pattern
    return schema


_FIELDS: Final[dict[str, Any]] = {
    "message_key": _optional(
        _text(
            MAX_KEY_CHARACTERS,
            "Your own name for the email; the same key never makes a second one. If a header gives the key too, both "
            "must be the same.",
            shortest=1,
        )
    ),
    "tenant_id": _optional(
        _text(
            rules.MAX_TENANT_CHARACTERS,
            "Whose email it is; an API key knows its tenant.",
            shortest=1,
            pattern="^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        )
    ),
    "from": {"$ref": "#/components/schemas/Address"},
    "to": _addresses("May be missing where there is a cc or bcc."),
    "cc": _addresses("In copy."),
    "bcc": _addresses("In blind copy."),
    "reply_to": _addresses("Where answers go."),
    "subject": _optional(_text(rules.MAX_LINE_CHARACTERS, "Needed, except beside template_id.")),
    "text": _optional(_text(rules.MAX_BODY_OCTETS, "Plain body; an email needs text, html or template_id.")),
    "html": _optional(_text(rules.MAX_BODY_OCTETS, "HTML body.")),
    "template_id": _optional(
        _text(
            100,
            "A provider's template, which writes the body instead.",
            shortest=1,
            pattern="^[A-Za-z0-9_-]{1,100}$",
        )
    ),
    "template_data": _optional({"type": "object", "description": "What the template is filled with."}),
    "headers": _optional(
        {
            "type": "object",
            "maxProperties": rules.MAX_HEADERS,
            "additionalProperties": {"type": "string", "maxLength": rules.MAX_LINE_CHARACTERS},
            "description": "Additional headers, out of those that the operator allows.",
        }
    ),
    "attachments": _optional(
        {
            "type": "array",
            "maxItems": rules.MAX_ATTACHMENTS,
            "items": {"$ref": "#/components/schemas/Attachment"},
        }
    ),
    "tags": _optional(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": rules.MAX_TAG_CHARACTERS},
                {
                    "type": "array",
                    "maxItems": rules.MAX_TAGS,
                    "uniqueItems": True,
                    "items": {"type": "string", "minLength": 1, "maxLength": rules.MAX_TAG_CHARACTERS},
                },
            ],
            "description": "For the provider's statistics. `one_time_code` sets `erase_after_sending` instead.",
        }
    ),
    "correlation_id": _optional(
        _text(MAX_KEY_CHARACTERS, "Your name for what caused the email; stands in logs.", shortest=1)
    ),
    "on_uncertain": _optional(
        {
            "type": "string",
            "enum": [policy.value for policy in OnUncertain],
            "description": "Where nobody can know whether it was accepted: hold it, or resend it (may duplicate).",
        }
    ),
    "erase_after_sending": _optional(
        {
            "type": "boolean",
            "description": "Delete the content, attachments included, once the email is sent; for one-time codes.",
        }
    ),
}

ATTACHMENT: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["filename", "content_type", "content"],
    "properties": {
        "filename": {"type": "string", "minLength": 1, "maxLength": MAX_FILENAME_CHARACTERS},
        "content_type": {"type": "string", "pattern": "^[^/]+/[^/]+$", "examples": ["application/pdf"]},
        "content": {"type": "string", "contentEncoding": "base64", "description": "In base64."},
    },
}

EXAMPLE: Final[dict[str, Any]] = {
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order.",
}


def email_schema(*, needs_key: bool) -> dict[str, Any]:
    """The schema of an email.

    Args:
        needs_key: Whether the message key stands in the email, because no header gives it.
    """
    example = {"message_key": "order-17-receipt", **EXAMPLE} if needs_key else EXAMPLE
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["message_key", "from"] if needs_key else ["from"],
        "properties": _FIELDS,
        "anyOf": [{"required": ["subject"]}, {"required": ["template_id"]}],
        "examples": [example],
    }


SCHEMAS: Final[dict[str, Any]] = {
    "Address": _ADDRESS,
    "Attachment": ATTACHMENT,
    "Email": email_schema(needs_key=False),
    "KeyedEmail": email_schema(needs_key=True),
}
