"""The oracle: checks whether a run of the demo or of tests/chaos kept the promise.

It compares these records of the run, and calls no code of the product:

    answers       the answers that producers (processes that enqueue) got
    rows          the emails in the database, after all processes have finished
    attempts      the database's table of attempts
    dlq_entries   the dead letters on the DLQ
    accepted      how often the provider, a test server, accepted each email
    wire          the provider's record of every request and connection
    disturbances  which worker the run killed or froze on purpose, and when
    cancelled_at  when a caller got the answer "cancelled" about an email

The requirements:

For every answer to a producer, the database has the email, under the same key. No key has two emails. The provider
never accepted a `failed` email.

With the policy `hold` (see DISPATCHER_ON_UNCERTAIN), the provider accepted each `sent` email once, and each `held`
email at most once. With the policy `resend`, no email is held. The provider accepted each `sent` email, and accepted it
again at most as often as the email's outcome was unknown.

The provider may accept an email in several transactions, each for some of its recipients. Then all this holds for each
recipient. If only some recipients got the email, it is not `sent`, and if it is `failed`, its reason is
`partly_delivered`.

Every failed or held email has a dead letter. The DLQ has no other messages, except those that the run published on
purpose although they point to no email.

A caller that cancels an email gets the answer "cancelled" or "too late". After the answer "cancelled", no request with
the email arrives at the provider. The answer "too late" is given only if a worker has leased the email. An email is
`cancelled` only if a caller cancelled it or if it has an expiry.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from dispatcher.dev.wire import (
    Disturbance,
    Exchange,
    Explanation,
    Fragment,
    RecordedAttempt,
    Wire,
    explain,
    requests_of,
)

T = TypeVar("T", RecordedAttempt, Exchange)

FINAL: Final = ("sent", "failed", "held", "cancelled")
FAULT_SECONDS: Final = 30.0
"""How long after the beginning of a fault a relay may recover an expired lease: the length of the fault, plus that of a
lease, plus the grace period of other hosts."""

MIN_SHARE_SETTLED: Final = 0.9
"""The least share of the uncertain but accepted emails that events must settle. The test server reports events about an
even larger share of its emails."""
ENOUGH_UNCERTAIN: Final = 20
"""If fewer emails are uncertain, the oracle does not check `MIN_SHARE_SETTLED`, because the share varies by chance."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a producer (a process that enqueues) got about one email."""

    message_key: str
    email_id: UUID
    acceptance: str


@dataclass(frozen=True, slots=True)
class Row:
    """An email in the database, leased `leases` times. `reason`: why a cancelled email is cancelled (`cancelled`,
    `expired` or `partly_delivered`), or why a failed email failed."""

    message_key: str
    status: str
    leases: int = 0
    reason: str | None = None
    may_expire: bool = False


@dataclass(frozen=True, slots=True)
class DlqEntry:
    """A dead letter on the DLQ."""

    email_id: UUID
    status: str


