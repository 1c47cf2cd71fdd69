"""Runs a worker's stages with fakes and virtual time, without servers and without real waits.

A dictionary with the guarantees of the worker's statements replaces PostgreSQL. Lists of acked and rejected messages
replace RabbitMQ. The ledger, the routes and the stages are real.
"""

from __future__ import annotations

import asyncio
import selectors
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.pointer import Pointer, encode
from dispatcher.config import Settings, load
from dispatcher.domain.controls import Controls
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import Status
from dispatcher.domain.turns import LaneWeights
from dispatcher.errors import StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import VOIDED, VOIDED_AT
from dispatcher.host.process_table import ProcessTable
from dispatcher.providers.contract import Provider
from dispatcher.routing.breaker import FAILURES_IN_A_ROW, CircuitBreaker
from dispatcher.routing.gate import Gate
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.leases import Lease, LeaseStore, Result, UnleasedEmail
from dispatcher.store.locked import LockedRows
from dispatcher.store.providers import ProviderStore
from dispatcher.store.statements import Source
from dispatcher.store.suppressions import SuppressionReader, SuppressionsRead
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.pipeline import Pipeline
from tests.providers.emails import an_email
from tests.worker.scripted import ScriptedProvider

LONG_SECONDS = 100.0
"""Longer than any wait of a worker, in virtual time."""


