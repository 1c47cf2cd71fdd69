"""Supplies facts that Schemathesis cannot know: the ids of held emails, and rules that JSON Schema cannot express.

Schemathesis loads this module (SCHEMATHESIS_HOOKS), and expects the API to accept every case that matches the schema.
But the domain refuses some fields that match the schema, such as an address with two at signs. This module replaces
them by valid fields: those of emails and SMS, and those of the kinds in `VALID`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import jsonschema
import schemathesis
from schemathesis import CheckContext, GenerationMode, HookContext, Response

from dispatcher.actions import all_actions
from dispatcher.actions.action import Action
from dispatcher.actions.batch import Batch
from dispatcher.actions.dlq import PROVIDER, REPLAYS
from dispatcher.actions.emails import ListEmails
from dispatcher.actions.feed import ListEvents
from dispatcher.actions.resend import SUBJECT
from dispatcher.actions.suppressions import RECIPIENTS
from dispatcher.actions.webhooks import URL
from dispatcher.admission.policy import Policy
from dispatcher.api.enqueue_endpoints import SCHEMAS, SMS_EXAMPLE
from dispatcher.config import load
from dispatcher.domain.email import Email
from dispatcher.domain.kinds import INSTANT, SEND_AT, SINCE, Kind, cursor_text
from dispatcher.domain.lanes import DEFAULT_LANES
from dispatcher.domain.sms import Sms
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidEmail
from dispatcher.ops.webhooks import checked_url
from dispatcher.store.outgoing_events import Cursor, Position

HELD: Final = os.environ.get("HELD", "").split(",")
POLICY: Final = Policy(load({}))
GOOD: Final[dict[str, Any]] = {
    "message_key": "a key",
    "from": "shop@example.com",
    "to": ["ann@example.org"],
    "subject": "A subject",
    "text": "A text.",
}
NOW: Final = datetime.now(UTC)
EVERY: Final[list[type[Action[Any]]]] = [*all_actions(), *REPLAYS, ListEvents]
ACTIONS: Final[dict[str, type[Action[Any]]]] = {
    re.sub(r":\w+}", "}", http): each
    for each in EVERY
    for http in (each.http, each.http_one if issubclass(each, Batch) else "")
}
VALID: Final[list[tuple[Kind[Any], Any]]] = [
    # The grammar of addresses, and the numbers that countries have.
    (RECIPIENTS, ["ann@example.org"]),
    *((ListEmails.fields[name].kind, "ann@example.org") for name in ("recipient", "sender")),
    (ListEmails.fields["domain"].kind, "example.org"),
    # The calendar, and the distance from the present.
    (SINCE, "2h"),
    (INSTANT, "2099-01-01T00:00:00Z"),
    (SEND_AT, (NOW + timedelta(days=1)).isoformat()),
    (PROVIDER, "smtp"),  # the providers of installed packages
    (SUBJECT, "A subject"),  # control characters
    (URL, "https://shop.example.com/hooks"),  # which addresses are public
    # Cursors are opaque.
    (ListEvents.fields["after"].kind, Cursor(1, Position(1, 1), NOW).text()),
]
"""The kinds whose rules JSON Schema cannot express, each with the reason and a valid value."""
CURSOR_VALUES: Final = {UUID: uuid4(), datetime: NOW, int: 1}
KEYED: Final = jsonschema.Draft202012Validator({**SCHEMAS["KeyedEmail"], "components": {"schemas": SCHEMAS}})


@schemathesis.hook
def before_call(context: HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Puts the id of a held email into half of the `confirm` and `release` requests. Makes the fields of each positive
    case valid, and gives its emails new keys."""
    label = case.operation.label
    if "/v1/held/" in label and random.random() < 0.5:
        case.path_parameters["email_id"] = random.choice(HELD)
        if isinstance(case.body, dict):
            case.body.pop("tenant_id", None)  # the API key decides the tenant
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if label in ("POST /v1/held/confirm", "POST /v1/held/release", "POST /v1/replays") and isinstance(case.body, dict):
        case.body.setdefault("email_ids", [random.choice(HELD)])  # one request must not change all held emails
    if (action := ACTIONS.get(label)) is not None:
        for fields in (case.query, case.body):
            if isinstance(fields, dict):
                make_valid(action, fields)
    elif label in ("POST /v1/emails", "POST /v1/sms") and isinstance(case.body, dict):
        case.body = valid_email(case.body) if label == "POST /v1/emails" else valid_email(case.body, Sms, SMS_EXAMPLE)
        case.headers["Idempotency-Key"] = new_key(case.headers.get("Idempotency-Key", ""))
    elif label == "POST /v1/emails/batch" and isinstance(case.body, dict):
        case.body = {"emails": [valid_email(each) | {"message_key": str(uuid4())} for each in case.body["emails"]]}