@dataclass(frozen=True, slots=True)
class Records:
    """Everything that is known about a run. All times are in seconds since 1970.

    Attributes:
        refused_keys: The keys of the emails that the provider always refuses; None if unknown.
        requested_keys: Every key that a producer has enqueued, even if the producer got no answer.
        expired_leases: How often each email was recovered from an expired lease, according to the relay's log.
        unknown_messages: The bodies of messages on the DLQ that are not dead letters of the dispatcher.
        recipients: The addresses of each email, as the producers enqueued them; empty if not known.
        deliveries: How often the provider accepted each email for each address. Empty if `recipients` is empty.
        garbage: The bodies of messages that the run published on purpose although they point to no email.
        waiting: How many messages are left on the send queue.
        unledgered: Held emails that were leased to a worker that died after its ledger was deleted.
        reported: Emails about which the provider reported an event; None if this provider never reports events.
        settled: Emails that an event of the provider has made `sent`.
        forgeries: The number of stored forged events, plus the number of forged requests that were not refused.
        cancelling: Emails that a caller tried to cancel, even if the caller got no answer.
        cancelled_at: When a caller first got the answer "cancelled" about an email.
        fault_times: The times at which the run did something that can stop a worker from renewing its leases.
    """

    policy: str = "hold"
    refused_keys: frozenset[str] | None = None
    requested_keys: frozenset[str] = frozenset()
    answers: Sequence[Answer] = ()
    rows: Mapping[UUID, Row] = field(default_factory=dict)
    attempts: Sequence[RecordedAttempt] = ()
    expired_leases: Mapping[UUID, int] = field(default_factory=dict)
    dlq_entries: Sequence[DlqEntry] = ()
    unknown_messages: Sequence[bytes] = ()
    garbage: frozenset[bytes] = frozenset()
    waiting: int = 0
    accepted: Mapping[UUID, int] = field(default_factory=dict)
    recipients: Mapping[UUID, Collection[str]] = field(default_factory=dict)
    deliveries: Mapping[tuple[UUID, str], int] = field(default_factory=dict)
    wire: Wire = field(default_factory=Wire)
    disturbances: Sequence[Disturbance] = ()
    faults: Sequence[str] = ()
    unledgered: frozenset[UUID] = frozenset()
    expired_at: Sequence[float] = ()
    fault_times: Sequence[float] = ()
    reported: frozenset[UUID] | None = None
    settled: frozenset[UUID] = frozenset()
    forgeries: int = 0
    cancelling: frozenset[UUID] = frozenset()
    cancelled_at: Mapping[UUID, float] = field(default_factory=dict)
    too_late: frozenset[UUID] = frozenset()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of the oracle's checks.

    Attributes:
        lost: Enqueued emails without a row, emails in no final status, `sent` emails that were never accepted, and
            recipients who are left out of a `sent` email.
        duplicates: Acceptances of emails that the provider had already accepted, for the same recipient.
        held_on_wire: Held emails whose request reached the provider and whose answer reached no worker.
        held_at_edge: Held emails whose worker was killed or frozen just before the first octet was sent, or just after
            the answer was read. In both moments, the ledger says *on the wire* (see `wire`).
        held_without_ledger: Held emails of a worker whose ledger was deleted.
        held_accepted: Held emails that the provider has accepted.
        uncertain: The number of uncertain attempts plus expired leases.
        sent_after_cancelled: Emails whose request arrived at the provider after a caller got the answer "cancelled".
        too_late_wrongly: Emails that no worker ever leased, although a request to cancel got the answer "too late".
        violations: The violated requirements, each with the emails or keys that violate it.
    """

    counts: Mapping[str, int]
    enqueued: int
    lost: int
    duplicates: int
    held_on_wire: int
    held_at_edge: int
    held_without_ledger: int
    held_unexplained: int
    held_accepted: int
    settled: int
    uncertain: int
    sent_after_cancelled: int
    too_late_wrongly: int
    violations: Mapping[str, Sequence[str]]

    @property
    def is_good(self) -> bool:
        return not self.violations


def judge(records: Records) -> Judgement:
    """Checks the records of a run against every requirement. All processes of the run must have finished."""
    all_held = explain_held(records)
    held = Counter(each.why for each in all_held)
    wrong = {
        **_existence(records),
        **_deliveries(records),
        **_announcements(records),
        **_settlements(records),
        **_cancellations(records),
        "held without need": [each.email_id for each in all_held if each.why is Explanation.NONE],
        "leases recovered without need": [at for at in records.expired_at if not _follows_fault(at, records)],
        "processes": records.faults,
    }
    counts = Counter(row.status for row in records.rows.values())
    lost = _missing(records) | _unfinished(records) | _unaccepted(records)
    return Judgement(
        counts={status: counts[status] for status in (*FINAL, "pending", "waiting", "sending") if counts[status]},
        enqueued=len({answer.email_id for answer in records.answers} | records.rows.keys()),
        lost=len(lost) + len(_left_out(records)),
        duplicates=sum(times - 1 for times in (records.deliveries or records.accepted).values() if times > 1),
        held_on_wire=held[Explanation.ON_THE_WIRE],
        held_at_edge=held[Explanation.AT_THE_EDGE],
        held_without_ledger=held[Explanation.WITHOUT_LEDGER],
        held_unexplained=held[Explanation.NONE],
        held_accepted=len(_held_accepted(records)),
        settled=len(records.settled),
        uncertain=sum(unknown_outcomes(records).values()),
        sent_after_cancelled=len(_sent_after_cancelled(records)),
        too_late_wrongly=len(_too_late_wrongly(records)),
        violations={name: _examples(found) for name, found in wrong.items() if found},
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A held email, the reason why it is held, and the records about it."""

    email_id: UUID
    why: Explanation
    attempts: Sequence[RecordedAttempt]
    exchanges: Sequence[Exchange]
    disturbances: Sequence[Disturbance]