class VirtualSelector(selectors.DefaultSelector):
    """Returns immediately, and records how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer when it is idle."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


@dataclass
class Row:
    status: Status = Status.PENDING
    token: int = 0
    attempts: int = 0
    ours: bool = False
    octets_apart: int = 0


class FakeLocked(LockedRows):
    def __init__(self, locked_ids: set[UUID]) -> None:
        super().__init__(cast("Source", None))
        self._locked_ids = locked_ids

    async def find_locked(self, email_ids: Collection[UUID], *, is_busy: bool = False) -> set[UUID]:
        asked = set(email_ids) if is_busy else self._seen_at.keys() & set(email_ids)
        locked = asked & self._locked_ids
        self._seen_at = {i: at for i, at in self._seen_at.items() if i not in asked} | dict.fromkeys(locked, 0.0)
        return locked


class NobodySuppressed(SuppressionReader):
    def __init__(self) -> None:
        pass

    async def open_hasher(self) -> AddressHasher:
        return AddressHasher(b"key")

    async def read_all(self) -> SuppressionsRead:
        return SuppressionsRead({}, until="1")

    async def read_changed(self, since: str) -> SuppressionsRead:  # noqa: ARG002
        return await self.read_all()


class FakeStore(LeaseStore):
    """Executes the worker's statements on a dictionary.

    `lose`: for each statement, the next calls whose reply is lost; True: it commits first. `refused`: emails whose
    results PostgreSQL refuses. `events`: the committed changes. `batches`: the outcomes of each call of `record`,
    sorted. `lease_ends`: when each lease ends, by the loop's clock. `delays`: when released emails are due, in seconds.
    """

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.lease_ends: dict[UUID, float] = {}
        self.delays: dict[UUID, float] = {}
        self.suppressions = NobodySuppressed()
        self.rows: dict[UUID, Row] = {}
        self.emails: dict[UUID, OutgoingEmail] = {}
        self.recorded: set[tuple[UUID, int]] = set()
        self.locked_ids: set[UUID] = set()
        self.locked = FakeLocked(self.locked_ids)
        self.lose: defaultdict[str, deque[bool]] = defaultdict(deque)
        self.refused: set[UUID] = set()
        self.events: list[tuple[str, UUID]] = []
        self.controls = Controls()

    async def _statement(self, name: str, email_ids: Iterable[UUID], commit: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        if self.locked_ids.intersection(email_ids):
            raise StoreBusy("locked")
        commits_unheard = self.lose[name].popleft() if self.lose[name] else None
        if commits_unheard is None:
            return commit()
        if commits_unheard:
            commit()
        raise StoreUnavailable("lost")

    async def find_database_id(self) -> UUID:
        return UUID(int=1)

    async def read_controls(self) -> Controls:
        found: Controls = await self._statement("read_controls", (), lambda: self.controls)
        return found

    async def lease(
        self,
        keys_by_id: dict[UUID, str],
        lease_seconds: float,  # noqa: ARG002
        paused_tenants: Sequence[str] = (),  # noqa: ARG002
    ) -> list[Lease]:
        def commit() -> list[Lease]:
            leases = []
            for email_id in keys_by_id:
                row = self.rows.get(email_id)
                if row is None or row.status is not Status.PENDING:
                    continue
                row.status, row.ours, row.token, row.attempts = Status.SENDING, True, row.token + 1, row.attempts + 1
                self.events.append(("lease", email_id))
                content, apart = None if row.octets_apart else self.emails.get(email_id), row.octets_apart
                leases.append(Lease(email_id, content, row.token, row.attempts, None, None, octets_apart=apart))
            return leases

        return list(await self._statement("lease", keys_by_id, commit))

    async def find_unleased(self, email_ids: Sequence[UUID]) -> dict[UUID, UnleasedEmail]:
        rows = {i: self.rows[i] for i in email_ids if i in self.rows}

        def found(email_id: UUID, row: Row) -> UnleasedEmail:
            token = row.token if row.ours and row.status is Status.SENDING else None
            return UnleasedEmail(key_of(email_id), row.status, token, False)

        return dict(await self._statement("find_unleased", (), lambda: {i: found(i, row) for i, row in rows.items()}))

    async def read_content(self, email_id: UUID) -> OutgoingEmail | None:
        return self.emails.get(email_id)

    def _is_ours(self, email_id: UUID, token: int) -> bool:
        row = self.rows[email_id]
        return row.status is Status.SENDING and row.token == token

    async def release(self, leases: dict[UUID, int], away_seconds: Mapping[UUID, float] = {}) -> set[UUID]:
        def commit() -> set[UUID]:
            self.delays |= away_seconds
            ours = {i for i, token in leases.items() if self._is_ours(i, token)}
            for email_id in ours:
                row = self.rows[email_id]
                row.status, row.ours, row.attempts = Status.PENDING, False, row.attempts - 1
                self.events.append(("release", email_id))
            return ours

        return set(await self._statement("release", leases, commit))

    async def renew(self, leases: dict[UUID, int], lease_seconds: float) -> set[UUID]:  # noqa: ARG002
        def ours() -> set[UUID]:
            return {i for i, token in leases.items() if self._is_ours(i, token)}

        return set(await self._statement("renew", leases, ours))

    async def record(self, results: Sequence[Result]) -> set[UUID]:
        if self.refused.intersection(result.email_id for result in results):
            raise StatementRefused("a trigger")

        def commit() -> set[UUID]:
            self.batches.append(sorted(result.outcome for result in results))
            return {result.email_id for result in results if self._recorded(result)}

        return set(await self._statement("record", [result.email_id for result in results], commit))

    def _recorded(self, result: Result) -> bool:
        """Records a result; returns whether this worker had the lease."""
        key = (result.email_id, result.attempt_number)
        assert key not in self.recorded, "an attempt is recorded twice"
        self.recorded.add(key)
        row = self.rows[result.email_id]
        is_ours = self._is_ours(result.email_id, result.lease_token)
        if is_ours or result.status is Status.SENT:
            row.status = result.status
            row.ours = result.status is Status.SENDING
            row.attempts += result.status is Status.SENDING
            self.lease_ends[result.email_id] = asyncio.get_running_loop().time() + (result.lease_seconds or 0.0)
            self.events.append(("record", result.email_id))
        return is_ours

    async def is_recorded(self, result: Result) -> bool:
        key = (result.email_id, result.attempt_number)
        return bool(await self._statement("is_recorded", (), lambda: key in self.recorded))


class FakeBroker(Consumer):
    """Acks, rejects or requeues messages by delivery tag, each message only once."""

    def __init__(self, events: list[tuple[str, UUID]]) -> None:
        self.acked_count = 0
        self.open: dict[int, UUID] = {}
        self.settled: dict[int, str] = {}
        self._events = events

    @property
    def outstanding(self) -> int:
        return len(self.open)

    def delivered(self, tag: int, email_id: UUID) -> Delivery:
        self.open[tag] = email_id
        return Delivery(tag, 1, encode(Pointer(email_id, key_of(email_id))), redelivered=False)

    def _settle(self, delivery: Delivery, word: str) -> None:
        # Like the real consumer, ignore a second ack or reject of a message.
        if (email_id := self.open.pop(delivery.tag, None)) is not None:
            self.settled[delivery.tag] = word
            self._events.append((word, email_id))

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._settle(delivery, "ack")

    def reject(self, delivery: Delivery) -> None:
        self._settle(delivery, "reject")

    def requeue(self, delivery: Delivery) -> None:
        self._settle(delivery, "requeue")

    async def pause_lane(self, lane: str) -> None:
        """Does nothing."""

    async def resume_lane(self, lane: str) -> None:
        """Does nothing."""

    def pause(self) -> None:
        """Does nothing."""

    def resume(self) -> None:
        """Does nothing."""


class FakeProviderStore(ProviderStore):
    def __init__(self) -> None:
        pass

    async def set_state(self, *_: Any) -> None:
        """Does nothing."""

    async def take_resumes(self) -> list[str]:
        return []


class VirtualBreakerListener(BreakerListener):
    def new_breaker(self, provider: str, *, window: int = FAILURES_IN_A_ROW) -> CircuitBreaker:
        clock = asyncio.get_running_loop().time
        return CircuitBreaker(clock, lambda *change: self._on_change(provider, *change), window=window)


def slots_in_use(ledger: Path) -> int:
    """The number of a ledger's slots that are in use. The header and each slot have 512 octets."""
    content = ledger.read_bytes()
    return sum(content[at] != 0 for at in range(512, len(content), 512))


