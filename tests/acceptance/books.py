"""Compares the enqueued emails with the database, the DLQ and the provider's list of accepted emails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

import orjson

from tests.acceptance.rabbit import QueueMessage

FINAL: Final = ("sent", "failed", "held", "cancelled")


@dataclass(frozen=True, slots=True)
class EmailRecord:
    status: str
    attempt_count: int
    error_type: str | None
    locked_by: str | None


@dataclass(frozen=True, slots=True)
class Books:
    """What happened to each email.

    Attributes:
        by_status: The emails with each status in the database.
        lost: Emails that have no row, and emails that are `sent` but never arrived. No process would ever notice them.
        duplicates: Emails that arrived more than once, and how often.
        untrue: Emails that are `failed` but arrived.
        strangers: Emails that arrived or have a row, but were never enqueued.
        unannounced: Failed and held emails without a dead letter.
        misannounced: Dead letters of emails that are neither failed nor held.
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
        rows: Mapping[UUID, EmailRecord],
        delivered: Mapping[UUID, int],
        dead_letters: Sequence[QueueMessage],
    ) -> Self:
        ids = frozenset(enqueued)
        by_status: dict[str, set[UUID]] = {}
        for email_id in ids & rows.keys():
            by_status.setdefault(rows[email_id].status, set()).add(email_id)
        dead = by_status.get("failed", set()) | by_status.get("held", set())
        # If all recipients of an email are suppressed, the email fails without a dead letter.
        dead = {email_id for email_id in dead if rows[email_id].error_type != "suppressed"}
        announced = announced_in(dead_letters).keys()
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
        return len(self.by_status.get(status, ()))

    @property
    def counts(self) -> dict[str, int]:
        return {status: len(ids) for status, ids in self.by_status.items()}

    @property
    def is_announced(self) -> bool:
        return not self.unannounced

    def assert_harmless(self) -> None:
        """Asserts that no email is lost, sent twice, or `failed` although it arrived. The DLQ may still have dead
        letters of emails that were later proved to be sent."""
        assert not self.lost, f"lost: {len(self.lost)}"
        assert not self.duplicates, f"duplicates: {self.duplicates}"
        assert not self.untrue, f"failed, but delivered: {self.untrue}"
        assert not self.strangers, f"never enqueued: {self.strangers}"
        assert not self.unannounced, f"failed or held without a dead letter: {self.unannounced}"
        assert self.misannounced <= self.by_status.get("sent", frozenset())

    def assert_balanced(self) -> None:
        self.assert_harmless()
        assert not self.misannounced, f"with a dead letter, but neither failed nor held: {self.misannounced}"


def announced_in(dead_letters: Iterable[QueueMessage]) -> Counter[UUID]:
    """The number of dead letters per email. Undecodable messages, which RabbitMQ dead-lettered, are not counted."""
    found: Counter[UUID] = Counter()
    for dead_letter in dead_letters:
        if not dead_letter.was_rejected:
            found[UUID(orjson.loads(dead_letter.body)["email_id"])] += 1
    return found
