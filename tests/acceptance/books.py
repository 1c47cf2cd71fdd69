"""The books: what became of every email, from the database, the DLQ and the provider's ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

import orjson

from tests.acceptance.rabbit import Message

FINAL: Final = ("sent", "failed", "held")


@dataclass(frozen=True, slots=True)
class Row:
    """An email as the database has it."""

    status: str
    attempt_count: int
    error_type: str | None
    locked_by: str | None

    @property
    def is_final(self) -> bool:
        """Whether no machine does anything more about it."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class Books:
    """What became of each.

    Attributes:
        by_status: The emails by status, as the database has it.
        lost: Emails that nobody would ever hear of again: without a row, or `sent` and never delivered.
        duplicates: Emails that arrived more than once, and how often.
        untrue: Emails that are `failed` and arrived nevertheless.
        strangers: What arrived, or has a row, and was not enqueued.
        unannounced: Failed and held ones without a dead letter.
        misannounced: Dead letters of emails that are neither.
    """

    by_status: Mapping[str, frozenset[UUID]]
    lost: frozenset[UUID]
    duplicates: Mapping[UUID, int]
    untrue: frozenset[UUID]
    strangers: frozenset[UUID]
    unannounced: frozenset[UUID]
    misannounced: frozenset[UUID]

    @classmethod
    def of(
        cls,
        enqueued: Iterable[UUID],
        rows: Mapping[UUID, Row],
        delivered: Mapping[UUID, int],
        letters: Sequence[Message],
    ) -> Self:
        """Balances them."""
        ids = frozenset(enqueued)
        by_status: dict[str, set[UUID]] = {}
        for email_id in ids & rows.keys():
            by_status.setdefault(rows[email_id].status, set()).add(email_id)
        dead = by_status.get("failed", set()) | by_status.get("held", set())
        announced = announced_in(letters).keys()
        return cls(
            by_status={status: frozenset(found) for status, found in by_status.items()},
            lost=(ids - rows.keys()) | (by_status.get("sent", set()) - delivered.keys()),
            duplicates={email_id: times for email_id, times in delivered.items() if times > 1},
            untrue=frozenset(by_status.get("failed", set()) & delivered.keys()),
            strangers=frozenset((delivered.keys() | rows.keys()) - ids),
            unannounced=frozenset(dead - announced),
            misannounced=frozenset(announced - dead),
        )

    def count(self, status: str) -> int:
        """How many stand there."""
        return len(self.by_status.get(status, ()))

    @property
    def counts(self) -> dict[str, int]:
        """How many stand where; statuses without emails left out."""
        return {status: len(ids) for status, ids in self.by_status.items()}

    @property
    def is_announced(self) -> bool:
        """Whether every dead letter is where it should be."""
        return not self.unannounced

    def assert_harmless(self) -> None:
        """Nothing lost, nothing twice, nothing untrue; the DLQ may still name emails that were proved sent since."""
        assert not self.lost, f"lost: {len(self.lost)}"
        assert not self.duplicates, f"duplicates: {self.duplicates}"
        assert not self.untrue, f"failed, yet delivered: {self.untrue}"
        assert not self.strangers, f"never enqueued: {self.strangers}"
        assert not self.unannounced, f"without a dead letter: {self.unannounced}"
        assert self.misannounced <= self.by_status.get("sent", frozenset())

    def assert_balanced(self) -> None:
        """Harmless, and the DLQ names what failed or is held, and nothing else."""
        self.assert_harmless()
        assert not self.misannounced, f"with a dead letter, but alive: {self.misannounced}"


def announced_in(letters: Iterable[Message]) -> Counter[UUID]:
    """How many dead letters each email has; what the broker dead-lettered undecoded is not counted."""
    found: Counter[UUID] = Counter()
    for letter in letters:
        if not letter.was_rejected:
            found[UUID(orjson.loads(letter.body)["email_id"])] += 1
    return found
