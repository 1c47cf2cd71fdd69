"""Compares the DLQ with the database, and removes messages from it.

The database is the source of truth. A dead letter is about one failure of one email. The email's number of attempts
identifies the failure: each later failure has more attempts, except when evidence turns a held email into a failed
email. A dead letter is stale if its email is no longer failed or held, if the email has failed again, or if an operator
discarded the dead letter. So a process that replays, confirms, releases or discards emails needs no
connection to RabbitMQ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.broker.dead_letter import decode
from dispatcher.broker.dlq import DeadLetterQueue, DlqMessage, DlqScan
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.failures import DEAD
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidPointer
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import DeadLetterEmail, find_dead_letter_emails
from dispatcher.store.named_locks import named_lock

LOCK_WAIT_SECONDS: Final = 10.0
MAX_PASSES: Final = 100
"""The most passes over the DLQ. Each pass removes messages, so this limit is not reached in practice."""


class DlqEntry(NamedTuple):
    """A message on the DLQ with its decoded dead letter and the email's row."""

    found: DlqMessage
    dead_letter: DeadLetter | None  # None if the message is not one of the dispatcher's dead letters
    email: DeadLetterEmail | None  # None if there is no such email, or if its message key is not the dead letter's
    is_orphan: bool  # whether the dead letter's email no longer exists (pruned, or missing in a restored backup)

    @property
    def is_poison(self) -> bool:
        """Whether the message belongs to no email in the database."""
        return self.email is None

    @property
    def is_stale(self) -> bool:
        """Whether the message is a dead letter, but not about its email's current failure; see `is_current`."""
        return self.dead_letter is not None and self.email is not None and not is_current(self.dead_letter, self.email)


def is_current(dead_letter: DeadLetter, email: DeadLetterEmail) -> bool:
    """Whether the dead letter is about its email's current failure. False if the email is no longer failed or held, if
    it has failed again since, or if an operator discarded the dead letter."""
    is_of_this_failure = dead_letter.status is email.status and dead_letter.attempts >= email.attempt_count
    return email.status in DEAD and is_of_this_failure and not email.is_discarded


@asynccontextmanager
async def scan(session: AsyncSession, dlq: DeadLetterQueue) -> AsyncIterator[DlqScan]:
    """Opens the DLQ for reading. Only one process of all hosts reads at a time: a second one would not find the
    messages that the first one is reading. Raises DispatcherError if another process still reads after
    LOCK_WAIT_SECONDS."""
    async with _exclusively(session, dlq), dlq.scan() as opened:
        yield opened


@asynccontextmanager
async def _exclusively(session: AsyncSession, dlq: DeadLetterQueue) -> AsyncIterator[None]:
    name = f"dlq {dlq.queue}"
    async with named_lock(session, name, within_seconds=LOCK_WAIT_SECONDS, for_readers=True) as is_ours:
        if not is_ours:
            raise DispatcherError(
                f'Another process is reading the dead-letter queue "{dlq.queue}".',
                remedy="Try again in a few seconds.",
            )
        yield


async def classify(session: AsyncSession, batch: Sequence[DlqMessage]) -> list[DlqEntry]:
    """Decodes messages and finds their emails' rows. The entries have the order of the messages."""
    letters: list[DeadLetter | None] = []
    for message in batch:
        try:
            letters.append(decode(message.body))
        except InvalidPointer:
            letters.append(None)
    emails = await find_dead_letter_emails(session, {letter.email_id for letter in letters if letter})
    entries = []
    for found, letter in zip(batch, letters, strict=True):
        email = emails.get(letter.email_id) if letter else None
        is_own = letter is not None and email is not None and email.message_key == letter.message_key
        entries.append(DlqEntry(found, letter, email if is_own else None, letter is not None and email is None))
    return entries


class Swept(NamedTuple):
    """How many messages were removed from the DLQ, and how many were left."""

    removed: int
    left: int


async def sweep(session: AsyncSession, dlq: DeadLetterQueue) -> Swept:
    """Removes stale dead letters from the DLQ."""
    return await remove(session, dlq, lambda each: each.is_stale)


async def remove(session: AsyncSession, dlq: DeadLetterQueue, is_selected: Callable[[DlqEntry], bool]) -> Swept:
    """Removes the messages that `is_selected` selects, and repeats until none is left."""
    async with _exclusively(session, dlq):
        first = found = await _remove(session, dlq, is_selected)
        for _ in range(MAX_PASSES):
            if not found.removed:
                return Swept(first.removed, found.left)
            found = await _remove(session, dlq, is_selected)
    raise BrokerUnavailable(
        f'RabbitMQ still delivers messages that were already removed from the queue "{dlq.queue}".',
        remedy="Try again later.",
    )


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, is_selected: Callable[[DlqEntry], bool]) -> Swept:
    """Removes the selected messages in one pass over the DLQ. RabbitMQ may still return some of them."""
    removed = left = 0
    async with dlq.scan() as opened:
        async for batch in opened.batches():
            entries = await classify(session, batch)
            selected = [each.found for each in entries if is_selected(each)]
            opened.remove(selected)
            removed += len(selected)
            left += len(entries) - len(selected)
    return Swept(removed, left)


async def list_dead_letter_ids(session: AsyncSession, dlq: DeadLetterQueue) -> list[UUID]:
    """The ids of emails with a current dead letter on the DLQ, in the queue's order, each id once. Removes nothing."""
    async with scan(session, dlq) as opened:
        ids = [
            each.dead_letter.email_id
            async for batch in opened.batches()
            for each in await classify(session, batch)
            if each.dead_letter and not each.is_poison and not each.is_stale
        ]
    return list(dict.fromkeys(ids))
