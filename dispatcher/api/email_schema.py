"""The JSON Schema (2020-12) of an email, for documentation and code generators.

`domain.email_rules` validates emails; the schema uses the limits in that module. JSON Schema cannot express every rule,
so the schema may accept emails that the domain refuses. It never refuses an email that the domain accepts; a test
checks that.
"""

from __future__ import annotations

from typing import Any, Final

from dispatcher.domain import email_rules as rules
from dispatcher.domain.lanes import LANE
from dispatcher.domain.message import TEXT_FIELDS
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.domain.outgoing import MAX_FILENAME_CHARACTERS
from dispatcher.domain.sms import SMS_CHANNEL, Sms
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


def _instant(description: str) -> dict[str, Any]:
    return {
        "type": "string",
        "format": "date-time",
        "description": f"{description} The zone is required.",
        "examples": ["2026-12-24T18:00:00+01:00"],
    }


_FIELDS: Final[dict[str, Any]] = {
    "message_key": _optional(
        _text(
            MAX_KEY_CHARACTERS,
            "Your unique name for the email. A repeated key never creates a second email. If the request also has "
            "the header Idempotency-Key, both must be equal.",
            shortest=1,
        )
    ),
    "tenant_id": _optional(
        _text(
            rules.MAX_TENANT_CHARACTERS,
            "The email's tenant. Leave it out if you use an API key: the key has a tenant.",
            shortest=1,
            pattern="^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        )
    ),
    "from": {"$ref": "#/components/schemas/Address"},
    "to": _addresses("Recipients. Required unless `cc` or `bcc` has recipients."),
    "cc": _addresses("Recipients of a copy."),
    "bcc": _addresses("Recipients of a blind copy. No other recipient sees these addresses."),
    "reply_to": _addresses("Addresses for replies."),
    "subject": _optional(_text(rules.MAX_LINE_CHARACTERS, "Required unless `template_id` is set.")),
    "text": _optional(_text(rules.MAX_BODY_OCTETS, "Plain-text body. An email needs `text`, `html` or `template_id`.")),
    "html": _optional(_text(rules.MAX_BODY_OCTETS, "HTML body.")),
    "template_id": _optional(
        _text(
            100,
            "The id of a template at the provider, which replaces `text` and `html`.",
            shortest=1,
            pattern="^[A-Za-z0-9_-]{1,100}$",
        )
    ),
    "template_data": _optional({"type": "object", "description": "The template's variables."}),
    "headers": _optional(
        {
            "type": "object",
            "maxProperties": rules.MAX_HEADERS,
            "additionalProperties": {"type": "string", "maxLength": rules.MAX_LINE_CHARACTERS},
            "description": "Additional headers. The operator configures which names are allowed.",
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
            "description": "Categories for the provider's statistics. `one_time_code` is not sent to the provider: it "
            "sets `erase_after_sending`.",
        }
    ),
    "correlation_id": _optional(
        _text(
            MAX_KEY_CHARACTERS,
            "Your id for the request or event that caused the email. The id appears in the log.",
            shortest=1,
        )
    ),
    "on_uncertain": _optional(
        {
            "type": "string",
            "enum": [policy.value for policy in OnUncertain],
            "description": "What to do if it is unknown whether the provider accepted the email: hold the email for an "
            "operator, or resend it (the recipient may get it twice). Default: the operator's setting.",
        }
    ),
    "erase_after_sending": _optional(
        {
            "type": "boolean",
            "description": "Delete the content, including attachments, after the email is sent. For one-time codes.",
        }
    ),
    "ignore_suppression": _optional(
        {
            "type": "boolean",
            "description": "Send to suppressed recipients, too: for emails such as a legal notice. The API key needs "
            "the scope `ignore_suppression`.",
        }
    ),
    "send_at": _optional(_instant("The email is not sent before this time. At most 366 days ahead.")),
    "expires_at": _optional(
        _instant(
            "If the email is not sent by this time, it is cancelled. Must be in the future, later than `send_at`, "
            "and at most 366 days ahead."
        )
    ),
    "lane": _optional(
        {
            "type": "string",
            "pattern": f"^{LANE.pattern}$",
            "description": "The lane of the email, such as `urgent`. The API key must allow the lane.",
            "examples": ["urgent"],
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
        "content": {"type": "string", "contentEncoding": "base64", "description": "The file, in base64."},
    },
}

_SMS_FIELDS: Final = {
    **{name: _FIELDS[name] for name in sorted(TEXT_FIELDS - {"channel", "to", "text", "from"})},
    "channel": _optional({"const": SMS_CHANNEL}),
    "to": _text(40, "The recipient's number in E.164, such as `+4915112345678`.", shortest=3, pattern=r"^\+"),
    "from": _optional(
        _text(40, "A number, a short code, a name or a pool of senders. Default: the provider's setting.")
    ),
    "text": _text(Sms.max_characters, "The text.", shortest=1),
}
SMS_EXAMPLE: Final[dict[str, Any]] = {"to": "+4915112345678", "text": "4711 is your code."}
EXAMPLE: Final[dict[str, Any]] = {
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order.",
}


def email_schema(*, needs_key: bool) -> dict[str, Any]:
    """The schema of an email.

    Args:
        needs_key: Whether `message_key` is required. A request for one email may have the key in the header
            Idempotency-Key instead. In a batch, each email needs its own `message_key`.
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
    "Sms": {
        "type": "object",
        "additionalProperties": False,
        "required": ["to", "text"],
        "properties": _SMS_FIELDS,
        "examples": [SMS_EXAMPLE],
    },
}
