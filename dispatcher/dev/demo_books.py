"""The demo's books: what the application enqueued, what the database says, what the SMTP server's ledger saw.

    sent    exactly once in the ledger
    failed  never
    held    never or once: nobody on our side can know, the ledger does
    pending, sending: nothing of it may be left when the demo ends
    the DLQ holds a dead letter for each failed and each held email, and every poison message

Three witnesses who do not know each other; a difference between any two of them is named, and fails the demo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.dev.demo_emails import Fate
from dispatcher.domain.status import FINISHED, Status

_NAMED_AT_MOST: Final = 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the witnesses say.

    Attributes:
        fates: What the server was to say to each email, by the id that enqueue answered; each id once.
        rolled_back: Ids that enqueue answered inside a transaction that was rolled back.
        standing: The status of every row that there is, by id.
        counted: The dispatcher's own count, as `dispatcher status` shows it.
        times: How often the server accepted an email, by the id in its Message-ID.
        dlq: Messages on the DLQ.
        poison: Messages put on the send queue that point to no email.
    """

    fates: Mapping[UUID, Fate]
    rolled_back: frozenset[UUID]
    standing: Mapping[UUID, Status]
    counted: Mapping[Status, int]
    times: Mapping[str, int]
    dlq: int
    poison: int


@dataclass(frozen=True, slots=True)
class Books:
    """The sum of the evidence.

    Attributes:
        emails: Enqueued, each counted once.
        pending: Not finished: pending or sending.
        delivered: Different emails in the server's ledger.
        held_delivered: How many of those are held.
        duplicates: Acceptances beyond each email's first.
        lost: Emails without a row, or `sent` and not in the ledger.
        differences: Where two witnesses disagree, in words; empty if the books balance.
    """

    emails: int
    sent: int
    failed: int
    held: int
    pending: int
    delivered: int
    held_delivered: int
    duplicates: int
    lost: int
    dlq: int
    differences: tuple[str, ...]


def balance(evidence: Evidence) -> Books:
    """The books, with every difference."""
    statuses = Counter(evidence.standing[email_id] for email_id in evidence.fates if email_id in evidence.standing)
    held = [email_id for email_id in evidence.fates if evidence.standing.get(email_id) is Status.HELD]
    return Books(
        emails=len(evidence.fates),
        sent=statuses[Status.SENT],
        failed=statuses[Status.FAILED],
        held=statuses[Status.HELD],
        pending=sum(count for status, count in statuses.items() if status not in FINISHED),
        delivered=len(evidence.times),
        held_delivered=sum(str(email_id) in evidence.times for email_id in held),
        duplicates=sum(times - 1 for times in evidence.times.values()),
        lost=len(_rowless(evidence)) + len(_sent_into_nothing(evidence)),
        dlq=evidence.dlq,
        differences=(*_suspects(evidence), *_wrong_sums(evidence, statuses)),
    )


def _sent_into_nothing(evidence: Evidence) -> list[UUID]:
    return _where(evidence, Status.SENT, lambda times, _: times == 0)


def _unduly_failed(evidence: Evidence) -> list[UUID]:
    return _where(evidence, Status.FAILED, lambda _, fate: fate is not Fate.REFUSED)


def _unduly_finished(evidence: Evidence) -> list[UUID]:
    finished = (Status.SENT, Status.HELD)
    return [i for status in finished for i in _where(evidence, status, lambda _, fate: fate is Fate.REFUSED)]


def _where(evidence: Evidence, status: Status, is_wrong: Callable[[int, Fate], bool]) -> list[UUID]:
    """The emails in that status of which a number of acceptances and a fate make no sense."""
    return [
        email_id
        for email_id, fate in evidence.fates.items()
        if evidence.standing.get(email_id) is status and is_wrong(evidence.times.get(str(email_id), 0), fate)
    ]


def _rowless(evidence: Evidence) -> list[UUID]:
    return [email_id for email_id in evidence.fates if email_id not in evidence.standing]


def _suspects(evidence: Evidence) -> Iterable[str]:
    """Emails about which two witnesses disagree."""
    ours = {str(email_id) for email_id in evidence.fates}
    unfinished = [email_id for email_id in evidence.fates if evidence.standing.get(email_id) not in (*FINISHED, None)]
    yield from _named("enqueued, but without a row", _rowless(evidence))
    yield from _named("sent, but not in the server's ledger", _sent_into_nothing(evidence))
    yield from _named("not finished", unfinished)
    yield from _named("accepted by the server more than once", (i for i, times in evidence.times.items() if times > 1))
    yield from _named("failed, but in the server's ledger", _where(evidence, Status.FAILED, lambda times, _: times > 0))
    yield from _named("in the server's ledger, but not ours", evidence.times.keys() - ours)
    yield from _named("rolled back, but with a row", evidence.rolled_back & evidence.standing.keys())
    strangers = evidence.standing.keys() - evidence.fates.keys() - evidence.rolled_back
    yield from _named("with a row, but never enqueued", strangers)
    yield from _named("failed, though the server would have accepted", _unduly_failed(evidence))
    yield from _named("refused by the server, but not failed", _unduly_finished(evidence))


def _wrong_sums(evidence: Evidence, statuses: Counter[Status]) -> Iterable[str]:
    """Totals on which two witnesses disagree."""
    dead = statuses[Status.FAILED] + statuses[Status.HELD] + evidence.poison
    if evidence.dlq != dead:
        yield f"the DLQ holds {evidence.dlq} messages; failed, held and poison make {dead}"
    for status in Status:
        counted = evidence.counted.get(status, 0)
        if counted != statuses[status]:
            yield f"`dispatcher status` counts {counted} {status}; the rows say {statuses[status]}"


def _named(what: str, ids: Iterable[UUID | str]) -> Iterable[str]:
    """One sentence about these emails, with the first few ids; none if there are none."""
    found = sorted(map(str, ids))
    if found:
        shown = ", ".join(found[:_NAMED_AT_MOST]) + (", …" if len(found) > _NAMED_AT_MOST else "")
        yield f"{len(found)} {what}: {shown}"
