"""What Schemathesis cannot know of the API: which emails are held, and what a JSON schema cannot say of an email.

Loaded by its command line (SCHEMATHESIS_HOOKS). A case that fits the schema is to be accepted: what the domain refuses
of it all the same, such as two at signs in an address, is replaced until the domain takes it.
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

from dispatcher.api.email_schema import SCHEMAS
from dispatcher.api.policy import Policy
from dispatcher.config import load
from dispatcher.domain.email import Email
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidEmail

HELD: Final = os.environ.get("HELD", "").split(",")
POLICY: Final = Policy.of(load({}))
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
    """Has half of the decisions be about emails that are held, and emails be new and what the domain takes."""
    label = case.operation.label
    if "/v1/held/" in label and random.random() < 0.5:
        case.path_parameters["email_id"] = random.choice(HELD)
        if isinstance(case.body, dict):
            case.body.pop("tenant_id", None)  # the key knows it
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if label == "POST /v1/emails" and isinstance(case.body, dict):
        case.body = acceptable(case.body)
        case.headers["Idempotency-Key"] = new_key(case.headers.get("Idempotency-Key", ""))
    elif label == "POST /v1/emails/batch" and isinstance(case.body, dict):
        case.body = {"emails": [acceptable(each) | {"message_key": str(uuid4())} for each in case.body["emails"]]}


def new_key(given: str) -> str:
    """A key in the form of the given one that no email has: not `"0"` either, where an earlier one was `0`."""
    unique = uuid4().hex
    if len(given) + len(unique) <= MAX_KEY_CHARACTERS:
        return f'{given[:-1]}{unique}"' if given.startswith('"') else given + unique
    return f'"{unique}"' if given.startswith('"') else unique + given[len(unique) :]


def acceptable(email: dict[str, Any]) -> dict[str, Any]:
    """The email with as little changed as the domain and the API's policy want."""
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
    raise AssertionError(f"The domain takes it in no form: {sorted(email)}")


@schemathesis.check
def batch_refuses_what_does_not_fit(context: CheckContext, response: Response, case: Any) -> None:
    """In a batch each email has an answer of its own: one that does not fit the schema is refused."""
    if case.operation.label != "POST /v1/emails/batch" or response.status_code != 200:
        return
    for email, result in zip(case.body["emails"], response.json()["results"], strict=True):
        assert KEYED.is_valid(email) or result["outcome"] == "refused", "an email that does not fit was accepted"
