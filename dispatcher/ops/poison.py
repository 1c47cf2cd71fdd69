"""Poison: messages on the DLQ behind which no email stands. They are known by their bytes, for they have no id.

A person looks at the bytes, exports them, and discards them or publishes a repaired message in their stead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dispatcher.broker import pointer
from dispatcher.broker.dlq import DeadLetterQueue, Found
from dispatcher.broker.outgoing import Outgoing
from dispatcher.domain.poison_id import poison_id
from dispatcher.domain.scrub import scrub
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidPointer
from dispatcher.ops.letters import look, read, remove
from dispatcher.ops.plain import plain, safe_text
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import audit, find_failures

if TYPE_CHECKING:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.ops.acts import Act

GLIMPSE_CHARACTERS: Final = 60
_SCRUBBED_OCTETS: Final = 2000
"""Far more than is shown: an address must not be cut before it is known as one."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A message without an email.

    Attributes:
        poison_id: See `domain.poison_id`.
        position: From 0, at the head of the DLQ.
        problem: Why no email stands behind it.
        x_death: What RabbitMQ noted when it dead-lettered it; empty if somebody published it there.
    """

    poison_id: str
    position: int
    problem: str
    body: bytes
    headers: Mapping[str, Any]
    x_death: list[Any]


async def list_poison(session: AsyncSession, dlq: DeadLetterQueue) -> list[Poison]:
    """The poison on the DLQ, in order; nothing is removed."""
    async with look(session, dlq) as looking:
        return [
            _poison(each.found)
            async for batch in looking.batches()
            for each in await read(session, batch)
            if each.is_poison
        ]


async def find_poison(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> Poison:
    """The first message of that name.

    Raises:
        DispatcherError: the DLQ holds none.
    """
    for each in await list_poison(session, dlq):
        if each.poison_id == name:
            return each
    raise _unknown(name)


async def discard_poison(session: AsyncSession, dlq: DeadLetterQueue, name: str, act: Act) -> int:
    """Notes that the poison of that name is to go, and takes it off the DLQ; returns how many messages it was.

    Raises:
        DispatcherError: the DLQ holds none of that name.
    """
    count = await _count(session, dlq, name)
    await _note(session, "discard", act, name, count)
    return await _remove(session, dlq, name)


async def repair_poison(
    session: AsyncSession, dlq: DeadLetterQueue, publisher: Publisher, queue: str, name: str, body: bytes, act: Act
) -> int:
    """Publishes a repaired message to the send queue, notes it, and takes the poison of that name off the DLQ.

    Raises:
        DispatcherError: the repaired message points to no email, or the DLQ holds no poison of that name.
        BrokerUnavailable: RabbitMQ did not confirm the message; the poison is still there.
    """
    message = await _repaired(session, queue, body)
    count = await _count(session, dlq, name)
    if not all(await publisher.publish([message])):
        raise BrokerUnavailable(f'RabbitMQ cannot route to queue "{queue}".', remedy="Run `dispatcher init`.")
    await _note(session, "repair", act, name, count)
    return await _remove(session, dlq, name)


def glimpse(body: bytes) -> str:
    """How a poison message begins, for a list: without addresses, since somebody may have published a whole email."""
    text = scrub(safe_text(body[:_SCRUBBED_OCTETS], _SCRUBBED_OCTETS))
    return text if len(text) <= GLIMPSE_CHARACTERS else f"{text[:GLIMPSE_CHARACTERS]}…"


async def _repaired(session: AsyncSession, queue: str, body: bytes) -> Outgoing:
    try:
        pointers = pointer.decode(body)
    except InvalidPointer as error:
        raise DispatcherError(
            f"The repaired message points to no email: {error.message}",
            remedy='It looks like {"v": 1, "email_id": "…", "message_key": "…"}.',
        ) from error
    standings = await find_failures(session, {each.email_id for each in pointers})
    for each in pointers:
        standing = standings.get(each.email_id)
        if standing is None or standing.message_key != each.message_key:
            raise DispatcherError("The repaired message points to no email of this database, or names another key.")
    return Outgoing(queue, body, str(pointers[0].email_id))


async def _note(session: AsyncSession, action: str, act: Act, name: str, count: int) -> None:
    """Puts it on record: before the poison goes, which cannot be put back where nobody could note it."""
    await audit(session, action, actor=act.actor, reason=act.reason, detail={"poison": name, "messages": count})


async def _count(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> int:
    """How many messages have that name.

    Raises:
        DispatcherError: none.
    """
    count = sum(each.poison_id == name for each in await list_poison(session, dlq))
    if not count:
        raise _unknown(name)
    return count


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> int:
    removed = await remove(session, dlq, lambda each: each.is_poison and poison_id(each.found.body) == name)
    if not removed:
        raise _unknown(name)
    return removed


def _unknown(name: str) -> DispatcherError:
    return DispatcherError(f"The DLQ holds no message {name}.", remedy="`dispatcher dlq list --poison` lists them.")


def _poison(found: Found) -> Poison:
    headers = plain(found.properties.headers or {})
    x_death = headers.pop("x-death", [])
    return Poison(
        poison_id=poison_id(found.body),
        position=found.position,
        problem=_problem(found.body),
        body=found.body,
        headers=headers,
        x_death=x_death if isinstance(x_death, list) else [x_death],
    )


def _problem(body: bytes) -> str:
    try:
        pointers = pointer.decode(body)
    except InvalidPointer as error:
        return error.message
    if len(pointers) == 1:
        return "It points to no email of this database, or names another's key."
    return f"Of the {len(pointers)} emails that it points to, some are not in this database, or have another key."