def explain_held(records: Records) -> list[Held]:
    attempts, exchanges = _by_email(records.attempts), _by_email(records.wire.exchanges)
    ids = [email_id for email_id, row in records.rows.items() if row.status == "held"]
    used: set[Fragment] = set()
    return [_explained(i, attempts.get(i, []), exchanges.get(i, []), records, used) for i in ids]


def _explained(
    email_id: UUID, own: Sequence[RecordedAttempt], seen: Sequence[Exchange], records: Records, used: set[Fragment]
) -> Held:
    # Explain the uncertain attempts. If there is none, explain all attempts: if the provider's refusal arrives after
    # recovery has set the email to held, the attempt is recorded as refused, and the email stays held.
    unknown = [each for each in own if each.outcome == "uncertain"] or own
    whys = {explain(each, requests_of(each, own, seen), records.wire, records.disturbances, used) for each in unknown}
    if email_id in records.unledgered:
        whys.add(Explanation.WITHOUT_LEDGER)
    why = next((why for why in Explanation if why in whys), Explanation.NONE)
    pids = {each.pid for each in own}
    return Held(email_id, why, own, seen, [each for each in records.disturbances if each.pid in pids])


def _follows_fault(at: float, records: Records) -> bool:
    return any(0 <= at - fault_at < FAULT_SECONDS for fault_at in records.fault_times)


def unknown_outcomes(records: Records) -> Counter[UUID]:
    return Counter(each.email_id for each in records.attempts if each.outcome == "uncertain") + Counter(
        records.expired_leases
    )


def _existence(records: Records) -> dict[str, Iterable[object]]:
    ids_by_key = defaultdict(set)
    for answer in records.answers:
        ids_by_key[answer.message_key].add(answer.email_id)
    keys_in_rows = Counter(row.message_key for row in records.rows.values())
    accepted_keys = Counter(answer.message_key for answer in records.answers if answer.acceptance == "accepted")
    return {
        "answered and without a row": _missing(records),
        "answered under another key": [
            answer.email_id for answer in records.answers if not _has_answered_key(answer, records)
        ],
        "keys with two emails": [key for key, ids in ids_by_key.items() if len(ids) > 1]
        + [key for key, times in keys_in_rows.items() if times > 1],
        "keys accepted twice": [key for key, times in accepted_keys.items() if times > 1],
        "keys that no producer used": keys_in_rows.keys() - records.requested_keys,
        "neither sent nor failed nor held nor cancelled": _unfinished(records),
        "messages left on the send queue": range(records.waiting),
    }


def _deliveries(records: Records) -> dict[str, Iterable[object]]:
    status = {email_id: row.status for email_id, row in records.rows.items()}

    def is_partial(email_id: UUID) -> bool:
        return records.rows[email_id].reason == "partly_delivered" and bool(_missed(email_id, records))

    return {
        "sent and never accepted": _unaccepted(records),
        "sent, and a recipient is left out": _left_out(records),
        "failed and accepted": [i for i in records.accepted if status.get(i) == "failed" and not is_partial(i)],
        "accepted for another recipient": [
            key for key in records.deliveries if key[1] not in records.recipients.get(key[0], key)
        ],
        "accepted and never enqueued": records.accepted.keys() - records.rows.keys(),
        **({} if records.refused_keys is None else _refusals(records.rows, records.refused_keys)),
        **(_repeated_under_hold(records) if records.policy == "hold" else _repeated_under_resend(records)),
    }


def _refusals(rows: Mapping[UUID, Row], refused: frozenset[str]) -> dict[str, Iterable[object]]:
    failed = {row.message_key for row in rows.values() if row.status == "failed"}
    sent_or_held = {row.message_key for row in rows.values() if row.status in ("sent", "held")}
    return {"failed without a refusal": failed - refused, "refused and not failed": sent_or_held & refused}


def _repeated_under_hold(records: Records) -> dict[str, Iterable[object]]:
    return {"accepted more than once": [i for i, times in records.accepted.items() if times > 1]}


def _repeated_under_resend(records: Records) -> dict[str, Iterable[object]]:
    unknown = unknown_outcomes(records)
    return {
        "accepted again without an unknown outcome": [
            i for i, times in records.accepted.items() if times - 1 > unknown[i]
        ],
        "held under resend": [i for i, row in records.rows.items() if row.status == "held"],
    }


