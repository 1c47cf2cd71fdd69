"""Looking into the DLQ loses nothing and changes no order; what is removed is what was meant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.broker.connection import Connection, open_connection
from dispatcher.broker.dlq import DeadLetterQueue, Look
from dispatcher.broker.pointer import Pointer, encode_bundle
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers
from dispatcher.domain.poison_id import poison_id
from dispatcher.errors import BrokerUnavailable, DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import discard, list_letter_ids, remove, sweep
from dispatcher.ops.messages import find_messages
from dispatcher.ops.plain import safe_text
from dispatcher.ops.poison import discard_poison, list_poison, repair_poison
from dispatcher.ops.reconcile import reconcile
from dispatcher.store.connections import AsyncSession, connect_async
from tests.ops.morgue import Morgue
from tests.waiting import until_answer

ACT = Act.of("ann@ops-1", "tidying up")


async def has(dlq: DeadLetterQueue, depth: int) -> bool:
    return await dlq.depth() == depth


async def bodies(dlq: DeadLetterQueue) -> list[bytes]:
    async with dlq.look() as look:
        return [found.body async for batch in look.batches() for found in batch]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_many_looks_leave_every_message_in_its_place(
    servers: Servers, topology_names: Topology, queue_type: str
) -> None:
    name = f"{topology_names.exchange}.{queue_type}"
    topology = Topology(name, f"{name}.send", f"{name}.dlq", queue_type)
    await declare(servers.amqp_url, topology)
    async with await open_connection(servers.amqp_url, name="test") as connection:
        channel = await connection.open_channel()
        for number in range(700):
            channel.raw.basic_publish("", topology.dlq, str(number).encode())
        dlq = DeadLetterQueue(connection, topology.dlq)
        await until_answer(lambda: has(dlq, 700))

        looks = [await bodies(dlq) for _ in range(5)]
        depth = await dlq.depth()
        for queue in topology.queues:
            await channel.call(channel.raw.queue_delete, queue=queue)
        await channel.call(channel.raw.exchange_delete, exchange=topology.exchange)

    assert all(look == [str(number).encode() for number in range(700)] for look in looks)
    assert depth == 700


async def test_what_comes_between_looks_stands_behind_what_was_there(dlq: DeadLetterQueue, morgue: Morgue) -> None:
    looks = []
    for number in range(4):
        await morgue.drop(b"%d" % number)
        looks.append(await bodies(dlq))

    assert looks == [[b"%d" % each for each in range(number + 1)] for number in range(4)]
    assert await bodies(dlq) == looks[-1]


async def test_a_look_that_fails_removes_nothing(dlq: DeadLetterQueue, morgue: Morgue) -> None:
    await morgue.drop(b"a")

    async def remove_and_fail() -> None:
        async with dlq.look() as look:
            async for batch in look.batches():
                look.remove(batch)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await remove_and_fail()

    assert await bodies(dlq) == [b"a"]


async def test_two_sweeps_at_once_take_turns(
    session: AsyncSession, tables_url: str, servers: Servers, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    email_ids = morgue.bury(30)
    await morgue.announce(email_ids)
    for email_id in email_ids[::2]:
        morgue.books.change(email_id, status="pending")

    async with (
        await connect_async(tables_url, name="second") as other,
        await open_connection(servers.amqp_url, name="second") as connection,
    ):
        removed = await asyncio.gather(sweep(session, dlq), sweep(other, DeadLetterQueue(connection, dlq.queue)))

    assert sorted(removed) == [0, 15]
    assert len(await bodies(dlq)) == 15


async def test_poison_is_told_apart_and_discarded_by_its_name(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    (email_id,) = morgue.bury()
    await morgue.drop(b"\x1b[31mred\xff", headers={"x-death": [{"reason": "rejected", "count": 1}], "raw": b"\x00"})
    await morgue.announce([email_id])
    await morgue.drop(morgue.letter(email_id, message_key="another"))

    first, second = await list_poison(session, dlq)
    removed = await discard_poison(session, dlq, first.poison_id, ACT)

    assert (first.position, first.problem, first.body) == (0, "The body is not JSON.", b"\x1b[31mred\xff")
    assert (first.x_death, first.headers) == ([{"reason": "rejected", "count": 1}], {"raw": "\\x00"})
    assert (second.position, removed) == (2, 1)
    assert "another" in second.problem
    assert [each.poison_id for each in await list_poison(session, dlq)] == [second.poison_id]
    with pytest.raises(DispatcherError, match="holds no message"):
        await discard_poison(session, dlq, first.poison_id, ACT)


async def test_a_message_of_several_emails_of_which_one_is_unknown_is_poison_and_can_be_repaired(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue, servers: Servers
) -> None:
    publisher = Publisher(servers.amqp_url, morgue.topology.exchange, name="operator")
    known = [Pointer(email_id, morgue.books.key(email_id)) for email_id in morgue.books.enqueue(2)]
    body, repaired = encode_bundle([*known, Pointer(uuid4(), "order-17")]), encode_bundle(known)
    await morgue.drop(body)

    (poison,) = await list_poison(session, dlq)
    with pytest.raises(DispatcherError, match="points to no email"):
        await repair_poison(session, dlq, publisher, morgue.topology.queue, poison.poison_id, body, ACT)
    await repair_poison(session, dlq, publisher, morgue.topology.queue, poison.poison_id, repaired, ACT)
    await publisher.close()

    assert "Of the 3 emails" in poison.problem
    assert await list_poison(session, dlq) == []
    (taken,) = await morgue.rabbit.take_all(morgue.topology.queue, 1)
    assert taken.body == repaired


async def test_what_was_discarded_is_on_record_even_if_everything_stops_then(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await morgue.drop(b"red")
    (poison,) = await list_poison(session, dlq)

    async def remove_and_stop(*arguments: Any) -> int:
        await remove(*arguments)
        raise BrokerUnavailable("RabbitMQ went away.")

    monkeypatch.setattr("dispatcher.ops.poison.remove", remove_and_stop)
    with pytest.raises(BrokerUnavailable):
        await discard_poison(session, dlq, poison.poison_id, ACT)

    assert await list_poison(session, dlq) == []
    noted = morgue.books.select("select action, detail from operator_audit")
    assert noted == [{"action": "discard", "detail": {"poison": poison.poison_id, "messages": 1}}]


def test_bytes_are_shown_so_that_no_terminal_obeys_them() -> None:
    assert safe_text(b"\x1b[2J\n\xff\xc3\xa9\xe2\x80\xae", 100) == "\\x1b[2J\\n\\xffé\\u202e"
    assert safe_text(b"x" * 1500, 4) == "xxxx… (1,496 octets more)"
    assert poison_id(b"a") == poison_id(b"a") != poison_id(b"b")


async def test_reconciling_tells_and_mends_every_kind_of_difference(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    right, missing, doubled = morgue.bury(2), morgue.bury(2), morgue.bury(1)
    (sent,) = morgue.bury(status="sent")
    (again,) = morgue.bury()
    await morgue.announce([*right, *doubled, *doubled])
    await morgue.drop(morgue.letter(sent, status="failed"))
    await morgue.announce([again], attempts=2)
    await morgue.announce([again])
    await morgue.drop(b"poison")

    told = await reconcile(session, dlq)
    untouched = len(await bodies(dlq))
    fixed = await reconcile(session, dlq, ACT)
    due = {row["email_id"] for row in morgue.books.rows() if row["dead_letter_due_at"]}
    after = await reconcile(session, dlq)

    for found in (told, fixed):
        assert (found.depth, found.dead_letters, found.missing) == (8, 4, sorted(missing))
        assert (found.duplicates, set(found.stale), len(found.poison)) == (doubled, {sent, again}, 1)
    assert (untouched, due) == (8, set(missing))
    assert (after.count, after.dead_letters, len(after.poison)) == (0, 4, 1)
    assert morgue.audit()[-1]["detail"] == {"missing": 2, "stale": 2, "duplicates": 1, "orphans": 0}


async def test_letters_of_emails_that_are_gone_are_removed_with_their_ids_on_record(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    pruned, lost, kept = morgue.bury(3)
    await morgue.announce([pruned, kept, lost, pruned])
    await morgue.drop(morgue.letter(kept, message_key="another"))
    lose(morgue, pruned, lost)

    told = await reconcile(session, dlq)
    fixed = await reconcile(session, dlq, ACT)
    after = await reconcile(session, dlq)

    for found in (told, fixed):
        assert (found.orphans, found.count, found.dead_letters, len(found.poison)) == ([pruned, lost, pruned], 3, 1, 1)
    assert (told.fixed, fixed.fixed) == (False, True)
    assert (after.depth, after.count, after.dead_letters, len(after.poison)) == (2, 0, 1, 1)
    *noted, whole = morgue.audit()
    assert [(act["action"], act["email_id"], act["detail"]) for act in noted] == [
        ("discard", pruned, {"letters": 2}),
        ("discard", lost, {"letters": 1}),
    ]
    assert whole["detail"]["orphans"] == 3


async def test_no_letter_of_an_email_that_is_gone_is_removed_before_it_is_on_record(
    session: AsyncSession, servers: Servers, morgue: Morgue
) -> None:
    early, late = morgue.bury(2)
    late_letter = morgue.letter(late)
    await morgue.announce([early])
    lose(morgue, early, late)

    async def announce_late() -> None:
        await morgue.drop(late_letter)

    async def break_off() -> None:
        raise BrokerUnavailable("RabbitMQ went away.")

    async with await open_connection(servers.amqp_url, name="operator") as connection:
        dlq = Eventful(connection, morgue.topology.dlq, [announce_late, break_off])
        with pytest.raises(BrokerUnavailable):
            await reconcile(session, dlq, ACT)
        left = await bodies(dlq)

    assert left == [late_letter]
    assert [act["email_id"] for act in morgue.audit() if act["action"] == "discard"] == [early]


class Eventful(DeadLetterQueue):
    """One where something happens after each of the first looks."""

    def __init__(self, connection: Connection, queue: str, events: list[Callable[[], Awaitable[None]]]) -> None:
        super().__init__(connection, queue)
        self._events = iter(events)

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Look]:
        """As always, and then what happens."""
        async with super().look() as opened:
            yield opened
        if event := next(self._events, None):
            await event()


def lose(morgue: Morgue, *email_ids: UUID) -> None:
    """Takes emails out of the tables, as pruning or a restore does."""
    morgue.books.connection.execute("delete from email_log where email_id = any(%s)", [list(email_ids)])


async def test_a_discarded_email_stays_as_it_is_and_its_letter_leaves_for_good(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    (email_id,) = morgue.bury()
    await morgue.announce([email_id])

    news = [await discard(session, [email_id], ACT) for _ in range(2)]
    removed = await sweep(session, dlq)

    assert news == [{email_id}, set()]
    assert (removed, morgue.books.status(email_id)) == (1, "failed")
    assert (await reconcile(session, dlq)).count == 0


async def test_the_queue_names_the_emails_of_which_its_letters_still_tell(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    failed, held = *morgue.bury(), *morgue.bury(status="held")
    discarded, again = morgue.bury(2)
    (sent,) = morgue.bury(status="sent")
    await morgue.announce([held, discarded, failed, held])
    await morgue.announce([again], attempts=2)
    await morgue.drop(morgue.letter(sent, status="failed"))
    await morgue.drop(morgue.letter(failed, message_key="another"))
    await discard(session, [discarded], ACT)

    assert await list_letter_ids(session, dlq) == [held, failed]


async def test_an_emails_messages_are_found_with_what_rabbitmq_noted(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    other, email_id = morgue.bury(2)
    await morgue.announce([other])
    await morgue.drop(morgue.letter(email_id), headers={"x-death": [{"reason": "rejected", "queue": "q"}]})

    (message,) = await find_messages(session, dlq, email_id)

    assert (message.position, message.is_stale, message.attempts) == (1, False, 3)
    assert message.x_death == [{"reason": "rejected", "queue": "q"}]
