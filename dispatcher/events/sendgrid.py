"""SendGrid's event webhook: verifies its signature, and converts its events.

A request has a JSON array of events. SendGrid signs the timestamp header and the raw body with ECDSA (P-256, SHA-256).
An event of an email from this service has our custom argument `email_id`; other programs may use the same account.

    processed           accepted
    delivered           delivered
    deferred            deferred
    bounce              bounced: blocked if `type` is `blocked`; soft if the mailbox is full, the message too large, or
                        the status code begins with 4; else hard
    dropped             rejected: SendGrid took the email, then withheld it
    spamreport          complained
    unsubscribe         unsubscribed; also group_unsubscribe, with the code `group`
    open, click         opened, clicked
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from dispatcher.domain.event import OF_TOPIC, Bounce, EventKind, ProviderEvent
from dispatcher.errors import ConfigurationError
from dispatcher.events import fields
from dispatcher.events.contract import EventsRefused, ParsedEvents, Refusal, Skipped
from dispatcher.events.signatures import Freshness, decode

NAME: Final = "sendgrid"
SIGNATURE_HEADER: Final = "x-twilio-email-event-webhook-signature"
TIMESTAMP_HEADER: Final = "x-twilio-email-event-webhook-timestamp"
_TIMESTAMP: Final = re.compile(r"\d{1,12}", re.ASCII)
_ALGORITHM: Final = ECDSA(Prehashed(SHA256()))

_KINDS: Final[Mapping[object, EventKind]] = {
    "processed": EventKind.ACCEPTED,
    "delivered": EventKind.DELIVERED,
    "deferred": EventKind.DEFERRED,
    "bounce": EventKind.BOUNCED,
    "dropped": EventKind.REJECTED,
    "spamreport": EventKind.COMPLAINED,
    "unsubscribe": EventKind.UNSUBSCRIBED,
    "group_unsubscribe": EventKind.UNSUBSCRIBED,
    "open": EventKind.OPENED,
    "click": EventKind.CLICKED,
}
_IGNORED: Final = frozenset({"group_resubscribe", "account_status_change"})
_SOFT_CODES: Final = frozenset({"5.2.2", "5.2.3", "5.3.4"})
"""The mailbox is full, or the message is too large for the mailbox or the server (RFC 3463)."""


@dataclass(frozen=True, slots=True)
class SendGridSignature:
    """The signature headers of a request: well-formed, but not yet verified."""

    timestamp: bytes
    signature: bytes


class SendGridVerifier:
    """Verifies that a request was signed with one of several keys, and not too long ago."""

    def __init__(self, keys: Sequence[str], *, max_age_seconds: float, clock: Callable[[], float] = time.time) -> None:
        """`keys`: public keys in base64 (SPKI), several during a rotation. `max_age_seconds`: 0 for any age."""
        self._keys = [_key_of(text) for text in keys]
        self._freshness = Freshness(max_age_seconds, clock)

    def check_headers(self, headers: Mapping[str, str]) -> SendGridSignature:
        """Returns the signature. Call this before the body is read, so that a forged request costs little."""
        timestamp, encoded = headers.get(TIMESTAMP_HEADER, ""), headers.get(SIGNATURE_HEADER, "")
        if not timestamp or not encoded:
            raise EventsRefused(Refusal.SIGNATURE, "The request has no signature. Turn on the signed event webhook.")
        if not _TIMESTAMP.fullmatch(timestamp):
            raise EventsRefused(Refusal.SIGNATURE, "The timestamp of the signature is malformed.")
        self._freshness.check(int(timestamp))
        return SendGridSignature(timestamp.encode(), decode(encoded))

    def verify(self, given: SendGridSignature, body: bytes | bytearray) -> None:
        digest = sha256(given.timestamp)
        digest.update(body)
        for key in self._keys:
            with suppress(InvalidSignature):
                key.verify(given.signature, digest.digest(), _ALGORITHM)
                return
        detail = "The request is not signed with a key in DISPATCHER_SENDGRID_EVENTS_KEYS."
        raise EventsRefused(Refusal.SIGNATURE, detail)


def _key_of(text: str) -> EllipticCurvePublicKey:
    try:
        key = load_der_public_key(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise ConfigurationError(
            ["DISPATCHER_SENDGRID_EVENTS_KEYS has a key that is not a P-256 public key. Copy it from SendGrid again."]
        ) from error
    assert isinstance(key, EllipticCurvePublicKey)  # the setting's parser has checked the key's type
    return key


def parse(body: bytes | bytearray) -> ParsedEvents:
    found = fields.load_json(body)
    listed = found if isinstance(found, list) else [found]
    return ParsedEvents.of(_event(each) if isinstance(each, dict) else Skipped.MALFORMED for each in listed)


def _event(given: Mapping[str, Any]) -> tuple[ProviderEvent] | Skipped:
    name = given.get("event")
    if not isinstance(name, str):
        return Skipped.MALFORMED
    if (kind := _KINDS.get(name)) is None:
        return Skipped.IGNORED if name in _IGNORED else Skipped.UNKNOWN_KIND
    email_id, happened_at = fields.email_id(given.get("email_id")), fields.epoch(given.get("timestamp"))
    if email_id is None:  # not our email: another program may use an argument with this name
        return Skipped.FOREIGN
    if happened_at is None:
        return Skipped.MALFORMED
    code = OF_TOPIC if name == "group_unsubscribe" else fields.code(given.get("status"), given.get("response"))
    return (
        ProviderEvent(
            email_id=email_id,
            provider=NAME,
            kind=kind,
            happened_at=happened_at,
            recipient=fields.address(given.get("email")),
            bounce=_bounce(given, code) if kind is EventKind.BOUNCED else None,
            code=code,
            detail=fields.detail(given.get("reason"), given.get("response")),
            distinction=fields.text(given.get("url")) or "",
        ),
    )


def _bounce(given: Mapping[str, Any], code: str | None) -> Bounce:
    if given.get("type") == "blocked":  # ignore the code: SendGrid reports some blocks with permanent codes
        return Bounce.BLOCKED
    # If `type` is missing, the bounce may be a block, which must not count as a hard bounce.
    if given.get("type") != "bounce":
        return Bounce.SOFT
    return Bounce.SOFT if code is not None and (code in _SOFT_CODES or code.startswith("4")) else Bounce.HARD