def _settlements(records: Records) -> dict[str, Iterable[object]]:
    """Emails that an event should have made `sent`, emails settled without an event, and accepted forgeries. If events
    have settled too few of the accepted emails, each accepted email that is still held is a violation, too."""
    if records.reported is None:
        return {}
    unproven = {i for i, row in records.rows.items() if row.status != "sent"}
    held = _held_accepted(records)
    all_uncertain = len(held) + len(records.settled)
    is_too_much = all_uncertain >= ENOUGH_UNCERTAIN and len(held) > all_uncertain * (1 - MIN_SHARE_SETTLED)
    return {
        "not sent although an event proves it": records.reported & unproven,
        "forged events that were accepted": range(records.forgeries),
        "settled without an event": records.settled - records.reported,
        "too few accepted emails settled by events": held if is_too_much else (),
    }


def _cancellations(records: Records) -> dict[str, Iterable[object]]:
    """Violations of the requirements about cancelled emails, and about the answers to callers that cancel."""
    cancelled = {i: row for i, row in records.rows.items() if row.status == "cancelled"}
    may_end = ("cancelled",) if records.policy == "hold" else ("cancelled", "sent")
    return {
        'sent after "cancelled"': _sent_after_cancelled(records),
        '"too late", but never leased': _too_late_wrongly(records),
        '"cancelled", but it has another status': [
            i for i in records.cancelled_at if i in records.rows and records.rows[i].status not in may_end
        ],
        "cancelled without a request": [
            i
            for i, row in cancelled.items()
            if row.reason != "expired"
            and i not in records.cancelling
            and not (row.reason == "partly_delivered" and row.may_expire)
        ],
        "expired without an expiry": [
            i for i, row in cancelled.items() if row.reason == "expired" and not row.may_expire
        ],
    }


def _sent_after_cancelled(records: Records) -> set[UUID]:
    never = float("inf")
    return {
        each.email_id
        for each in records.wire.exchanges
        if each.read_at > records.cancelled_at.get(each.email_id, never)
    }


def _too_late_wrongly(records: Records) -> set[UUID]:
    return {i for i in records.too_late if i in records.rows and not records.rows[i].leases}


def _held_accepted(records: Records) -> set[UUID]:
    return {i for i, row in records.rows.items() if row.status == "held" and records.accepted.get(i)}


def _announcements(records: Records) -> dict[str, Iterable[object]]:
    announced = {entry.email_id for entry in records.dlq_entries}
    dead = {email_id for email_id, row in records.rows.items() if row.status in ("failed", "held")}
    return {
        "failed or held without a dead letter": dead - announced,
        "dead letter with a wrong status": [
            entry.email_id for entry in records.dlq_entries if not _agrees_with_row(entry, records)
        ],
        "on the DLQ and not garbage": [body for body in records.unknown_messages if body not in records.garbage],
    }


def _agrees_with_row(entry: DlqEntry, records: Records) -> bool:
    """Whether a dead letter agrees with the email's status. After a held email's dead letter was published, evidence
    can show that the email was sent, or (if its host had vanished) that it failed, and the email can expire."""
    row = records.rows.get(entry.email_id)
    if row is None or row.status == entry.status:
        return row is not None
    was_recovered = records.expired_leases.get(entry.email_id, 0) > 0
    may_follow = ("sent", "cancelled", "failed") if was_recovered else ("sent", "cancelled")
    return entry.status == "held" and row.status in may_follow


def _has_answered_key(answer: Answer, records: Records) -> bool:
    """Whether the answer's email has the answer's message key; also without a row, which `_missing` reports."""
    row = records.rows.get(answer.email_id)
    return row is None or row.message_key == answer.message_key


def _missing(records: Records) -> set[UUID]:
    return {answer.email_id for answer in records.answers} - records.rows.keys()


def _unfinished(records: Records) -> set[UUID]:
    return {email_id for email_id, row in records.rows.items() if row.status not in FINAL}


def _unaccepted(records: Records) -> set[UUID]:
    return {i for i, row in records.rows.items() if row.status == "sent" and not records.accepted.get(i)}


def _missed(email_id: UUID, records: Records) -> set[str]:
    return {each for each in records.recipients.get(email_id, ()) if not records.deliveries.get((email_id, each))}


def _left_out(records: Records) -> list[str]:
    sent = (i for i, row in records.rows.items() if row.status == "sent" and records.accepted.get(i))
    return [f"{i} to {address}" for i in sent for address in _missed(i, records)]


def _by_email(things: Iterable[T]) -> dict[UUID, list[T]]:
    found: dict[UUID, list[T]] = {}
    for thing in things:
        found.setdefault(thing.email_id, []).append(thing)
    return found


def _examples(found: Iterable[object]) -> list[str]:
    return [str(each) for each in found]
