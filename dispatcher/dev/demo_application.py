"""The application of the demo: it enqueues as a shop's code does, in transactions of its own.

Some emails come twice, because an application that crashed between its commit and its next step does not know whether
it has enqueued. One transaction is rolled back, and its emails with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Final
from uuid import UUID

from dispatcher.dev.demo_emails import Fate, Planned, plan_emails
from dispatcher.domain.email import Email
from dispatcher.producers import Acceptance, Enqueued, enqueue_many
from dispatcher.store.connections import Session

ROLLED_BACK_EMAILS: Final = 5
_LARGEST_TRANSACTION: Final = 40
_TRANSACTIONS_AT_MOST: Final = 100


class _ChangedItsMindError(Exception):
    """The application rolls back; never leaves this module."""


class Application:
    """Enqueues a planned number of emails.

    Attributes:
        fates: What the server is to say to each email that was enqueued, by the id that enqueue answered.
        known: How many answers said that the email was enqueued before.
        repeated: How many emails were enqueued a second time.
        rolled_back: Ids that enqueue answered in the transaction that was rolled back.
        transactions: Committed ones.
    """

    def __init__(self, connection: Session, emails: int, seed: int) -> None:
        self.fates: dict[UUID, Fate] = {}
        self.known = 0
        self.repeated = 0
        self.rolled_back: frozenset[UUID] = frozenset()
        self.transactions = 0
        self._connection = connection
        self._emails = emails
        self._seed = seed
        self._random = Random(seed)  # noqa: S311 - the same seed has to give the same transactions
        self._again: deque[Email] = deque()

    def work(self) -> Iterator[None]:
        """Enqueues one transaction at each step."""
        remaining = plan_emails(self._emails, self._seed)
        largest = max(_LARGEST_TRANSACTION, self._emails // _TRANSACTIONS_AT_MOST)
        while batch := list(islice(remaining, self._random.randint(1, largest))):
            again = [self._again.popleft() for _ in range(len(self._again))]
            self._transact(batch, again)
            self._again.extend(item.email for item in batch if item.is_repeated)
            yield
            if not self.rolled_back:
                self._roll_back()
        if self._again:
            self._transact([], list(self._again))
            yield

    def _transact(self, batch: Sequence[Planned], again: Sequence[Email]) -> None:
        """One transaction: what the application does for itself would stand beside it."""
        with self._connection.transaction():
            answers = enqueue_many(self._connection, [*[item.email for item in batch], *again])
        self.transactions += 1
        self.repeated += len(again)
        self.known += sum(answer.acceptance is Acceptance.KNOWN for answer in answers)
        self.fates.update((answer.email_id, item.fate) for item, answer in zip(batch, answers, strict=False))

    def _roll_back(self) -> None:
        answers: list[Enqueued] = []
        emails = [item.email for item in plan_emails(ROLLED_BACK_EMAILS, self._seed, first=self._emails)]
        try:
            with self._connection.transaction():
                answers = enqueue_many(self._connection, emails)
                raise _ChangedItsMindError  # noqa: TRY301 - an exception is how a transaction is rolled back
        except _ChangedItsMindError:
            self.rolled_back = frozenset(answer.email_id for answer in answers)
