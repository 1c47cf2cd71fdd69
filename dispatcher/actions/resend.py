"""Correct and resend: enqueue a copy of a finished email, with another recipient, sender, subject or header."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final
from uuid import UUID

from dispatcher.actions.action import Change, Mistake, Mistakes, Reach, Refusal, field
from dispatcher.domain import email_rules as rules
from dispatcher.domain.email_history import Resent
from dispatcher.domain.kinds import EMAIL_ID, FLAG, TENANT, Kind, many, text
from dispatcher.domain.message import FIELDS
from dispatcher.domain.status import FINISHED
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidEmail


def _lines(text: str) -> list[str]:
    return [each.strip() for each in text.splitlines() if each.strip()]


def _headers(text: str) -> dict[str, str]:
    pairs = [each.partition(":") for each in _lines(text)]
    if not all(colon for _, colon, _ in pairs):
        raise ValueError
    return {name.strip(): value.strip() for name, _, value in pairs}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value  # the copy checks the headers


_KINDS: Final = {each.name: each.kind for each in FIELDS}
ADDRESS: Final = text(1_000, rule="must be an address", metavar="ADDRESS")
RECIPIENTS: Final = replace(many(ADDRESS, rules.MAX_RECIPIENTS, "addresses"), parse=_lines)
SUBJECT: Final = Kind("must be a line of text", _KINDS["subject"].schema, partial(rules.line, "subject"))
HEADERS: Final[Kind[Mapping[str, str]]] = Kind(
    "must be headers such as `X-Campaign: spring`", _KINDS["headers"].schema, _object, _headers, "NAME:VALUE"
)
_CHANGES: Final = ("to", "sender", "subject", "headers")
_NEW: Final = "Enqueue a new email."


class Resend(Change[Resent], name="resend", http="POST /v1/emails/{email_id}/resend", reach=Reach.ANY_TENANT):
    """Enqueue a corrected copy of an email that is failed, cancelled, held or sent.

    The copy is a new email with the content, the attachments, the tags and the metadata of the email, and with what you
    change: recipients, sender, subject or headers. It passes the same checks as every new email. The email itself does
    not change; the email and its copy name each other (`resent_as`, `resent_from`).

    Without a new message key, the copy's key is made from the email's key, its id and the changes. So the same call
    makes one copy, however often it is repeated, and other changes make another copy. For a second equal copy, give a
    key.

    If the email is sent or held, or may have arrived, a recipient may get it twice: confirm this. An email without its
    content, or that has expired, cannot be resent.

    An API key needs the scopes `operate` and `send`, and its limits for senders and recipients count.

    Exit codes: 0 the copy is enqueued, now or by an earlier call; 1 refused; 2 confirmation needs a terminal or --yes.
    """

    email_id: UUID = field(EMAIL_ID, "The email.")
    to: tuple[str, ...] | None = field(
        RECIPIENTS,
        "Send the copy only to these addresses, instead of to all recipients of the email.",
        default=None,
    )
    sender: str | None = field(ADDRESS, "The new sender.", default=None, option="--from")
    subject: str | None = field(SUBJECT, "The new subject.", default=None)
    headers: Mapping[str, str] | None = field(
        HEADERS,
        "Headers that the copy has, too, or instead of those with the same names. An empty value removes a header.",
        default=None,
        option="--header",
    )
    message_key: str | None = field(
        text(MAX_KEY_CHARACTERS),
        "The copy's message key. By default, it is made from the email's key, its id and the changes.",
        default=None,
        option="--key",
    )
    may_repeat: bool = field(
        FLAG,
        "Send the copy although the email is sent or held, or may have arrived: a recipient may get it twice.",
        default=False,
        option="--yes",
    )
    tenant_id: str | None = field(TENANT, "The email's tenant.", default=None)

    created = "/v1/emails/{id}"
    statuses = FINISHED
    asks = ("to", "sender", "subject", "headers", "message_key", "may_repeat")
    on_one = (
        "Enqueues a copy of the email, with another recipient, sender, subject or header. What you leave empty is "
        "copied. The email stays as it is: if it failed, it is listed under Failures until you discard it."
    )
    done = "A copy of the email is enqueued; this page shows it as “resent as”."
    tells_row = True
    refusals: ClassVar = (
        Refusal("unknown", "not-found", "There is no email {email_id}.", "`dispatcher find` searches for emails."),
        Refusal("unfinished", "not-resendable", "The email is {status}, not finished.", "Cancel it, or wait."),
        Refusal("erased", "not-resendable", "The email cannot be resent: its content was deleted.", _NEW),
        Refusal("expired", "not-resendable", "The email cannot be resent: it has expired.", _NEW),
        Refusal("invalid", "not-resendable", "The copy would not be a valid email: {fault}.", None),
        Refusal("incapable", "no-capable-provider", "{fault}", None),
        Refusal(
            "may_repeat",
            "may-repeat",
            "{why}, so a recipient may get the copy as a second email.",
            "To send it even so, set may_repeat.",
        ),
        Refusal("key", "idempotency-key-reused", "Another email has the message key of the copy.", "Give another key."),
    )
    examples = (
        'resend 0198c2f4-0000-7000-8000-000000000000 --to ann@example.org --reason "typo in the address"',
        'resend 0198c2f4-0000-7000-8000-000000000000 --to ann@example.org --yes --reason "the customer lost it"',
        'resend 0198c2f4-0000-7000-8000-000000000000 --from billing@example.com --reason "sender not verified"',
    )

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        del source
        return {"settings": settings}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Resent]:
        from dispatcher.ops.resending import NotResent, resend

        changes = {name: value for name in _CHANGES if (value := getattr(self, name)) is not None}
        options = {name: parameters[name] for name in ("message_key", "may_repeat", "admit")}
        try:
            made = await resend(source, self.email_id, changes, parameters["settings"], parameters, **options)
        except NotResent as error:
            raise self.refused(error.reason, **error.facts) from None
        except InvalidEmail as error:
            name, *place = re.split(r"[.\[]", error.field.rstrip("]"), maxsplit=1)
            if name in changes:
                raise Mistakes([Mistake(name, error.reason, *place)]) from None
            raise self.refused("invalid", fault=error) from None
        return [] if made is None else [made]


ACTIONS = (Resend,)
