"""Compares the dead letters on the DLQ with their emails in the database, and removes stale dead letters.

The database is the source of truth. A dead letter is about one failure of one email. The email's number of attempts
identifies the failure: each later failure has more attempts, except when evidence turns a held email into a failed
email. A dead letter is stale if its email is no longer failed or held, if the email has failed again, or if an operator
discarded the dead letter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from dispatcher.broker.dead_letter import decode
from dispatcher.broker.dlq import DeadLetterQueue, DlqMessage, DlqScan
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidPointer
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import DeadLetterEmail, discard_dead, find_dead_letter_emails
from dispatcher.store.named_locks import named_lock

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act

LOCK_WAIT_SECONDS: Final = 10.0
MAX_PASSES: Final = 100
"""The most passes over the DLQ. Each pass removes messages, so this limit is not reached in practice."""
DEAD: Final = frozenset({Status.FAILED, Status.HELD})


class DlqEntry(NamedTuple):
    """A message on the DLQ with its decoded dead letter and the email's row.

    Attributes:
        dead_letter: The dead letter; None if the message is not one of the dispatcher's dead letters.
        email: The email's row; None if there is no such email, or if its message key is not the dead letter's.
        is_orphan: Whether the message is a dead letter whose email no longer exists (pruned, or missing in a restored
            backup).
    """

    found: DlqMessage
    dead_letter: DeadLetter | None
    email: DeadLetterEmail | None
    is_orphan: bool

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
    """Opens the DLQ for reading. Only one process of all hosts reads at a time. A second process would not find the
    messages that the first process is reading.

    Raises:
        DispatcherError: another process was still reading the DLQ after `LOCK_WAIT_SECONDS`.
        BrokerUnavailable, TopologyError, StoreUnavailable: a server is unreachable, or the queue does not exist.
    """
    async with _exclusively(session, dlq), dlq.scan() as opened:
        yield opened


@asynccontextmanager
async def _exclusively(session: AsyncSession, dlq: DeadLetterQueue) -> AsyncIterator[None]:
    name = f"dlq {dlq.queue}"
    async with named_lock(session, name, within_seconds=LOCK_WAIT_SECONDS, for_readers=True) as is_ours:
        if not is_ours:
            raise DispatcherError(
                f'Another command is reading the dead-letter queue "{dlq.queue}".',
                remedy="Try again when that command has ended.",
            )
        yield


async def classify(session: AsyncSession, batch: Sequence[DlqMessage]) -> list[DlqEntry]:
    """Decodes messages and finds their emails' rows. The entries have the order of the messages."""
    dead_letters = [decoded(found) for found in batch]
    emails = await find_dead_letter_emails(
        session, {dead_letter.email_id for dead_letter in dead_letters if dead_letter}
    )
    return [
        DlqEntry(
            found,
            dead_letter,
            _email_of(dead_letter, emails),
            dead_letter is not None and dead_letter.email_id not in emails,
        )
        for found, dead_letter in zip(batch, dead_letters, strict=True)
    ]


async def sweep(session: AsyncSession, dlq: DeadLetterQueue, email_ids: Collection[UUID] | None = None) -> int:
    """Removes stale dead letters from the DLQ; returns how many it removed.

    Raises the errors of `scan`. The sweep may have removed some dead letters before the error; a later sweep removes
    the others.

    Args:
        email_ids: Remove only the dead letters of these emails; None for all emails.
    """
    return await remove(
        session,
        dlq,
        lambda each: (
            each.dead_letter is not None
            and each.is_stale
            and (email_ids is None or each.dead_letter.email_id in email_ids)
        ),
    )


async def remove(session: AsyncSession, dlq: DeadLetterQueue, is_selected: Callable[[DlqEntry], bool]) -> int:
    """Removes the messages that `is_selected` selects, and repeats until none is left; returns how many it removed.

    Raises the errors of `scan`.
    """
    async with _exclusively(session, dlq):
        first = removed = await _remove(session, dlq, is_selected)
        for _ in range(MAX_PASSES):
            if not removed:
                return first
            removed = await _remove(session, dlq, is_selected)
    raise BrokerUnavailable(
        f'RabbitMQ still delivers messages that were already removed from the queue "{dlq.queue}".',
        remedy="Try again later.",
    )


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, is_selected: Callable[[DlqEntry], bool]) -> int:
    """Removes the selected messages in one pass over the DLQ; returns how many it asked RabbitMQ to remove."""
    removed = 0
    async with dlq.scan() as opened:
        async for batch in opened.batches():
            selected = [each.found for each in await classify(session, batch) if is_selected(each)]
            opened.remove(selected)
            removed += len(selected)
    return removed


async def discard(session: AsyncSession, email_ids: Collection[UUID], act: Act) -> set[UUID]:
    """Discards the dead letters of failed and held emails: makes the dead letters stale. The emails keep their status.
    A replay undoes the discard.

    Returns:
        The emails whose dead letters this call discarded. Leaves out emails that are not failed or held, and emails
        whose dead letters were discarded before.
    """
    return await discard_dead(session, email_ids, actor=act.actor, reason=act.reason)


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


def decoded(found: DlqMessage) -> DeadLetter | None:
    """The dead letter in a message; None if the message is not a dead letter."""
    try:
        return decode(found.body)
    except InvalidPointer:
        return None


def _email_of(dead_letter: DeadLetter | None, emails: dict[UUID, DeadLetterEmail]) -> DeadLetterEmail | None:
    found = emails.get(dead_letter.email_id) if dead_letter else None
    return found if dead_letter and found and found.message_key == dead_letter.message_key else None