def key_of(email_id: UUID) -> str:
    return f"key-{email_id}"


@cache
def usual_settings() -> Settings:
    given = {
        "DATABASE_URL": "postgresql://nobody@127.0.0.1/none",
        "AMQP_URL": "amqp://nobody:none@127.0.0.1/",
        "RETRY_BASE_SECONDS": "1",
        "RETRY_CAP_SECONDS": "2",
        "PROVIDERS": "capture",
    }
    return replace(load({f"DISPATCHER_{name}": value for name, value in given.items()}), prefetch=32)


@dataclass
class StageBench:
    """A worker's pipeline with fakes. `is_cut_short`: the drain timed out."""

    folder: Path
    providers: Sequence[Provider]
    settings: Settings
    store: FakeStore = field(default_factory=FakeStore)
    last_tag: int = 0
    is_drained: bool = False
    is_cut_short: bool = False
    faults: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker = FakeBroker(self.store.events)
        self.ledger = Ledger(self.folder, worker="w", slot="w", slots=2 * self.settings.prefetch, boot="now")
        self._process_table = ProcessTable(["worker"])
        listener = VirtualBreakerListener(FakeProviderStore())
        gates = [Gate(self.settings.prefetch, LaneWeights()) for _ in self.providers]
        breakers = [listener.new_breaker(each.name, window=32) for each in self.providers]
        found = zip(self.providers, breakers, gates, strict=True)
        routes = Routes([Route(provider, breaker, gate=gate) for provider, breaker, gate in found])
        process_slot = self._process_table.take_slot("worker", 0)
        self.pipeline = Pipeline(self.settings, self.broker, self.store, routes, listener, self.ledger, process_slot)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.faults.append(context))
        self.running = asyncio.ensure_future(self.pipeline.run())

    @property
    def provider(self) -> ScriptedProvider:
        provider = self.providers[0]
        assert isinstance(provider, ScriptedProvider)
        return provider

    def enqueue(self, count: int = 1, *, octets_apart: int = 0) -> list[UUID]:
        emails = [an_email(email_id=uuid4()) for _ in range(count)]
        for email in emails:
            self.store.emails[email.email_id] = email
            self.store.rows[email.email_id] = Row(octets_apart=octets_apart)
        return [email.email_id for email in emails]

    def deliver(self, *email_ids: UUID) -> None:
        for email_id in email_ids:
            self.last_tag += 1
            self.pipeline.lease.take(self.broker.delivered(self.last_tag, email_id))

    def void_leases(self) -> None:
        """Voids all leases, as the relay voids expired leases."""
        with self.ledger.path.open("r+b") as file:
            file.seek(VOIDED_AT)
            file.write(VOIDED.pack(steady_clock()))

    async def turns(self, count: int = 30) -> None:
        """Runs `count` rounds of the event loop. By default, these are enough that only waits remain."""
        for _ in range(count):
            await asyncio.sleep(0)
        if self.running.done():
            self.running.result()

    async def pass_time(self, seconds: float = LONG_SECONDS) -> None:
        await asyncio.sleep(seconds)
        await self.turns()

    async def drain(self) -> None:
        if not self.is_drained:
            self.is_drained = True
            await self.pipeline.drain(self.settings.drain_seconds)

    async def close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        self.ledger.close()

    @property
    def slots_in_use(self) -> int:
        return slots_in_use(self.ledger.path)

    @property
    def words(self) -> list[str]:
        """The kinds of all committed changes and settled messages, in order."""
        return [word for word, _ in self.store.events]

    def statuses(self) -> Counter[Status]:
        return Counter(row.status for row in self.store.rows.values())


def run(scenario: Callable[[StageBench], Any], *providers: Provider, **changes: Any) -> StageBench:
    """Runs a scenario with a new worker and these providers; without providers, with one scripted provider."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)

    async def whole(folder: Path) -> StageBench:
        bench = StageBench(folder, providers or [ScriptedProvider()], replace(usual_settings(), **changes))
        try:
            await scenario(bench)
        finally:
            await bench.close()
        return bench

    try:
        with tempfile.TemporaryDirectory() as folder:
            return loop.run_until_complete(whole(Path(folder)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
