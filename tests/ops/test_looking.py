"""Reading the DLQ loses no message and keeps the order. A removal removes only the selected messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from dispatcher.actions.dlq import DiscardDead
from dispatcher.broker.connection import Connection, open_connection
from dispatcher.broker.dlq import DeadLetterQueue, DlqScan
from dispatcher.broker.pointer import Pointer, encode_bundle
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, declare
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.errors import BrokerUnavailable, DispatcherError
from dispatcher.monitor.dead_letters import list_dead_letter_ids, sweep
from dispatcher.monitor.dlq_sweep import DlqSweep
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import find_messages
from dispatcher.ops.poison import discard_poison, list_poison, repair_poison
from dispatcher.ops.reconcile import reconcile
from dispatcher.store.connections import connect_async
from dispatcher.store.failures import find_dead_lettered, republish_dead_letters
from tests.ops.dead_emails import Desk, decide
from tests.waiting import until_answer

ACT = Act.of("ann@ops-1", "tidying up")


async def bodies(dlq: DeadLetterQueue) -> list[bytes]:
    async with dlq.scan() as look:
        return [found.body async for batch in look.batches() for found in batch]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_reads_leave_each_message_in_place(servers: Servers, topology_names: Topology, queue_type: str) -> None:
    name = f"{topology_names.exchange}.{queue_type}"
    topology = Topology(name, f"{name}.send", f"{name}.dlq", queue_type)
    await declare(servers.amqp_url, topology)
    async with await open_connection(servers.amqp_url, name="test") as connection:
        channel = await connection.open_channel()
        for number in range(700):
            channel.raw.basic_publish("", topology.dlq, str(number).encode())
        dlq = DeadLetterQueue(connection, topology.dlq)
        await until_answer(dlq.depth, lambda found: found == 700)

        looks = [await bodies(dlq) for _ in range(3)]
        depth = await dlq.depth()
        for queue in topology.queues:
            await channel.call(channel.raw.queue_delete, queue=queue)
        await channel.call(channel.raw.exchange_delete, exchange=topology.exchange)

    assert all(look == [str(number).encode() for number in range(700)] for look in looks)
    assert depth == 700


async def test_a_read_that_fails_removes_nothing(queue: Desk) -> None:
    await queue.publish(b"a")

    async def remove_and_fail() -> None:
        async with queue.dlq.scan() as look:
            async for batch in look.batches():
                look.remove(batch)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await remove_and_fail()

    assert await bodies(queue.dlq) == [b"a"]


async def test_two_concurrent_sweeps_run_one_after_the_other(queue: Desk, servers: Servers) -> None:
    email_ids = queue.create(30)
    await queue.publish_dead_letters(email_ids)
    for email_id in email_ids[::2]:
        queue.books.change(email_id, status="pending")

    async with (
        await connect_async(queue.url, name="second") as other,
        await open_connection(servers.amqp_url, name="second") as connection,
    ):
        swept = await asyncio.gather(
            sweep(queue.session, queue.dlq), sweep(other, DeadLetterQueue(connection, queue.dlq.queue))
        )

    assert sorted(each.removed for each in swept) == [0, 15]
    assert len(await bodies(queue.dlq)) == 15


async def test_a_monitor_sweeps_the_dlq_only_if_there_are_new_surplus_messages(queue: Desk, settings: Settings) -> None:
    failed, held, replayed = (*queue.create(1), *queue.create(2, status="held"))
    await queue.publish_dead_letters([failed, held, replayed])
    await queue.publish(b"poison")
    await until_answer(queue.dlq.depth, lambda found: found == 4)
    with capture_logs() as logged:  # of a monitor that may not read the DLQ
        await DlqSweep(replace(settings, dlq=f"{queue.dlq.queue}.x"), queue.dlq.depth).run_once()
    assert [each["event"] for each in logged] == ["dlq.not_swept"]
    service = DlqSweep(settings, queue.dlq.depth)

    async def reads(depth: int) -> bool:
        """Lets the service do its work; returns whether it has read the DLQ."""
        before = await deliveries(queue.dlq)
        await service.run_once()
        await until_answer(queue.dlq.depth, lambda found: found == depth)
        return await deliveries(queue.dlq) > before + 1

    assert await reads(4)  # it has not seen the poison message before
    assert not await reads(4)
    queue.books.change(replayed, status="pending")
    assert await reads(3)
    assert not await reads(3)
    assert [body for body in await bodies(queue.dlq) if str(replayed).encode() in body] == []


async def deliveries(dlq: DeadLetterQueue) -> int:
    """How often RabbitMQ has delivered the first message before."""
    async with dlq.scan() as look:
        found = [found async for batch in look.batches() for found in batch]
    return int((found[0].properties.headers or {}).get("x-delivery-count", 0))


async def test_poison_messages_are_listed_and_discarded_by_their_id(queue: Desk) -> None:
    (email_id,) = queue.create()
    await queue.publish(b"\x1b[31mred\xff", headers={"x-death": [{"reason": "rejected", "count": 1}], "raw": b"\x00"})
    await queue.publish_dead_letters([email_id])
    await queue.publish(queue.dead_letter(email_id, message_key="another"))

    first, second = await list_poison(queue.session, queue.dlq)
    removed = await discard_poison(queue.session, queue.dlq, first.poison_id, ACT)

    assert (first.position, first.problem, first.body) == (0, "The body is not JSON.", b"\x1b[31mred\xff")
    assert (first.x_death, first.headers) == ([{"reason": "rejected", "count": 1}], {"raw": "\\x00"})
    assert (second.position, removed) == (2, 1)
    assert "different message key" in second.problem
    assert [each.poison_id for each in await list_poison(queue.session, queue.dlq)] == [second.poison_id]
    with pytest.raises(DispatcherError, match="has no poison message"):
        await discard_poison(queue.session, queue.dlq, first.poison_id, ACT)


async def test_a_bundle_with_an_unknown_email_is_poison_and_can_be_repaired(queue: Desk, servers: Servers) -> None:
    publisher = Publisher(servers.amqp_url, queue.topology.exchange, name="operator")
    known = [Pointer(email_id, queue.books.key(email_id)) for email_id in queue.books.enqueue(2)]
    body, repaired = encode_bundle([*known, Pointer(uuid4(), "order-17")]), encode_bundle(known)
    await queue.publish(body)

    (poison,) = await list_poison(queue.session, queue.dlq)
    with pytest.raises(DispatcherError, match="this database has no such email"):
        await repair_poison(queue.session, queue.dlq, publisher, queue.topology.queue, poison.poison_id, body, ACT)
    await repair_poison(queue.session, queue.dlq, publisher, queue.topology.queue, poison.poison_id, repaired, ACT)
    await publisher.close()

    assert "The message points to 3 emails" in poison.problem
    assert await list_poison(queue.session, queue.dlq) == []
    (taken,) = await queue.rabbit.take_all(queue.topology.queue, 1)
    assert taken.body == repaired


async def test_reconcile_reports_and_fixes_every_kind_of_difference(queue: Desk) -> None:
    right, missing, doubled = queue.create(2), queue.create(2), queue.create(1)
    (sent,), (cancelled,) = queue.create(status="sent"), queue.create(status="held")
    (again,) = queue.create()
    await queue.publish_dead_letters([*right, *doubled, *doubled, cancelled])
    queue.books.change(cancelled, status="cancelled", error_type="expired")
    await queue.publish(queue.dead_letter(sent, status="failed"))
    await queue.publish_dead_letters([again], attempts=2)
    await queue.publish_dead_letters([again])
    await queue.publish(b"poison")

    told = await reconcile(queue.session, queue.dlq)
    untouched = len(await bodies(queue.dlq))
    fixed = await reconcile(queue.session, queue.dlq, ACT)
    due = {row["email_id"] for row in queue.books.rows() if row["dead_letter_due_at"]}
    after = await reconcile(queue.session, queue.dlq)

    for found in (told, fixed):
        assert (found.depth, found.dead_letters, found.missing) == (9, 4, sorted(missing))
        assert (found.duplicates, set(found.stale), len(found.poison)) == (doubled, {sent, again, cancelled}, 1)
    assert (untouched, due) == (9, set(missing))
    assert (after.count, after.dead_letters, len(after.poison)) == (0, 4, 1)
    assert queue.audit()[-1]["detail"] == {"missing": 2, "stale": 3, "duplicates": 1, "orphans": 0}


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "pending"},
        {"attempt_count": 4},
        {"error_type": "suppressed"},
        {"dead_letter_due_at": "epoch"},
        {"dead_letter_discarded_at": "epoch"},
    ],
    ids=str,
)
async def test_an_email_that_changed_since_its_dead_letter_was_missed_gets_no_dead_letter(
    queue: Desk, columns: dict[str, Any]
) -> None:
    changed, missing = queue.create(2)
    found = await find_dead_lettered(queue.session)
    assert found.keys() == {changed, missing}
    queue.books.change(changed, **columns)

    assert await republish_dead_letters(queue.session, found) == {missing}


async def test_dead_letters_of_deleted_emails_are_removed_and_audited(queue: Desk) -> None:
    pruned, lost, kept = queue.create(3)
    await queue.publish_dead_letters([pruned, kept, lost, pruned])
    await queue.publish(queue.dead_letter(kept, message_key="another"))
    lose(queue, pruned, lost)

    told = await reconcile(queue.session, queue.dlq)
    fixed = await reconcile(queue.session, queue.dlq, ACT)
    after = await reconcile(queue.session, queue.dlq)

    for found in (told, fixed):
        assert (found.orphans, found.count, found.dead_letters, len(found.poison)) == ([pruned, lost, pruned], 3, 1, 1)
    assert (told.fixed, fixed.fixed) == (False, True)
    assert (after.depth, after.count, after.dead_letters, len(after.poison)) == (2, 0, 1, 1)
    *noted, whole = queue.audit()
    assert [(act["action"], act["email_id"], act["detail"]) for act in noted] == [
        ("discard", pruned, {"letters": 2}),
        ("discard", lost, {"letters": 1}),
    ]
    assert whole["detail"]["orphans"] == 3


async def test_the_dead_letter_of_a_deleted_email_is_audited_before_its_removal(queue: Desk, servers: Servers) -> None:
    early, late = queue.create(2)
    late_letter = queue.dead_letter(late)
    await queue.publish_dead_letters([early])
    lose(queue, early, late)

    async def break_off() -> None:
        raise BrokerUnavailable("RabbitMQ went away.")

    async with await open_connection(servers.amqp_url, name="operator") as connection:
        dlq = Eventful(connection, queue.topology.dlq, [partial(queue.publish, late_letter), break_off])
        with pytest.raises(BrokerUnavailable):
            await reconcile(queue.session, dlq, ACT)
        left = await bodies(dlq)

    assert left == [late_letter]
    assert [act["email_id"] for act in queue.audit() if act["action"] == "discard"] == [early]


class Eventful(DeadLetterQueue):
    def __init__(self, connection: Connection, queue: str, events: list[Callable[[], Awaitable[None]]]) -> None:
        super().__init__(connection, queue)
        self._events = iter(events)

    @asynccontextmanager
    async def scan(self) -> AsyncIterator[DlqScan]:
        async with super().scan() as opened:
            yield opened
        if event := next(self._events, None):
            await event()


def lose(queue: Desk, *email_ids: UUID) -> None:
    queue.books.connection.execute("delete from email_log where email_id = any(%s)", [list(email_ids)])


async def test_only_emails_with_a_current_dead_letter_are_listed(queue: Desk) -> None:
    failed, held = *queue.create(), *queue.create(status="held")
    discarded, again = queue.create(2)
    (sent,) = queue.create(status="sent")
    await queue.publish_dead_letters([held, discarded, failed, held])
    await queue.publish_dead_letters([again], attempts=2)
    await queue.publish(queue.dead_letter(sent, status="failed"))
    await queue.publish(queue.dead_letter(failed, message_key="another"))
    news = [await decide(queue.session, DiscardDead(reason=ACT.reason), discarded) for _ in range(2)]

    assert news == [["discarded"], ["already_discarded"]]
    assert await list_dead_letter_ids(queue.session, queue.dlq) == [held, failed]
    assert (await sweep(queue.session, queue.dlq)).removed == 3  # of `discarded`, `again` and `sent`
    assert queue.books.status(discarded) == "failed"
    assert discarded not in (await reconcile(queue.session, queue.dlq)).missing


async def test_an_emails_messages_are_found_with_rabbitmqs_x_death_header(queue: Desk) -> None:
    other, email_id = queue.create(2)
    await queue.publish_dead_letters([other])
    await queue.publish(queue.dead_letter(email_id), headers={"x-death": [{"reason": "rejected", "queue": "q"}]})

    (message,) = await find_messages(queue.session, queue.dlq, email_id)

    assert (message.position, message.is_stale, message.attempts) == (1, False, 3)
    assert message.x_death == [{"reason": "rejected", "queue": "q"}]
