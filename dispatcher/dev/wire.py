"""What was physically on the wire: the double's record of every request, the adversary's of every process, and the
attempts of which nobody knows the outcome, laid beside each other.

Such an attempt is explained by one of these, and in this order:

    on the wire   its request reached the provider, and no whole answer reached a worker that was awake to read it; or
                  it had begun to arrive when the worker was killed or frozen; or the provider closed a connection
                  meanwhile, and the request went into that one
    at the edge   the worker was killed or frozen in one of the two moments that no ledger can see: the slot says *on
                  the wire* and the first octet has not left yet, so that the provider saw nothing; or the answer was
                  read and the slot does not say *answered* yet
    without a ledger   it was leased to a worker whose ledger was deleted, and that then died
    unexplained   neither: it was held, or sent again, without need

That its host was cut off from PostgreSQL explains nothing: once it is back, its ledger says what became of the email.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

EDGE_SECONDS: Final = 3.0
"""How long after an answer its reader may still be at work on it: microseconds, and whatever else the cores do, which a
storm keeps busy."""
CLOCK_SECONDS: Final = 0.01
"""Between two processes' readings of the same clock."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as the provider saw it.

    Attributes:
        read_at: When it had arrived whole.
        answered_at: When a whole answer was handed to the kernel, the connection standing; None if it never was.
        was_read: Whether the answer was not left unread: a peer that ends with octets unread resets the connection.
    """

    email_id: UUID
    read_at: float
    answered_at: float | None = None
    was_read: bool = True


@dataclass(frozen=True, slots=True)
class Fragment:
    """A request of which only the beginning arrived, so that nobody knows whose it was."""

    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Wire:
    """What the provider saw.

    Attributes:
        exchanges: The requests that were read whole.
        fragments: The others.
        closed_at: When the provider itself closed connections, of which whoever keeps them for the next request hears
            late.
    """

    exchanges: Sequence[Exchange] = ()
    fragments: Sequence[Fragment] = ()
    closed_at: Sequence[float] = ()

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> Wire:
        """From the double's record (`HttpDouble.witness`)."""
        closed_at = [event["at"] for event in events if event["event"] == "ended" and event["by_us"]]
        return cls(_exchanges(events), _fragments(events), closed_at)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A worker was killed, or frozen for a time.

    Attributes:
        until: When it went on; infinity if it never did.
    """

    pid: int
    since: float
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One attempt on record.

    Attributes:
        worker: Who made it, as `host:slot:pid:letters`; or `host:slot:relay`, for one that was frozen in that slot.
    """

    email_id: UUID
    number: int
    worker: str
    started_at: float
    finished_at: float
    outcome: str

    @property
    def pid(self) -> int | None:
        """Whose attempt it was; None where the relay recorded it for whoever was frozen."""
        field = self.worker.split(":")[-2]
        return int(field) if field.isdigit() else None


class Explanation(StrEnum):
    """Why nobody knows what became of an attempt."""

    ON_THE_WIRE = "on the wire"
    AT_THE_EDGE = "at the edge"
    WITHOUT_LEDGER = "without a ledger"
    NONE = "unexplained"


def _exchanges(events: Iterable[Mapping[str, Any]]) -> list[Exchange]:
    found: list[Exchange] = []
    last: dict[int, int] = {}
    for event in events:
        connection = event["connection"]
        if event["event"] == "read":
            last[connection] = len(found)
            found.append(Exchange(UUID(event["email_id"]), event["at"]))
        elif (index := last.get(connection)) is None:
            continue
        elif event["event"] == "answered":
            found[index] = replace(found[index], answered_at=event["at"])
        elif event["event"] == "ended":
            found[index] = replace(found[index], was_read=not event["by_reset"])
    return found


def _fragments(events: Iterable[Mapping[str, Any]]) -> list[Fragment]:
    found: list[Fragment] = []
    begun: dict[int, float] = {}
    for event in events:
        if event["event"] == "began":
            begun[event["connection"]] = event["at"]
        elif event["event"] == "read":
            begun.pop(event["connection"], None)
        elif event["event"] == "ended" and event["connection"] in begun:
            found.append(Fragment(begun.pop(event["connection"]), event["at"]))
    return found


def explain(
    attempt: RecordedAttempt,
    seen: Sequence[Exchange],
    wire: Wire,
    disturbances: Iterable[Disturbance],
    spent: set[Fragment],
) -> Explanation:
    """Why this attempt's outcome is unknown.

    Args:
        seen: The requests of this email that belong to this attempt (`requests_of`).
        disturbances: Of any worker.
        spent: Fragments that explain others already; what explains this one is added.
    """
    own = [each for each in disturbances if attempt.pid in (each.pid, None) and each.until > attempt.started_at]
    if any(_is_unanswered(each, own) for each in seen):
        return Explanation.ON_THE_WIRE
    if not seen:
        return _explain_unseen(attempt, wire, own, spent)
    edges = [each for each in seen if any(0 <= d.since - (each.answered_at or 0) < EDGE_SECONDS for d in own)]
    return Explanation.AT_THE_EDGE if edges else Explanation.NONE


def _explain_unseen(
    attempt: RecordedAttempt, wire: Wire, own: Sequence[Disturbance], spent: set[Fragment]
) -> Explanation:
    if any(attempt.started_at - CLOCK_SECONDS <= at <= attempt.finished_at for at in wire.closed_at):
        return Explanation.ON_THE_WIRE
    for fragment in wire.fragments:
        if fragment not in spent and any(_was_cut_off(fragment, attempt, each) for each in own):
            spent.add(fragment)
            return Explanation.ON_THE_WIRE
    return Explanation.AT_THE_EDGE if own else Explanation.NONE


def _was_cut_off(fragment: Fragment, attempt: RecordedAttempt, disturbance: Disturbance) -> bool:
    """Whether it began in this attempt, and its end is the disturbance's work."""
    begins_within = attempt.started_at - CLOCK_SECONDS <= fragment.began_at <= disturbance.since + EDGE_SECONDS
    return begins_within and fragment.ended_at >= disturbance.since


def requests_of(
    attempt: RecordedAttempt, all_attempts: Iterable[RecordedAttempt], seen: Iterable[Exchange]
) -> list[Exchange]:
    """The email's requests that came in this attempt: after it began, and before the next one did."""
    later = [each.started_at for each in all_attempts if each.started_at > attempt.started_at]
    until = min(later, default=math.inf)
    return [each for each in seen if attempt.started_at - CLOCK_SECONDS <= each.read_at < until]


def _is_unanswered(exchange: Exchange, own: Sequence[Disturbance]) -> bool:
    """Whether no whole answer reached a reader that was awake."""
    answered_at = exchange.answered_at
    if answered_at is None or not exchange.was_read:
        return True
    return any(each.since <= answered_at <= each.until for each in own)
