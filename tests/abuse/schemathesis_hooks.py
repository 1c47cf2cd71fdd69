"""Supplies facts that Schemathesis cannot know: the ids of held emails, and rules for emails that JSON Schema cannot
express.

Schemathesis loads this module (SCHEMATHESIS_HOOKS), and expects the API to accept every case that matches the schema.
But the domain refuses some fields that match the schema, such as an address with two at signs. This module replaces
them by valid fields.
"""

from __future__ import annotations

import os
import random
import re
from typing import Any, Final
from uuid import uuid4

import jsonschema
import schemathesis
from schemathesis import CheckContext, GenerationMode, HookContext, Response

from dispatcher.api.enqueue_endpoints import SCHEMAS
from dispatcher.api.policy import Policy
from dispatcher.config import load
from dispatcher.domain.email import Email
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidEmail

HELD: Final = os.environ.get("HELD", "").split(",")
POLICY: Final = Policy(load({}))
GOOD: Final[dict[str, Any]] = {
    "message_key": "a key",
    "from": "shop@example.com",
    "to": ["ann@example.org"],
    "subject": "A subject",
    "text": "A text.",
}
KEYED: Final = jsonschema.Draft202012Validator({**SCHEMAS["KeyedEmail"], "components": {"schemas": SCHEMAS}})


@schemathesis.hook
def before_call(context: HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Puts the id of a held email into half of the `confirm` and `release` requests. Replaces the emails of each
    positive case by valid emails with new keys."""
    label = case.operation.label
    if "/v1/held/" in label and random.random() < 0.5:
        case.path_parameters["email_id"] = random.choice(HELD)
        if isinstance(case.body, dict):
            case.body.pop("tenant_id", None)  # the API key decides the tenant
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if label == "POST /v1/emails" and isinstance(case.body, dict):
        case.body = valid_email(case.body)
        case.headers["Idempotency-Key"] = new_key(case.headers.get("Idempotency-Key", ""))
    elif label == "POST /v1/emails/batch" and isinstance(case.body, dict):
        case.body = {"emails": [valid_email(each) | {"message_key": str(uuid4())} for each in case.body["emails"]]}


def new_key(given: str) -> str:
    """A unique message key, quoted if `given` is quoted: `"0"` and `0` are the same key."""
    unique = uuid4().hex
    if len(given) + len(unique) <= MAX_KEY_CHARACTERS:
        return f'{given[:-1]}{unique}"' if given.startswith('"') else given + unique
    return f'"{unique}"' if given.startswith('"') else unique + given[len(unique) :]


def valid_email(email: dict[str, Any]) -> dict[str, Any]:
    """A valid email that differs from `email` only where it must."""
    email = {name: value for name, value in email.items() if name not in ("message_key", "tenant_id")}
    for _ in range(100):
        try:
            POLICY.check(Email.from_json({"message_key": "k", **email}))
        except InvalidEmail as error:
            field = re.split(r"[.\[]", error.field)[0]
            email.pop(field, None)
            if field in GOOD and not (field == "to" and (email.get("cc") or email.get("bcc"))):
                email[field] = GOOD[field]
        else:
            return email
    raise AssertionError(f"The email could not be made valid: {sorted(email)}")


@schemathesis.check
def batch_refuses_invalid_emails(context: CheckContext, response: Response, case: Any) -> None:
    """Every email of a batch that does not match the schema must be refused."""
    if case.operation.label != "POST /v1/emails/batch" or response.status_code != 200:
        return
    for email, result in zip(case.body["emails"], response.json()["results"], strict=True):
        assert KEYED.is_valid(email) or result["outcome"] == "refused", "an invalid email was accepted"
