"""Runs real workers with real queues and tables in the test's event loop. Only the provider is scripted."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings, load
from dispatcher.dev.servers import Servers
from dispatcher.domain.lanes import NORMAL
from dispatcher.host.ledger import Ledger
from dispatcher.host.process_table import ProcessSlot, ProcessTable
from dispatcher.providers.contract import Provider
from dispatcher.routing.domain_gates import DomainGates
from dispatcher.routing.rate import RateLimit
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.connections import LOCK_SECONDS, make_pool
from dispatcher.store.domains import DomainStore
from dispatcher.store.leases import LeaseStore
from dispatcher.store.providers import ProviderStore
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.process import WorkerIdentity, _dispatch
from dispatcher.worker.simulator import simulator_route
from tests.broker.rabbit import Rabbit
from tests.store.books import Books
from tests.waiting import until, until_answer
from tests.worker.scripted import Act, ScriptedProvider, accept_when_let_go
from tests.worker.stage_bench import slots_in_use


@dataclass
class Worker:
    """A running worker: its name in `locked_by` and of its sessions, and its connection's name in RabbitMQ's management
    UI."""

    name: str
    ledger: Path
    task: asyncio.Task[None]
    process_slot: ProcessSlot
    process_table: ProcessTable
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def connection_name(self) -> str:
        return f"dispatcher {self.name}"

    def begin_to_stop(self) -> None:
        """Has the same effect as SIGTERM."""
        self.stopping.set()

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 30)

    @property
    def in_flight(self) -> int:
        return slots_in_use(self.ledger)


class Bench:
    """The workers, tables and queues of one test. `provider` is that of workers that start without a list of
    providers."""

    def __init__(
        self, servers: Servers, tables_url: str, topology: Topology, run_dir: Path, books: Books, rabbit: Rabbit
    ) -> None:
        self.books = books
        self.rabbit = rabbit
        self.topology = topology
        self.provider = ScriptedProvider()
        self._servers = servers
        self._tables_url = tables_url
        self._run_dir = run_dir
        self._publisher = Publisher(servers.amqp_url, topology.exchange, name="test publisher")
        self._stack = AsyncExitStack()
        self.workers: list[Worker] = []

    def settings(self, **given: str) -> Settings:
        """Settings with short retries. `given` overrides settings by name, without the prefix DISPATCHER_."""
        names = {
            "DATABASE_URL": self._tables_url,
            "AMQP_URL": self._servers.amqp_url,
            "EXCHANGE": self.topology.exchange,
            "QUEUE": self.topology.queue,
            "DLQ": self.topology.dlq,
            "RUN_DIR": str(self._run_dir),
            "RETRY_BASE_SECONDS": "0.01",
            "RETRY_CAP_SECONDS": "0.02",
            **given,
        }
        return load({f"DISPATCHER_{name}": value for name, value in names.items()})

    async def start(
        self,
        providers: Sequence[Provider] = (),
        *,
        ceiling: float | None = None,
        lock_seconds: float = LOCK_SECONDS,
        has_simulator: bool = True,
        **given: str,
    ) -> Worker:
        """Starts a worker. `given` overrides settings. `ceiling`: emails per second for each provider."""
        settings = self.settings(**given)
        identity = WorkerIdentity("test:w0", f"test:w0:{uuid4()}")
        pool = make_pool(
            settings.database_url, name=identity.worker, size=3, lock_seconds=lock_seconds, keeps_plans=True
        )
        store = ProviderStore(pool, slot=identity.slot)
        listener = BreakerListener(store)
        # As in production, the window is so wide that one lost bulk call does not pause the provider.
        breakers = partial(listener.new_breaker, window=settings.prefetch)
        routes = Routes(
            [
                Route(each, breakers(each.name), RateLimit(store, each.name, ceiling) if ceiling else None)
                for each in providers or [self.provider]
            ],
            domains=DomainGates(DomainStore(pool, worker=identity.worker), most_waiting=settings.prefetch // 8),
            simulator=simulator_route(pool) if has_simulator else None,
        )
        slots = 2 * settings.prefetch
        ledger = Ledger(settings.run_dir, worker=identity.worker, slot=identity.slot, slots=slots)
        await pool.open()
        stopping = asyncio.Event()
        process_table = ProcessTable(["worker"])
        process_slot = process_table.take_slot("worker", 0)
        leases = LeaseStore(pool, worker=identity.worker, slot=identity.slot, redeliver_seconds=settings.redeliver_for)

        async def work() -> None:
            await _dispatch(settings, identity, stopping, leases, routes, listener, ledger, process_slot)
            ledger.close()

        task = asyncio.create_task(work())
        worker = Worker(identity.worker, ledger.path, task, process_slot, process_table, stopping)
        self._stack.push_async_callback(pool.close)
        self._stack.push_async_callback(self._end, task)
        self.workers.append(worker)
        return worker

    @staticmethod
    async def _end(task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            if getattr(each.get_coro(), "__name__", "") == "_send":
                each.cancel()
                await asyncio.gather(each, return_exceptions=True)

    async def deliver(self, email_ids: Iterable[UUID], *, times: int = 1, lane: str = NORMAL) -> None:
        keys = self.books.keys(list(email_ids))
        queue = self.topology.send_queues[lane]
        messages = [Outgoing.of_pointer(queue, Pointer(each, keys[each])) for each in keys]
        assert all(await self._publisher.publish(messages * times))

    async def deliver_together(self, email_ids: Iterable[UUID], *, unknown_at: int | None = None) -> None:
        """Publishes one message that points to all emails, and at `unknown_at` to an unknown one."""
        ids = list(email_ids)
        keys = self.books.keys(ids)
        pointers = [Pointer(each, keys[each]) for each in ids]
        if unknown_at is not None:
            pointers.insert(unknown_at, Pointer(uuid4(), new_key()))
        messages, _ = Outgoing.of_pointers(self.topology.queue, pointers, len(pointers))
        assert await self._publisher.publish(messages) == [True]

    async def deliver_pointer(self, email_id: UUID, message_key: str) -> None:
        message = Outgoing.of_pointer(self.topology.queue, Pointer(email_id, message_key))
        assert await self._publisher.publish([message]) == [True]

    async def enqueue(self, count: int = 1, **fields: object) -> list[UUID]:
        """Enqueues emails, and publishes their messages."""
        email_ids = self.books.enqueue(count, **fields)
        await self.deliver(email_ids)
        return email_ids

    async def begin(self, count: int = 1, act: Act = accept_when_let_go, **given: Any) -> tuple[Worker, list[UUID]]:
        """Starts a worker whose provider does this act. Returns when the act waits with this number of new emails."""
        self.provider.always = act
        worker = await self.start(**given)
        email_ids = await self.enqueue(count)
        await until(lambda: len(self.provider.waiting) == count and worker.process_slot.is_up)
        return worker, email_ids

    async def blocked(self, worker: Worker) -> None:
        await until(lambda: self.books.waiting_for_a_lock(worker.name))

    def due_in_seconds(self, email_id: UUID) -> float:
        """Seconds until a pending email is due; negative if it is due already."""
        (row,) = self.books.select(
            "select extract(epoch from publish_due_at - clock_timestamp())::float8 as seconds from email_log"
            " where email_id = %s and status = 'pending'",
            email_id,
        )
        return float(row["seconds"])

    async def waiting_messages(self, lane: str = NORMAL) -> int:
        """The number of ready messages on the lane's send queue; unacked messages do not count."""
        return (await depths(self._servers.amqp_url, self.topology))[self.topology.send_queues[lane]]

    async def all_are_delivered(self) -> None:
        await until_answer(self.waiting_messages, lambda waiting: waiting == 0)

    async def settled(self, statuses: dict[str, int]) -> None:
        """Waits until the tables contain exactly these numbers of emails by status."""
        try:
            await until(lambda: self.books.statuses() == statuses)
        except AssertionError:
            assert self.books.statuses() == statuses

    async def nothing_left_on_the_queue(self) -> None:
        """Stops the workers once they have received all messages; asserts that each was acked or rejected."""
        running = [worker for worker in self.workers if not worker.task.done()]
        for worker in running[:-1]:
            await worker.stop()
        if running:
            await self._all_are_seen()
            await running[-1].stop()
        left = await self.rabbit.take(self.topology.queue)
        assert left is None, left

    async def each_is_sent_once(self, email_ids: Collection[UUID]) -> None:
        """Waits until these emails are sent, and no others exist; asserts that no email or message is left."""
        await self.settled({"sent": len(email_ids)})
        assert self.provider.accepted == dict.fromkeys(email_ids, 1)
        await self.nothing_left_on_the_queue()

    async def _all_are_seen(self) -> None:
        """Publishes a last message to an unknown email, and waits until the worker has rejected it."""
        last = uuid4()
        await self.deliver_pointer(last, new_key())
        await until_answer(
            lambda: self.rabbit.take(self.topology.dlq),
            lambda dead: dead is not None and str(last).encode() in dead.body,
        )

    async def close(self) -> None:
        self.provider.let_go()
        await self._stack.aclose()
        await self._publisher.close()


def new_key() -> str:
    """A message key that no email has."""
    return f"unknown-{secrets.token_hex(8)}"
