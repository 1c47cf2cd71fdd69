"""Explains why the outcome of an attempt is unknown, after a run of the demo or of tests/chaos.

Uses the record of all requests and connections, which the test server (the provider) writes, and the list of
disturbances: which worker the run killed or froze on purpose, and when. The explanations, in this order:

    on the wire   The request reached the provider, but no complete answer reached a running worker. Or a part of the
                  request had arrived when the worker was killed or frozen. Or the provider closed the connection while
                  the request was being sent.
    at the edge   The worker was killed or frozen in one of two moments in which the ledger's slot says *on the wire*,
                  but the email is not on the wire. Either the first octet was not sent yet. Or the answer was read, but
                  the slot does not say *answered* yet.
    without a ledger   The email was leased to a worker that died after its ledger was deleted.
    unexplained   None of these applies: there was no reason to hold the email or to send it again.

An interrupted connection to PostgreSQL is no explanation: when the host reaches PostgreSQL again, the host's in-flight
ledger still shows whether the email was answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

EDGE_SECONDS: Final = 3.0
"""How long a worker may take to process an answer: microseconds on an idle machine, seconds during a chaos run."""
CLOCK_SECONDS: Final = 0.01
"""How much the times that two processes record may disagree."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request in the provider's record. Times are in seconds since 1970.

    Attributes:
        read_at: When the request had arrived completely.
        answered_at: When the kernel took the whole answer while the connection was open; None if this never happened.
        was_read: Whether the client read the answer. False if the connection ended with a reset: the client closed it
            before all octets were read.
    """

    email_id: UUID
    read_at: float
    answered_at: float | None = None
    was_read: bool = True


@dataclass(frozen=True, slots=True)
class Fragment:
    """A request that arrived only in part. So it is unknown which email the request contained."""

    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Wire:
    """The provider's record of the requests that arrived completely or in part (`fragments`), and of the times at which
    it closed connections. A client may send a request before it detects that."""

    exchanges: Sequence[Exchange] = ()
    fragments: Sequence[Fragment] = ()
    closed_at: Sequence[float] = ()

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> Wire:
        """Makes the record from a test server's events (see `HttpDouble.record_event`, `SmtpSink.record_event`)."""
        closed_at = [event["at"] for event in events if event["event"] == "ended" and event["by_us"]]
        return cls(_exchanges(events), _fragments(events), closed_at)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The run killed or froze a worker on purpose, at `since` until it was resumed: infinity if it was killed or never
    resumed."""

    pid: int
    since: float
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One row of the table of attempts. `worker` is `host:slot:pid:random`, or `host:slot:relay` if the relay recorded
    the attempt of a frozen worker."""

    email_id: UUID
    number: int
    worker: str
    started_at: float
    finished_at: float
    outcome: str

    @property
    def pid(self) -> int | None:
        """The worker's pid; None if the relay recorded the attempt of a frozen worker."""
        field = self.worker.split(":")[-2]
        return int(field) if field.isdigit() else None


class Explanation(StrEnum):
    """Why the outcome of an attempt is unknown."""

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
    used: set[Fragment],
) -> Explanation:
    """Why this attempt's outcome is unknown. `seen` are its requests that arrived completely. Adds the fragment that
    explains this attempt to `used`, because a fragment explains only one."""
    own = [each for each in disturbances if attempt.pid in (each.pid, None) and each.until > attempt.started_at]
    if any(_is_unanswered(each, own) for each in seen):
        return Explanation.ON_THE_WIRE
    if not seen:
        return _explain_unseen(attempt, wire, own, used)
    edges = [each for each in seen if any(0 <= d.since - (each.answered_at or 0) < EDGE_SECONDS for d in own)]
    return Explanation.AT_THE_EDGE if edges else Explanation.NONE


def _explain_unseen(
    attempt: RecordedAttempt, wire: Wire, own: Sequence[Disturbance], used: set[Fragment]
) -> Explanation:
    if any(attempt.started_at - CLOCK_SECONDS <= at <= attempt.finished_at for at in wire.closed_at):
        return Explanation.ON_THE_WIRE
    for fragment in wire.fragments:
        if fragment not in used and any(_was_cut_off(fragment, attempt, each) for each in own):
            used.add(fragment)
            return Explanation.ON_THE_WIRE
    return Explanation.AT_THE_EDGE if own else Explanation.NONE


def _was_cut_off(fragment: Fragment, attempt: RecordedAttempt, disturbance: Disturbance) -> bool:
    """Whether this fragment (a partly arrived request) began during the attempt, and the disturbance cut it off."""
    begins_within = attempt.started_at - CLOCK_SECONDS <= fragment.began_at <= disturbance.since + EDGE_SECONDS
    return begins_within and fragment.ended_at >= disturbance.since


def requests_of(
    attempt: RecordedAttempt, all_attempts: Iterable[RecordedAttempt], seen: Iterable[Exchange]
) -> list[Exchange]:
    """The requests of this attempt: they arrived after it began, and before the email's next attempt began."""
    later = [each.started_at for each in all_attempts if each.started_at > attempt.started_at]
    until = min(later, default=math.inf)
    return [each for each in seen if attempt.started_at - CLOCK_SECONDS <= each.read_at < until]


def _is_unanswered(exchange: Exchange, own: Sequence[Disturbance]) -> bool:
    """Whether no complete answer to this request reached a running worker. `own` are the kills and freezes that may
    have affected it."""
    answered_at = exchange.answered_at
    if answered_at is None or not exchange.was_read:
        return True
    return any(each.since <= answered_at <= each.until for each in own)
