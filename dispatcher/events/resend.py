"""Resend's webhooks: verifies their signatures, and converts their events.

Resend sends its webhooks through Svix. The signature is that of our own webhooks (https://www.standardwebhooks.com),
under other names of the headers. A request has one event. The tag `email_id` names the email; other programs may use
the same account. Resend reports each recipient in an event of its own, whose `to` has only this recipient. If `to` has
several recipients, a rejection concerns them all. Any other event then names none, because perhaps only one bounced.

    email.sent                      accepted
    email.delivered                 delivered
    email.delivery_delayed          deferred
    email.bounced                   bounced: blocked if the content or an attachment was refused; else hard if `type` is
                                    Permanent; else soft
    email.failed, email.suppressed  rejected: Resend took the email, then withheld it
    email.complained                complained
    email.opened, email.clicked     opened, clicked

Sources: https://resend.com/docs/webhooks/event-types, https://resend.com/changelog/webhook-event-visibility
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.webhook import SIGNATURE_PREFIX, digests
from dispatcher.events import fields
from dispatcher.events.contract import EventsRefused, ParsedEvents, Refusal, Skipped
from dispatcher.events.signatures import Freshness, decode

NAME: Final = "resend"
ID_HEADER: Final = "svix-id"
TIMESTAMP_HEADER: Final = "svix-timestamp"
SIGNATURE_HEADER: Final = "svix-signature"
MAX_AGE_SECONDS: Final = 300.0
"""How old a signature may be, because Svix signs each retry anew."""
MAX_SIGNATURES: Final = 8
"""The most signatures that are compared. During a rotation, a request has two."""
_TIMESTAMP: Final = re.compile(r"\d{1,12}", re.ASCII)
_MAX_DIAGNOSES: Final = 3

_KINDS: Final[Mapping[str, tuple[EventKind, str]]] = {
    "email.sent": (EventKind.ACCEPTED, ""),
    "email.delivered": (EventKind.DELIVERED, ""),
    "email.delivery_delayed": (EventKind.DEFERRED, ""),
    "email.bounced": (EventKind.BOUNCED, "bounce"),
    "email.failed": (EventKind.REJECTED, "failed"),
    "email.suppressed": (EventKind.REJECTED, "suppressed"),
    "email.complained": (EventKind.COMPLAINED, ""),
    "email.opened": (EventKind.OPENED, ""),
    "email.clicked": (EventKind.CLICKED, "click"),
}
"""For each type: the kind of event, and the field of `data` that contains its facts."""
_IGNORED: Final = ("email.scheduled", "email.received")
_OF_CONTENT: Final = ("ContentRejected", "AttachmentRejected")


@dataclass(frozen=True, slots=True)
class ResendSignature:
    """The signature headers of a request: well-formed, but not yet verified."""

    message_id: str
    timestamp: int
    digests: list[bytes]


class ResendVerifier:
    """Verifies that a request was signed with one of several secrets, and not too long ago."""

    def __init__(
        self, secrets: Sequence[str], *, max_age_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`secrets`: `whsec_` and base64, several during a rotation. `max_age_seconds`: 0 for any age."""
        self._secrets = secrets
        self._freshness = Freshness(min(max_age_seconds, MAX_AGE_SECONDS), clock)

    def check_headers(self, headers: Mapping[str, str]) -> ResendSignature:
        """Returns the signature. Call this before the body is read, so that a forged request costs little."""
        message_id, timestamp = headers.get(ID_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
        listed = headers.get(SIGNATURE_HEADER, "").split(" ")[:MAX_SIGNATURES]
        found = [each.removeprefix(SIGNATURE_PREFIX) for each in listed if each.startswith(SIGNATURE_PREFIX)]
        if not message_id or not timestamp or not found:
            raise EventsRefused(Refusal.SIGNATURE, "The request has no signature of version 1.")
        if not _TIMESTAMP.fullmatch(timestamp):
            raise EventsRefused(Refusal.SIGNATURE, "The timestamp of the signature is malformed.")
        self._freshness.check(int(timestamp))
        return ResendSignature(message_id, int(timestamp), [decode(each) for each in found])

    def verify(self, given: ResendSignature, body: bytes | bytearray) -> None:
        right = digests(self._secrets, given.message_id, given.timestamp, body)
        if not any(compare_digest(digest, each) for digest in right for each in given.digests):
            detail = "The request is not signed with a secret in DISPATCHER_RESEND_EVENTS_SECRETS."
            raise EventsRefused(Refusal.SIGNATURE, detail)


def parse(body: bytes | bytearray) -> ParsedEvents:
    return ParsedEvents.of([_events(fields.mapping(fields.load_json(body)))])


def _events(given: Mapping[str, Any]) -> list[ProviderEvent] | Skipped:
    name = given.get("type")
    if not isinstance(name, str):
        return Skipped.MALFORMED
    if name not in _KINDS:  # events of contacts, domains and the like say nothing about an email
        return Skipped.UNKNOWN_KIND if name.startswith("email.") and name not in _IGNORED else Skipped.IGNORED
    kind, field = _KINDS[name]
    data = fields.mapping(given.get("data"))
    if (email_id := fields.email_id(_id_tag(data.get("tags")))) is None:
        return Skipped.FOREIGN
    # The time in `data` is the email's, and the same in all of its events.
    if (happened_at := fields.instant(given.get("created_at"))) is None:
        return Skipped.MALFORMED
    facts = fields.mapping(data.get(field))
    diagnoses = fields.items(facts.get("diagnosticCode"))[:_MAX_DIAGNOSES]
    causes = (facts.get("type"), facts.get("subType"), facts.get("reason"))
    return [
        ProviderEvent(
            email_id=email_id,
            provider=NAME,
            kind=kind,
            happened_at=happened_at,
            recipient=recipient,
            bounce=_bounce(facts) if kind is EventKind.BOUNCED else None,
            code=fields.code(*diagnoses),
            detail=fields.detail(*causes, *(diagnoses or [facts.get("message")])),
            distinction=fields.text(facts.get("link")) or "",
        )
        for recipient in _recipients(kind, data)
    ]


def _id_tag(tags: object) -> object:
    """The value of the tag `email_id`. Resend reports tags as an object, and documents a list."""
    if isinstance(tags, dict):
        return tags.get("email_id")
    values = [each.get("value") for each in map(fields.mapping, fields.items(tags)) if each.get("name") == "email_id"]
    return values[0] if len(values) == 1 else None


def _recipients(kind: EventKind, data: Mapping[str, Any]) -> list[str | None]:
    to = [fields.address(each) for each in fields.items(data.get("to"))]
    return to if len(to) == 1 or (to and kind is EventKind.REJECTED) else [None]


def _bounce(facts: Mapping[str, Any]) -> Bounce:
    if facts.get("subType") in _OF_CONTENT:
        return Bounce.BLOCKED
    # `Transient` and `Undetermined` may be anything, such as an out-of-office reply, so they suppress no address.
    return Bounce.HARD if facts.get("type") == "Permanent" else Bounce.SOFT