def make_valid(action: type[Action[Any]], fields: dict[str, Any]) -> None:
    """Replaces the values that only a rule outside of the schema refuses."""
    valid = {name: value for name, each in action.fields.items() for kind, value in VALID if kind is each.kind}
    if action.key and "after" not in valid:
        valid["after"] = cursor_text(CURSOR_VALUES[kind] for kind in action.key.values())
    for name in fields.keys() & valid.keys():
        if not is_valid(action.fields[name].kind, fields[name]):
            fields[name] = valid[name]
    ends, begins = (fields.get(name) for name in ("created_before", "created_from"))
    if ends and begins and SINCE.of_text(ends) <= SINCE.of_text(begins):  # a rule about two fields
        del fields["created_before"]


def is_valid(kind: Kind[Any], value: Any) -> bool:
    try:
        kind.of_json(value)
        if kind is URL:
            checked_url(value, allow_private=False)
    except ValueError:
        return False
    return True


def new_key(given: str) -> str:
    """A unique message key, quoted if `given` is quoted: `"0"` and `0` are the same key."""
    unique = uuid4().hex
    if len(given) + len(unique) <= MAX_KEY_CHARACTERS:
        return f'{given[:-1]}{unique}"' if given.startswith('"') else given + unique
    return f'"{unique}"' if given.startswith('"') else unique + given[len(unique) :]


def valid_email(
    email: dict[str, Any], kind: type[Email | Sms] = Email, good: Mapping[str, Any] = GOOD
) -> dict[str, Any]:
    """A valid email or SMS that differs from `email` only where it must. `good` has valid fields."""
    email = {name: value for name, value in email.items() if name not in ("message_key", "tenant_id")}
    for _ in range(100):
        try:
            check(kind.from_json({"message_key": "k", **email}))
        except InvalidEmail as error:
            field = re.split(r"[.\[]", error.field)[0]
            email.pop(field, None)
            if field in good and not (field == "to" and (email.get("cc") or email.get("bcc"))):
                email[field] = good[field]
        else:
            return email
    raise AssertionError(f"The email could not be made valid: {sorted(email)}")


def check(message: Email | Sms) -> None:
    """Raises InvalidEmail for the first field that the settings or the present time do not allow."""
    for fault in POLICY.faults(message):
        raise fault
    if message.lane not in (None, *DEFAULT_LANES):
        raise InvalidEmail("lane", "is not a lane of this API")
    if message.expires_at is not None and message.expires_at < NOW + timedelta(hours=1):
        raise InvalidEmail("expires_at", "is in the past")


@schemathesis.check
def batch_refuses_invalid_emails(context: CheckContext, response: Response, case: Any) -> None:
    """Every email of a batch that does not match the schema must be refused."""
    if case.operation.label != "POST /v1/emails/batch" or response.status_code != 200:
        return
    for email, result in zip(case.body["emails"], response.json()["results"], strict=True):
        assert KEYED.is_valid(email) or result["outcome"] == "refused", "an invalid email was accepted"
