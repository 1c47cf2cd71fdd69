"""The ceilings of recipient domains hold over all workers, which share them through PostgreSQL."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from dispatcher.domain.controls import DomainLimit
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.routing.domain_gates import CLAIM_SECONDS, EAGERNESS, HOLD_SECONDS, DomainFull, DomainGate, DomainGates
from dispatcher.store.connections import Pool
from dispatcher.store.controls import read_controls
from dispatcher.store.domains import BURST_SECONDS, Claim, DomainStore
from tests.providers.emails import an_email
from tests.waiting import DEADLINE_SECONDS, until, until_answer

DOMAIN = "example.org"


class World:
    """The ceilings in the database, and the gates of workers."""

    def __init__(self, pool: Pool, connection: psycopg.Connection) -> None:
        self.pool = pool
        self.connection = connection

    def limit(self, domain: str = DOMAIN, *, rate: float | None = None, slots: int | None = None) -> DomainLimit:
        self.connection.execute(
            "insert into dispatcher.domain_limit (domain, per_second, concurrent, tokens) values (%s, %s, %s, 1e9)"
            " on conflict (domain) do update set per_second = excluded.per_second, concurrent = excluded.concurrent",
            [domain, rate, slots],
        )
        return DomainLimit(domain, rate, slots)

    def store(self, worker: str = "w0") -> DomainStore:
        return DomainStore(self.pool, worker=worker)

    def gates(self, *limits: DomainLimit, worker: str = "w0", most_waiting: int = 100) -> DomainGates:
        gates = DomainGates(self.store(worker), most_waiting=most_waiting)
        gates.update({limit.domain: limit for limit in limits})
        return gates


@pytest.fixture
def world(pool: Pool, tables_session: psycopg.Connection) -> World:
    return World(pool, tables_session)


def email(*to: str) -> OutgoingEmail:
    return an_email(to=to or (f"ann@{DOMAIN}",))


class Sender:
    """Counts emails of two workers that are sent at the same time."""

    def __init__(self, *workers: DomainGates) -> None:
        self.workers = workers
        self.sent = 0
        self.most_at_once = 0
        self._at_once = 0

    async def send(self, worker: DomainGates, seconds: float, *to: str) -> bool:
        try:
            entered = await worker.enter(email(*to))
        except DomainFull:
            return False
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(seconds)
        self._at_once -= 1
        for gate in entered:
            gate.leave(seconds)
        self.sent += 1
        return True

    async def keep_sending(self, worker: DomainGates, count: int, seconds: float) -> None:
        for _ in range(count):
            await until_answer(lambda: self.send(worker, seconds))


async def test_two_workers_together_never_exceed_the_rate(world: World) -> None:
    rate = 100.0
    limit = world.limit(rate=rate)
    sender = Sender(*(world.gates(limit, worker=f"w{number}") for number in range(2)))
    began_at = time.monotonic()

    await asyncio.gather(*(sender.keep_sending(worker, 25, 0) for worker in sender.workers for _ in range(2)))

    assert sender.sent == 100
    seconds = time.monotonic() - began_at
    assert rate * (seconds + BURST_SECONDS + 2 * CLAIM_SECONDS) >= 100


async def test_two_workers_together_never_send_more_at_the_same_time_and_share_the_slots(world: World) -> None:
    limit = world.limit(slots=3)
    sender = Sender(*(world.gates(limit, worker=f"w{number}") for number in range(2)))

    sent = await asyncio.gather(*(sender.keep_sending(worker, 5, 0.02) for worker in sender.workers for _ in range(6)))

    assert len(sent) == 12
    assert (sender.sent, sender.most_at_once) == (60, 3)


async def test_a_single_slot_changes_hands(world: World) -> None:
    limit = world.limit(slots=1)
    first, second = (world.gates(limit, worker=f"w{number}") for number in range(2))
    sender = Sender(first, second)
    greedy = [asyncio.create_task(sender.keep_sending(first, 100_000, 0.01)) for _ in range(3)]
    await until(lambda: sender.sent)

    await asyncio.wait_for(sender.keep_sending(second, 3, 0.01), DEADLINE_SECONDS)

    assert sender.most_at_once == 1
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_the_slots_of_a_dead_worker_are_free_after_a_while_and_those_of_an_idle_one_at_once(world: World) -> None:
    limit = world.limit(slots=1)
    store = world.store("dead")
    assert await store.claim(DOMAIN, tokens=0, slots=1, used=0) == Claim(None, 1)
    assert await world.store("w0").claim(DOMAIN, tokens=0, slots=1, used=0) == Claim(None, 0)

    world.connection.execute(
        "update dispatcher.domain_limit"
        " set holders = jsonb_set(holders, '{dead,until}', to_jsonb(extract(epoch from now())))"
    )
    assert await world.store("w0").claim(DOMAIN, tokens=0, slots=1, used=0) == Claim(None, 1)

    sender = Sender(world.gates(limit, worker="w0"))
    assert await sender.send(sender.workers[0], 0)
    holders = "select holders from dispatcher.domain_limit"
    await until(lambda: world.connection.execute(holders).fetchone() == ({},))


async def test_an_email_waits_only_shortly_for_a_slot_and_only_a_few_wait(world: World) -> None:
    gates = world.gates(world.limit(slots=1), most_waiting=2)
    sender = Sender(gates)
    (gate,) = await gates.enter(email())
    began_at = time.monotonic()

    answers = await asyncio.gather(*(sender.send(gates, 0) for _ in range(5)))

    assert answers == [False] * 5
    assert time.monotonic() - began_at < HOLD_SECONDS + 1
    gate.leave(0)
    assert await sender.send(gates, 0)


async def test_a_cancelled_email_takes_no_slot(world: World) -> None:
    gates = world.gates(world.limit(slots=1))
    (gate,) = await gates.enter(email())
    waiting = [asyncio.create_task(gates.enter(email())) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()

    gate.leave(0)

    assert len(await asyncio.wait_for(waiting[1], HOLD_SECONDS)) == 1
    assert waiting[0].cancelled()


async def test_an_email_to_several_domains_needs_all_of_them_and_gives_back_what_it_got(world: World) -> None:
    limits = [world.limit("a.example", rate=1), world.limit("b.example", slots=1)]
    gates = world.gates(*limits, most_waiting=1)
    (busy,) = await gates.enter(email("x@b.example"))

    with pytest.raises(DomainFull) as raised:
        await gates.enter(email("Ann <x@A.example>", "x@b.example", "x@free.example"))
    assert raised.value.domain == "b.example"

    busy.leave(0)
    entered = await gates.enter(email("y@a.example", "y@b.example"))
    assert [gate.domain for gate in entered] == ["a.example", "b.example"]


async def test_a_domain_is_compared_in_the_form_of_dns_and_includes_no_subdomain(world: World) -> None:
    gates = world.gates(*(world.limit(domain, slots=9) for domain in (DOMAIN, "xn--bcher-kva.example")))

    for to in ("ann@example.org", "ann@EXAMPLE.org", "ann@bücher.example"):
        assert len(await gates.enter(email(to))) == 1
    for to in ("ann@mail.example.org", "ann@example.com"):
        assert await gates.enter(email(to)) == []
    assert (gates.concern("smtp"), gates.concern("sendgrid")) == (True, False)


async def test_emails_that_wait_are_sent_when_the_ceiling_is_removed(world: World) -> None:
    gates = world.gates(world.limit(slots=1))
    await gates.enter(email())
    waiting = asyncio.create_task(gates.enter(email()))
    await asyncio.sleep(0)

    gates.update({})

    await asyncio.wait_for(waiting, HOLD_SECONDS / 2)
    assert await gates.enter(email()) == []


async def test_while_postgresql_is_unreachable_no_email_passes(world: World) -> None:
    gates = world.gates(world.limit(rate=100))
    await world.pool.close()

    with pytest.raises(DomainFull):
        await gates.enter(email())


async def test_the_pace_is_that_of_the_lowest_ceiling(world: World) -> None:
    async def pace(limit: DomainLimit) -> float:
        return DomainGate(world.store("w0"), limit, asyncio.Semaphore(1)).pace

    by_rate, by_slots = await pace(DomainLimit(DOMAIN, 10)), await pace(DomainLimit(DOMAIN, None, 4))

    assert 10 < by_rate < 15
    assert 4 < by_slots < 6, "an attempt is assumed to take a second"
    assert await pace(DomainLimit(DOMAIN, 10, 4)) == by_slots


async def test_a_new_worker_begins_with_the_length_of_attempts_that_another_has_measured(world: World) -> None:
    (gate,) = await world.gates(world.limit(slots=4)).enter(email())
    assert gate.pace == EAGERNESS * 4

    gate.leave(0.01)

    await until(lambda: gate.pace == pytest.approx(EAGERNESS * 4 / 0.01))
    limit = (await read_controls(world.pool)).domains[DOMAIN]
    (other,) = await world.gates(limit, worker="w1").enter(email())
    assert other.pace == pytest.approx(gate.pace)
