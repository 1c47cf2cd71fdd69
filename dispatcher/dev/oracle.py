"""The oracle: judges the demo, and a storm of tests/chaos, by the books alone. Pure, and without a line of the product.

    told      what each producer was told, and by which keys it asked
    rows      the database, after everything has come to rest
    attempts  the audit of every attempt
    letters   the DLQ
    accepted  the provider's ledger
    wire      its view of every request and connection
    diary     what the adversary did to whom, and when

What must hold: an email that a producer was told of exists, one for each key; `sent` was accepted once, `failed` never,
`held` once or never; whatever failed or is held has a dead letter, and the DLQ has nothing else but garbage. With the
policy `resend` nothing is held, and an email was accepted again no more often than its outcome was unknown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

FINAL: Final = ("sent", "failed", "held")
STRUCK_SECONDS: Final = 30.0
"""So long after a deed a lease may expire by it: the deed lasts, then the lease and the grace of other hosts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a producer was told about one email."""

    message_key: str
    email_id: UUID
    acceptance: str


@dataclass(frozen=True, slots=True)
class Row:
    """An email as the database has it.

    Attributes:
        is_completed: Whether its idempotency row says so, too.
    """

    message_key: str
    status: str
    is_completed: bool = False


@dataclass(frozen=True, slots=True)
class DlqEntry:
    """A dead letter of ours."""

    email_id: UUID
    status: str


@dataclass(frozen=True, slots=True)
class Books:
    """All that is known from outside.

    Attributes:
        policy: `hold` or `resend`.
        refused_keys: Keys of the emails that the provider refuses, each time; None if nobody knows.
        requested_keys: Every key by which a producer has asked, answered or not.
        expired_leases: How often each email's lease ended without a word from its owner, by the relay's log.
        unknown_messages: Bodies on the DLQ that are no letters of ours.
        garbage: Bodies that the adversary injected.
        waiting: Messages that are left on the send queue.
        faults: What went wrong with the processes themselves.
        unledgered: Held emails that were leased to a worker whose ledger was deleted, and that then died.
        expired_at: When a relay took a lease for expired whose host it did not know.
        fault_times: When the adversary did anything that can keep a worker from renewing its leases.
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
    wire: Wire = field(default_factory=Wire)
    disturbances: Sequence[Disturbance] = ()
    faults: Sequence[str] = ()
    unledgered: frozenset[UUID] = frozenset()
    expired_at: Sequence[float] = ()
    fault_times: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the books come to.

    Attributes:
        counts: Emails by status.
        lost: Emails that nobody would ever hear of again: without a row, without an end, or `sent` and never accepted.
        duplicates: Acceptances beyond each email's first.
        held_on_wire: Held emails whose request reached the provider and whose answer reached nobody.
        held_at_edge: Held emails whose worker was struck in a moment that no ledger can see.
        held_without_ledger: Held emails of a worker whose ledger was deleted.
        held_unexplained: The others.
        uncertain: Attempts and leases that ended without anybody knowing the outcome.
        violations: What is wrong, with examples; empty if all is well.
    """

    counts: Mapping[str, int]
    enqueued: int
    lost: int
    duplicates: int
    held_on_wire: int
    held_at_edge: int
    held_without_ledger: int
    held_unexplained: int
    uncertain: int
    violations: Mapping[str, Sequence[str]]

    @property
    def is_good(self) -> bool:
        """Whether everything that must hold does."""
        return not self.violations


def judge(books: Books) -> Verdict:
    """The verdict on a storm that has come to rest."""
    all_held = explain_held(books)
    held = Counter(each.why for each in all_held)
    wrong = {
        **_existence(books),
        **_deliveries(books),
        **_announcements(books),
        "held without need": [each.email_id for each in all_held if each.why is Explanation.NONE],
        "leases taken without need": [at for at in books.expired_at if not _was_struck_before(at, books)],
        "processes": books.faults,
    }
    counts = Counter(row.status for row in books.rows.values())
    lost = _missing(books) | _unfinished(books) | _unaccepted(books)
    return Verdict(
        counts={status: counts[status] for status in (*FINAL, "pending", "sending") if counts[status]},
        enqueued=len({answer.email_id for answer in books.answers} | books.rows.keys()),
        lost=len(lost),
        duplicates=sum(times - 1 for times in books.accepted.values() if times > 1),
        held_on_wire=held[Explanation.ON_THE_WIRE],
        held_at_edge=held[Explanation.AT_THE_EDGE],
        held_without_ledger=held[Explanation.WITHOUT_LEDGER],
        held_unexplained=held[Explanation.NONE],
        uncertain=sum(unknown_outcomes(books).values()),
        violations={name: _examples(found) for name, found in wrong.items() if found},
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A held email, and everything that is known of it."""

    email_id: UUID
    why: Explanation
    attempts: Sequence[RecordedAttempt]
    exchanges: Sequence[Exchange]
    disturbances: Sequence[Disturbance]


def explain_held(books: Books) -> list[Held]:
    """Why each held email is held."""
    attempts, exchanges = _by_email(books.attempts), _by_email(books.wire.exchanges)
    ids = [email_id for email_id, row in books.rows.items() if row.status == "held"]
    spent: set[Fragment] = set()
    return [_explained(i, attempts.get(i, []), exchanges.get(i, []), books, spent) for i in ids]


