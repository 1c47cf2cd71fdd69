"""Dead letters on the DLQ, and what the database says of their emails.

The database is the truth. A letter tells of one failure of one email, known by the attempts it counts: every later
failure has more, but where evidence makes a held email a failed one. It is stale once its email is no longer failed or
held, has failed again since, or was discarded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from dispatcher.broker.dead_letter import decode
from dispatcher.broker.dlq import DeadLetterQueue, Found, Look
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidPointer
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import LetterEmail, discard_dead, find_failures
from dispatcher.store.turns import turn

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act

TURN_SECONDS: Final = 10.0
MOST_LOOKS: Final = 100
"""Each look takes away some; nobody meets this bound."""
DEAD: Final = frozenset({Status.FAILED, Status.HELD})


class Read(NamedTuple):
    """A message of the DLQ, and what it tells.

    Attributes:
        letter: None if it is no dead letter of ours.
        standing: Its email's; None if it has none, or one with another key.
        is_orphan: It is a dead letter of ours, and its email is gone: pruned, or lost in a restore.
    """

    found: Found
    letter: DeadLetter | None
    standing: LetterEmail | None
    is_orphan: bool

    @property
    def is_poison(self) -> bool:
        """Whether no email stands behind it."""
        return self.standing is None

    @property
    def is_stale(self) -> bool:
        """Whether it tells of a failure that is over."""
        return self.letter is not None and self.standing is not None and not tells(self.letter, self.standing)


def tells(letter: DeadLetter, standing: LetterEmail) -> bool:
    """Whether the letter tells of how its email stands now."""
    is_of_this_failure = letter.status is standing.status and letter.attempts >= standing.attempt_count
    return standing.status in DEAD and is_of_this_failure and not standing.is_discarded


@asynccontextmanager
async def look(session: AsyncSession, dlq: DeadLetterQueue) -> AsyncIterator[Look]:
    """A look at the DLQ, one at a time over all hosts: a second one would find an empty queue.

    Raises:
        DispatcherError: somebody else looks for too long.
        BrokerUnavailable, TopologyError, StoreUnavailable: a server is away, or the queue is.
    """
    async with _our_turn(session, dlq), dlq.look() as opened:
        yield opened


@asynccontextmanager
async def _our_turn(session: AsyncSession, dlq: DeadLetterQueue) -> AsyncIterator[None]:
    async with turn(session, f"dlq {dlq.queue}", within_seconds=TURN_SECONDS) as is_ours:
        if not is_ours:
            raise DispatcherError(
                "Another command has been looking into the DLQ for a while.", remedy="Try again when it is done."
            )
        yield


async def read(session: AsyncSession, batch: Sequence[Found]) -> list[Read]:
    """What messages tell, and where their emails stand."""
    letters = [decoded(found) for found in batch]
    standings = await find_failures(session, {letter.email_id for letter in letters if letter})
    return [
        Read(found, letter, _standing(letter, standings), letter is not None and letter.email_id not in standings)
        for found, letter in zip(batch, letters, strict=True)
    ]


async def sweep(session: AsyncSession, dlq: DeadLetterQueue, email_ids: Collection[UUID] | None = None) -> int:
    """Takes stale letters off the DLQ, of these emails or of all; returns how many.

    Raises as `look` does; then nothing was removed, or a part, and a later sweep takes the rest.
    """
    return await remove(
        session,
        dlq,
        lambda each: (
            each.letter is not None and each.is_stale and (email_ids is None or each.letter.email_id in email_ids)
        ),
    )


async def remove(session: AsyncSession, dlq: DeadLetterQueue, is_meant: Callable[[Read], bool]) -> int:
    """Takes off the DLQ what is meant, and looks again until nothing of it is left; returns how many it was.

    Raises as `look` does.
    """
    async with _our_turn(session, dlq):
        first = removed = await _remove(session, dlq, is_meant)
        for _ in range(MOST_LOOKS):
            if not removed:
                return first
            removed = await _remove(session, dlq, is_meant)
    raise BrokerUnavailable("RabbitMQ is too busy to take messages off the DLQ for good.", remedy="Try again later.")


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, is_meant: Callable[[Read], bool]) -> int:
    """One look; returns how many it took off, or tried to."""
    removed = 0
    async with dlq.look() as looking:
        async for batch in looking.batches():
            meant = [each.found for each in await read(session, batch) if is_meant(each)]
            looking.remove(meant)
            removed += len(meant)
    return removed


async def discard(session: AsyncSession, email_ids: Collection[UUID], act: Act) -> set[UUID]:
    """Takes emails' dead letters away for good: stale from now on, the emails stay as they are, on record.

    Returns those for which that is news; the others are not failed or held, or were discarded before. A replay of such
    an email makes it as any other again.
    """
    return await discard_dead(session, email_ids, actor=act.actor, reason=act.reason)


async def list_letter_ids(session: AsyncSession, dlq: DeadLetterQueue) -> list[UUID]:
    """The emails of which the DLQ's letters still tell, in the queue's order, each once; nothing is removed."""
    async with look(session, dlq) as looking:
        ids = [
            each.letter.email_id
            async for batch in looking.batches()
            for each in await read(session, batch)
            if each.letter and not each.is_poison and not each.is_stale
        ]
    return list(dict.fromkeys(ids))


def decoded(found: Found) -> DeadLetter | None:
    """The dead letter that a message is; None for any other."""
    try:
        return decode(found.body)
    except InvalidPointer:
        return None


def _standing(letter: DeadLetter | None, standings: dict[UUID, LetterEmail]) -> LetterEmail | None:
    found = standings.get(letter.email_id) if letter else None
    return found if letter and found and found.message_key == letter.message_key else None
