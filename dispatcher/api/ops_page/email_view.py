"""What a visitor may see of an email, in the order in which a page shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from dispatcher.domain.email_history import EmailRow, Moment
from dispatcher.domain.outcome import delivered_recipients, left_out
from dispatcher.domain.status import FINISHED, Status
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import EmailHistory

REPEATED_WITHIN: Final = timedelta(minutes=10)
"""If a form repeats the newest decision within this time, the visitor has sent the form twice."""
REVEAL: Final = "reveal"
_LETTERS: Final = re.compile(r"[a-z_]+")
_TONES: Final[Mapping[str, frozenset[str]]] = {
    "bad": frozenset({"failed", "rejected", "bounced", "complained", "dead"}),
    "warn": frozenset({"held", "uncertain", "deferred", "delayed", "cancelled", "expired", "discarded"}),
    "good": frozenset({"sent", "accepted", "delivered", "opened", "clicked", "confirm", "confirmed"}),
}
"""The CSS classes of moments in the timeline, and the words in `Moment.what` that select them. The first match is
used."""
_MAKE_MIME: Final = frozenset({"smtp", "capture"})
"""Providers that send our Message-ID. All other providers create their own."""


def is_finished(email: EmailRow) -> bool:
    """Whether only an operator or a provider's event can still change the email's status."""
    return email.status in FINISHED


def since(email: EmailRow) -> datetime | None:
    """The time since which the email has its status; None if unknown."""
    if email.status == Status.SENT:
        return email.sent_at
    return email.settled_at if is_finished(email) else None


def tone(what: str) -> str:
    """The CSS class of a moment in the timeline, by the words in `what`: `good`, `bad`, `warn`, or empty."""
    words = frozenset(_LETTERS.findall(what))
    return next((each for each, marks in _TONES.items() if words & marks), "")


def newest_decision(history: EmailHistory) -> Moment | None:
    """The newest decision of an operator about the email; None if there is none."""
    return next((each for each in reversed(history.timeline) if each.actor and each.what != REVEAL), None)


def is_repeated(history: EmailHistory, act: Act) -> bool:
    """Whether the visitor has sent a form twice: the newest decision is recent, with the actor and reason of `act`."""
    newest = newest_decision(history)
    return (
        newest is not None
        and (newest.actor, newest.reason) == (act.actor, act.reason)
        and datetime.now(UTC) - newest.at < REPEATED_WITHIN
    )


def fields(email: EmailRow) -> list[tuple[str, object]]:
    """The facts that the page of an email lists, as pairs of label and value, without empty values."""
    status, refused = email.status, None
    if status is Status.SENT:
        refused = left_out(email.last_error)
    delivered = delivered_recipients(status, email.recipient_outcomes)
    rows: Sequence[tuple[str, object]] = (
        ("Lane", email.lane),
        ("Channel", email.channel),
        ("Provider", email.provider),
        ("Error type", email.error_type),
        ("Answer" if status is Status.SENT else "Last error", email.last_error),
        ("Not sent to", refused and f"recipients {refused}, in the order To, Cc, Bcc: the provider refused these"),
        ("Delivered to", delivered and f"recipients {delivered}, in the order To, Cc, Bcc"),
        ("Attempts", _attempts(email)),
        ("May have arrived", "yes: the outcome of an attempt is unknown" if email.was_uncertain else None),
        ("Crashes", f"{email.crash_count:,} while a worker rendered it" if email.crash_count else None),
        ("Not before", email.wait_until),
        ("Expires", email.expires_at),
        ("Leased by", email.locked_by),
        ("Dead letter", _dead_letter(email)),
    )
    return [(label, value) for label, value in rows if value not in (None, "")]


def ids(email: EmailRow) -> list[tuple[str, str]]:
    """The ids by which other systems identify the email, as pairs of label and id, without empty ids."""
    made_here = email.provider in _MAKE_MIME
    rows = (
        ("Email id", str(email.email_id)),
        ("Message key", email.message_key),
        ("Correlation id", email.correlation_id),
        ("Provider's id", email.provider_message_id),
        ("Message-ID", f"{email.email_id}@" if made_here else None),
        ("Trace", email.traceparent),
    )
    return [(label, value) for label, value in rows if value]


def _attempts(email: EmailRow) -> str:
    text = f"{email.attempt_count:,}"
    if email.attempt_base:
        text += f", {email.attempt_count - email.attempt_base:,} since the last replay, recovery or partial delivery"
    if email.redelivery_count:
        text += f", {email.redelivery_count:,} redeliveries"
    return text


def _dead_letter(email: EmailRow) -> str | None:
    if email.status not in (Status.FAILED, Status.HELD):
        return None
    if email.dead_letter_discarded_at is not None:
        return "discarded"
    return "will be published to the DLQ" if email.dead_letter_due_at is not None else None