def _explained(
    email_id: UUID, own: Sequence[RecordedAttempt], seen: Sequence[Exchange], books: Books, spent: set[Fragment]
) -> Held:
    # A refusal that came after the rescue had judged is on record, and the email stays held.
    unknown = [each for each in own if each.outcome == "uncertain"] or own
    whys = {explain(each, requests_of(each, own, seen), books.wire, books.disturbances, spent) for each in unknown}
    if email_id in books.unledgered:
        whys.add(Explanation.WITHOUT_LEDGER)
    why = next((why for why in Explanation if why in whys), Explanation.NONE)
    pids = {each.pid for each in own}
    return Held(email_id, why, own, seen, [each for each in books.disturbances if each.pid in pids])


def _was_struck_before(at: float, books: Books) -> bool:
    return any(0 <= at - struck_at < STRUCK_SECONDS for struck_at in books.fault_times)


def unknown_outcomes(books: Books) -> Counter[UUID]:
    """How often nobody knew an email's outcome, by the attempts on record and the leases that expired."""
    return Counter(each.email_id for each in books.attempts if each.outcome == "uncertain") + Counter(
        books.expired_leases
    )


def _existence(books: Books) -> dict[str, Iterable[object]]:
    ids_by_key = defaultdict(set)
    for answer in books.answers:
        ids_by_key[answer.message_key].add(answer.email_id)
    keys_in_rows = Counter(row.message_key for row in books.rows.values())
    accepted_keys = Counter(answer.message_key for answer in books.answers if answer.acceptance == "accepted")
    return {
        "told of and without a row": _missing(books),
        "told of under another key": [answer.email_id for answer in books.answers if not _names(answer, books)],
        "keys with two emails": [key for key, ids in ids_by_key.items() if len(ids) > 1]
        + [key for key, times in keys_in_rows.items() if times > 1],
        "keys accepted twice": [key for key, times in accepted_keys.items() if times > 1],
        "keys that nobody asked by": keys_in_rows.keys() - books.requested_keys,
        "neither sent nor failed nor held": _unfinished(books),
        "messages left on the send queue": range(books.waiting),
    }


def _deliveries(books: Books) -> dict[str, Iterable[object]]:
    status = {email_id: row.status for email_id, row in books.rows.items()}
    return {
        "sent and never accepted": _unaccepted(books),
        "sent and not completed": [i for i, row in books.rows.items() if row.status == "sent" and not row.is_completed],
        "failed and accepted": [i for i in books.accepted if status.get(i) == "failed"],
        "accepted and never enqueued": books.accepted.keys() - books.rows.keys(),
        **({} if books.refused_keys is None else _refusals(books.rows, books.refused_keys)),
        **(_repeated_under_hold(books) if books.policy == "hold" else _repeated_under_resend(books)),
    }


def _refusals(rows: Mapping[UUID, Row], refused: frozenset[str]) -> dict[str, Iterable[object]]:
    failed = {row.message_key for row in rows.values() if row.status == "failed"}
    sent_or_held = {row.message_key for row in rows.values() if row.status in ("sent", "held")}
    return {"failed without a refusal": failed - refused, "refused and not failed": sent_or_held & refused}


def _repeated_under_hold(books: Books) -> dict[str, Iterable[object]]:
    return {"accepted more than once": [i for i, times in books.accepted.items() if times > 1]}


def _repeated_under_resend(books: Books) -> dict[str, Iterable[object]]:
    unknown = unknown_outcomes(books)
    return {
        "accepted again without a doubt": [i for i, times in books.accepted.items() if times - 1 > unknown[i]],
        "held under resend": [i for i, row in books.rows.items() if row.status == "held"],
    }


def _announcements(books: Books) -> dict[str, Iterable[object]]:
    announced = {letter.email_id for letter in books.dlq_entries}
    dead = {email_id for email_id, row in books.rows.items() if row.status in ("failed", "held")}
    return {
        "dead without a dead letter": dead - announced,
        "alive with a dead letter": [letter.email_id for letter in books.dlq_entries if not _is_true(letter, books)],
        "on the DLQ and not garbage": [body for body in books.unknown_messages if body not in books.garbage],
    }


def _is_true(letter: DlqEntry, books: Books) -> bool:
    """Whether a dead letter says what the database says. A held email may be proved sent after it; or failed, if it was
    held because its host was away."""
    row = books.rows.get(letter.email_id)
    if row is None or row.status == letter.status:
        return row is not None
    was_held = letter.status == "held"
    return was_held and (
        row.status == "sent" or (row.status == "failed" and books.expired_leases.get(letter.email_id, 0) > 0)
    )


def _names(answer: Answer, books: Books) -> bool:
    """Whether the email, if it is there, has the key that the producer asked by."""
    row = books.rows.get(answer.email_id)
    return row is None or row.message_key == answer.message_key


def _missing(books: Books) -> set[UUID]:
    return {answer.email_id for answer in books.answers} - books.rows.keys()


def _unfinished(books: Books) -> set[UUID]:
    return {email_id for email_id, row in books.rows.items() if row.status not in FINAL}


def _unaccepted(books: Books) -> set[UUID]:
    return {i for i, row in books.rows.items() if row.status == "sent" and not books.accepted.get(i)}


def _by_email(things: Iterable[T]) -> dict[UUID, list[T]]:
    found: dict[UUID, list[T]] = {}
    for thing in things:
        found.setdefault(thing.email_id, []).append(thing)
    return found


def _examples(found: Iterable[object]) -> list[str]:
    return [str(each) for each in found]
