"""All workers share a maximum rate: they take tokens from PostgreSQL, which refills the tokens by its own clock. Lanes
take turns for tokens and for a provider's connections."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import psycopg
import pytest

from dispatcher.domain.outcome import Deferred, Reason
from dispatcher.domain.turns import LaneWeights
from dispatcher.errors import StoreUnavailable
from dispatcher.routing.breaker import CircuitBreaker
from dispatcher.routing.evidence import Blame
from dispatcher.routing.gate import Gate
from dispatcher.routing.rate import BURST_SECONDS, CHUNK_SECONDS, RateLimit
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.providers import ProviderStore
from tests.providers.emails import an_email
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until
from tests.worker.scripted import ScriptedProvider
from tests.worker.stage_bench import VirtualLoop

CEILING = 500.0


@pytest.fixture
async def store(pool: Pool) -> ProviderStore:
    """The statements of a worker, for which a bucket exists."""
    store = ProviderStore(pool, slot="w0")
    await store.begin_rate("smtp", CEILING)
    return store


def value_of(books: Books, column: str) -> Any:
    (row,) = books.select("select * from provider_rate")
    return row[column]


def database_clock(books: Books) -> float:
    (row,) = books.select("select extract(epoch from clock_timestamp())::float8 as seconds")
    return float(row["seconds"])


async def test_two_workers_together_never_exceed_the_ceiling(pool: Pool, books: Books) -> None:
    limits = [RateLimit(ProviderStore(pool, slot=f"w{n}"), "smtp", CEILING) for n in range(2)]
    began = database_clock(books)

    async def take(limit: RateLimit, emails: int) -> None:
        for _ in range(emails):
            await limit.take()

    await asyncio.gather(*(take(limit, 150) for limit in limits))

    seconds = database_clock(books) - began
    assert CEILING * (seconds + BURST_SECONDS) >= 300


async def test_at_most_one_burst_of_tokens_is_saved(store: ProviderStore, books: Books) -> None:
    books.connection.execute("update provider_rate set refilled_at = now() - interval '1 hour'")

    tokens, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=10_000)

    assert (tokens, rate) == (50, CEILING)
    assert (await store.take_tokens("smtp", ceiling=20.0, burst=5, wanted=1))[1] == 20.0, (
        "a lower ceiling holds at once"
    )


async def test_a_clock_set_back_empties_the_bucket_but_does_not_block_it(pool: Pool, books: Books) -> None:
    limit = RateLimit(ProviderStore(pool, slot="w0"), "smtp", CEILING)
    assert await limit.take()
    books.connection.execute("update provider_rate set tokens = 0, refilled_at = now() + interval '1 hour'")

    # The limit took a chunk of tokens before the clock was set back. This loop uses more tokens than that chunk.
    for _ in range(int(CEILING * CHUNK_SECONDS) + 1):
        assert await asyncio.wait_for(limit.take(), DEADLINE_SECONDS)


async def test_throttling_halves_the_rate_once_and_it_recovers(store: ProviderStore, books: Books) -> None:
    began = database_clock(books)
    halved = [await store.halve_rate("smtp", CEILING) for _ in range(5)]
    lasted = database_clock(books) - began
    assert halved[0] == CEILING / 2
    assert len([rate for rate in halved if rate]) <= 1 + int(lasted), "the rate was halved twice within a second"

    books.connection.execute(
        "update provider_rate set per_second = %s, refilled_at = now() - interval '5 seconds'", [250.0]
    )
    before = value_of(books, "refilled_at")
    _, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1)
    seconds = (value_of(books, "refilled_at") - before).total_seconds()
    assert seconds >= 5
    assert rate == pytest.approx(min(CEILING, 250 + seconds * CEILING / 20))
    books.connection.execute("update provider_rate set refilled_at = now() - interval '1 minute'")
    _, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1)
    assert rate == CEILING


async def test_a_missing_bucket_is_created_and_fills(pool: Pool) -> None:
    store = ProviderStore(pool, slot="w0")

    assert await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1) == (0, CEILING)
    assert await RateLimit(store, "smtp", CEILING).take()


async def test_a_wait_for_a_token_ends_at_once_if_the_provider_may_not_be_tried_any_more(pool: Pool) -> None:
    limit = RateLimit(ProviderStore(pool, slot="w0"), "smtp", 0.01)
    wanted = True
    waiting = [asyncio.create_task(limit.take(lambda: wanted)) for _ in range(100)]
    assert await limit.take(lambda: False) is False

    wanted = False

    # At 0.01 emails per second, one token takes 100 s, so the 100 tasks would wait up to 10,000 s.
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await asyncio.gather(*waiting) == [False] * 100


async def test_the_rate_is_halved_when_the_pause_is_over_and_not_before(pool: Pool, books: Books) -> None:
    limit = RateLimit(ProviderStore(pool, slot="w0"), "smtp", CEILING)
    await limit.take()

    limit.slow_down()
    assert value_of(books, "per_second") == CEILING
    began = database_clock(books)
    await limit.take()

    climbed = (database_clock(books) - began) * CEILING / 20
    assert CEILING / 2 <= value_of(books, "per_second") <= CEILING / 2 + climbed


@pytest.mark.parametrize(("reason", "is_slower"), [(Reason.THROTTLED, True), (Reason.SERVER_ERROR, False)])
async def test_only_throttling_slows_a_provider_down(pool: Pool, books: Books, reason: Reason, is_slower: bool) -> None:
    limit = RateLimit(ProviderStore(pool, slot="w0"), "smtp", CEILING)
    breaker = CircuitBreaker(lambda: 0.0, lambda *_: None)
    await limit.take()

    refusal = Deferred(reason, retry_after=3600.0)
    assert (
        Route(ScriptedProvider(), breaker, limit).record_outcome(refusal, breaker.begin(), an_email()) is Blame.PROVIDER
    )
    await limit.take()

    assert (value_of(books, "per_second") < CEILING) is is_slower


@pytest.mark.parametrize(
    ("ceilings", "window"),
    [([None], 256), ([0.1], 3), ([1.0], 30), ([200.0], 256), ([1.0, 2.0], 90), ([1.0, None], 256)],
)
def test_the_window_is_limited_by_the_ceilings(ceilings: list[float | None], window: int) -> None:
    store = ProviderStore(make_pool("postgresql://unused", name="unused", size=1), slot="w0")
    breaker = CircuitBreaker(lambda: 0.0, lambda *_: None)
    limits = [RateLimit(store, "smtp", each) if each else None for each in ceilings]
    routes = Routes([Route(ScriptedProvider(), breaker, limit) for limit in limits])

    assert routes.window(256, 30.0) == window


async def test_a_worker_that_waited_for_the_bucket_does_not_refill_the_same_time_again(
    store: ProviderStore, tables_url: str, books: Books
) -> None:
    with psycopg.connect(tables_url) as other:
        other.execute("select from provider_rate for update")
        waiting = asyncio.create_task(store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1))
        await until(lambda: books.waiting_for_a_lock("worker-1"))
        other.execute("update provider_rate set tokens = 0, refilled_at = clock_timestamp()")
        counted_until = value_of(Books(other), "refilled_at")

    await waiting

    assert value_of(books, "refilled_at") >= counted_until


class Bucket(ProviderStore):
    """A fake token bucket that returns scripted replies. The reply None simulates an outage of PostgreSQL."""

    def __init__(self, *answers: tuple[int, float] | None) -> None:
        self._answers = list(answers)
        self.looks: list[tuple[float, float]] = []

    async def take_tokens(self, provider: str, *, ceiling: float, burst: float, wanted: int) -> tuple[int, float]:
        assert (provider, wanted) == ("smtp", max(1, math.ceil(ceiling * CHUNK_SECONDS)))
        self.looks.append((round(asyncio.get_running_loop().time(), 3), burst))
        if (answer := self._answers.pop(0)) is None:
            raise StoreUnavailable("PostgreSQL is away.")
        return answer

    def take(self, emails: int, ceiling: float = CEILING) -> list[float]:
        async def take() -> None:
            limit = RateLimit(self, "smtp", ceiling)
            for _ in range(emails):
                assert await limit.take()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(take())
        return [at for at, _ in self.looks]


@pytest.mark.parametrize(("rate", "seconds"), [(500.0, 0.02), (5.0, 0.2), (0.5, 1.0)])
def test_an_empty_bucket_is_queried_again_when_it_may_have_a_token(rate: float, seconds: float) -> None:
    assert Bucket((0, rate), (0, rate), (1, rate)).take(1) == [0.0, seconds, 2 * seconds]


def test_the_backoff_is_reset_when_postgresql_is_back() -> None:
    away, back = None, (1, CEILING)

    assert Bucket(away, away, away, back, away, back).take(2) == [0.0, 0.1, 0.3, 0.7, 0.7, 0.8]


@pytest.mark.parametrize(("ceiling", "burst"), [(0.1, 1.0), (4.0, 1.0), (500.0, 125.0)])
def test_a_bucket_holds_a_quarter_second_of_tokens_and_at_least_one(ceiling: float, burst: float) -> None:
    bucket = Bucket((1, ceiling))

    bucket.take(1, ceiling)

    assert bucket.looks == [(0.0, burst)]


@pytest.mark.parametrize("ceiling", [1.0, 100.0])
async def test_an_urgent_email_gets_the_next_token_however_many_bulk_emails_wait(pool: Pool, ceiling: float) -> None:
    limit = RateLimit(ProviderStore(pool, slot="w0"), "smtp", ceiling)
    granted: list[str] = []

    async def take(lane: str) -> None:
        if await limit.take(lane=lane):
            granted.append(lane)

    bulk = [asyncio.create_task(take("bulk")) for _ in range(300)]
    await until(lambda: "bulk" in granted)
    before = len(granted)
    urgent = asyncio.create_task(take("urgent"))
    await urgent

    # Tokens are granted in steps, and a step may have been under way.
    assert granted[before:].count("bulk") <= 1 + math.ceil(ceiling * CHUNK_SECONDS)
    for task in bulk:
        task.cancel()


async def test_an_urgent_email_gets_the_next_free_slot_however_many_bulk_emails_wait() -> None:
    gate = Gate(2, LaneWeights())
    served: list[str] = []

    async def attempt(lane: str) -> None:
        await gate.acquire(lane)
        served.append(lane)

    bulk = [asyncio.create_task(attempt("bulk")) for _ in range(50)]
    await asyncio.sleep(0)
    assert served == ["bulk"] * 2
    urgent = asyncio.create_task(attempt("urgent"))
    await asyncio.sleep(0)
    gate.release()
    await urgent

    assert served == ["bulk", "bulk", "urgent"]
    for task in bulk:
        task.cancel()


async def test_a_cancelled_wait_loses_no_slot() -> None:
    gate = Gate(1, LaneWeights())
    await gate.acquire("normal")
    waiting = [asyncio.create_task(gate.acquire("normal")) for _ in range(3)]
    await asyncio.sleep(0)

    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.release()  # grants the slot to the second, which is cancelled before it runs again
    waiting[1].cancel()
    await waiting[2]

    gate.release()
    await asyncio.wait_for(gate.acquire("normal"), 1)
