"""Poison messages: messages on the DLQ that belong to no email. They have no id, so a hash of the body identifies them.

An operator inspects or exports the body, then discards the message or publishes a repaired message in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dispatcher.broker import pointer
from dispatcher.broker.dlq import DeadLetterQueue, DlqMessage
from dispatcher.broker.outgoing import Outgoing
from dispatcher.domain.poison_id import poison_id
from dispatcher.domain.scrub import scrub
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidPointer
from dispatcher.monitor.dead_letters import classify, remove, scan
from dispatcher.ops.safe_text import json_value, safe_text
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import audit, find_dead_letter_emails

if TYPE_CHECKING:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.ops.acts import Act

GLIMPSE_CHARACTERS: Final = 60
_SCRUBBED_OCTETS: Final = 2000
"""How many bytes `glimpse` scrubs: many more than it shows, because `scrub` cannot recognise a truncated address."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A message on the DLQ that belongs to no email, and why. Position 0 is the head of the DLQ.

    `x_death` is RabbitMQ's header; empty if the message was published to the DLQ directly.
    """

    poison_id: str
    position: int
    problem: str
    body: bytes
    headers: Mapping[str, Any]
    x_death: list[Any]


async def list_poison(session: AsyncSession, dlq: DeadLetterQueue) -> list[Poison]:
    """The poison messages on the DLQ, in order. Removes nothing."""
    async with scan(session, dlq) as opened:
        return [
            _poison(each.found)
            async for batch in opened.batches()
            for each in await classify(session, batch)
            if each.is_poison
        ]


async def find_poison(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> Poison:
    """The first poison message whose id is `name`."""
    for each in await list_poison(session, dlq):
        if each.poison_id == name:
            return each
    raise _unknown(name)


async def discard_poison(session: AsyncSession, dlq: DeadLetterQueue, name: str, act: Act) -> int:
    """Audits the discard, and removes all poison messages whose id is `name` from the DLQ; returns their number."""
    count = await _count(session, dlq, name)
    await _note(session, "discard", act, name, count)
    return await _remove(session, dlq, name)


async def repair_poison(
    session: AsyncSession, dlq: DeadLetterQueue, publisher: Publisher, queue: str, name: str, body: bytes, act: Act
) -> int:
    """Publishes a repaired message to a send queue, audits the repair, and removes the poison messages whose id is
    `name`; returns their number.

    If the message points to no email, or RabbitMQ does not confirm it, the poison messages stay on the DLQ.
    """
    message = await _repaired(session, queue, body)
    count = await _count(session, dlq, name)
    if not all(await publisher.publish([message])):
        raise BrokerUnavailable(
            f'RabbitMQ cannot route a message to the queue "{queue}".', remedy="Run `dispatcher init`."
        )
    await _note(session, "repair", act, name, count)
    return await _remove(session, dlq, name)


def glimpse(body: bytes) -> str:
    """The beginning of a poison message, for a list. Addresses are removed: the message may contain a whole email."""
    text = scrub(safe_text(body[:_SCRUBBED_OCTETS], _SCRUBBED_OCTETS))
    return text if len(text) <= GLIMPSE_CHARACTERS else f"{text[:GLIMPSE_CHARACTERS]}…"


async def _repaired(session: AsyncSession, queue: str, body: bytes) -> Outgoing:
    try:
        pointers = pointer.decode(body)
    except InvalidPointer as error:
        raise DispatcherError(
            f"The repaired message points to no email: {error.message}",
            remedy='Write the message as {"v": 1, "email_id": "…", "message_key": "…"}.',
        ) from error
    emails = await find_dead_letter_emails(session, {each.email_id for each in pointers})
    for each in pointers:
        email = emails.get(each.email_id)
        if email is None or email.message_key != each.message_key:
            raise DispatcherError(
                f"The repaired message points to email {each.email_id} with the message key {each.message_key!r}: "
                "this database has no such email.",
                remedy="Correct the id and the key; `dispatcher show` prints the id and the key of an email.",
            )
    return Outgoing(queue, body, str(pointers[0].email_id))


async def _note(session: AsyncSession, action: str, act: Act, name: str, count: int) -> None:
    """Writes the audit record: before the removal, because a removed message cannot be restored."""
    await audit(session, action, {None: {"poison": name, "messages": count}}, actor=act.actor, reason=act.reason)


async def _count(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> int:
    count = sum(each.poison_id == name for each in await list_poison(session, dlq))
    if not count:
        raise _unknown(name)
    return count


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, name: str) -> int:
    swept = await remove(session, dlq, lambda each: each.is_poison and poison_id(each.found.body) == name)
    if not swept.removed:
        raise _unknown(name)
    return swept.removed


def _unknown(name: str) -> DispatcherError:
    return DispatcherError(
        f"The DLQ has no poison message {name}.", remedy="`dispatcher dlq list --poison` lists all poison messages."
    )


def _poison(found: DlqMessage) -> Poison:
    headers = json_value(found.properties.headers or {})
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
        return "The message points to an email that is not in this database, or has a different message key."
    count = len(pointers)
    return f"The message points to {count} emails; some are not in this database, or have a different message key."
