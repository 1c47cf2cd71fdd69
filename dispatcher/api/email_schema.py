"""The JSON Schema (2020-12) of an email, for documentation and code generators.

The fields of `domain.message.Message` contain it. A test checks that it refuses no email that the domain accepts.
"""

from __future__ import annotations

from typing import Any, Final

from dispatcher.domain.email import Email
from dispatcher.domain.message import SHARED_SCHEMAS, text_schema
from dispatcher.domain.sms import SMS_CHANNEL, Sms

SMS_EXAMPLE: Final[dict[str, Any]] = {"to": "+4915112345678", "text": "4711 is your code."}
EXAMPLE: Final[dict[str, Any]] = {
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order.",
}


_NUMBER: Final = "The recipient's number in E.164, such as `+4915112345678`."
_SENDER: Final = "A number, a short code, a name or a pool of senders. Default: the provider's setting."
_NEEDS_SUBJECT: Final = {"anyOf": [{"required": ["subject"]}, {"required": ["template_id"]}]}
SCHEMAS: Final[dict[str, Any]] = {
    **SHARED_SCHEMAS,
    # The key of a single email may be in the header Idempotency-Key instead.
    "Email": {**Email.schema(["from"]), **_NEEDS_SUBJECT, "examples": [EXAMPLE]},
    "KeyedEmail": {
        **Email.schema(["message_key", "from"]),
        **_NEEDS_SUBJECT,
        "examples": [{"message_key": "order-17-receipt", **EXAMPLE}],
    },
    "Sms": {
        **Sms.schema(
            ["to", "text"],
            **{
                "channel": {"anyOf": [{"const": SMS_CHANNEL}, {"type": "null"}]},
                "to": text_schema(40, 3, pattern=r"^\+", description=_NUMBER),
                "from": {"anyOf": [text_schema(40), {"type": "null"}], "description": _SENDER},
                "text": text_schema(Sms.max_characters, 1, description="The text."),
            },
        ),
        "examples": [SMS_EXAMPLE],
    },
}
