"""After an operator raised or removed the ceiling of a recipient domain, the emails that wait for it come earlier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from dispatcher.config import Settings
from dispatcher.domain.controls import DomainLimit
from dispatcher.relay.domain_waits import BATCH, DomainWaits
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from tests.relay.running import Start
from tests.store.books import Books
from tests.waiting import until

DOMAIN = "example.org"
SLOW = DomainLimit(DOMAIN, 1.0)
Ceilings = tuple[float | None, int | None] | tuple[float | None, int | None, float]


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The relay's statements."""
    async with await connect_async(tables_url, name="test relay") as session:
        yield Outbox(session)


def make_wait(books: Books, count: int, *, domain: str = DOMAIN) -> list[UUID]:
    """Enqueues emails that wait for a domain's ceiling, 100 seconds apart."""
    email_ids = books.enqueue(count)
    books.connection.execute(
        "update email_log set status = 'waiting', publish_due_at = null, wait_reason = 'domain', wait_domain = %s,"
        " wait_until = clock_timestamp() + 100 * array_position(%s::uuid[], email_id) * interval '1 second'"
        " where email_id = any(%s)",
        [domain, email_ids, email_ids],
    )
    return email_ids


def seconds_left(books: Books, email_id: UUID) -> float:
    wait_until: datetime = books.row(email_id)["wait_until"]
    return (wait_until - datetime.now(UTC)).total_seconds()


async def finish(waits: DomainWaits) -> int:
    """Runs rounds until nothing is left to do; returns how many."""
    rounds = 1
    while await waits.run_once() == 0.0:
        rounds += 1
    return rounds


async def test_emails_are_due_when_the_ceiling_of_their_domain_is_removed(outbox: Outbox, books: Books) -> None:
    free, kept = make_wait(books, 3), make_wait(books, 3, domain="other.example")
    (scheduled,) = books.enqueue(1, send_at=datetime.now(UTC) + timedelta(hours=1))
    waits = DomainWaits(outbox)
    limits = {DOMAIN: SLOW, "other.example": DomainLimit("other.example", 1.0)}
    waits.set_limits(limits)
    await finish(waits)
    assert seconds_left(books, free[0]) > 50

    waits.set_limits({"other.example": limits["other.example"]})
    await finish(waits)

    assert all(seconds_left(books, each) <= 0 for each in free)
    assert all(seconds_left(books, each) > 50 for each in [*kept, scheduled])
    assert await waits.run_once() is None, "woken or not, their waits are ended once"


async def test_a_new_leader_finds_emails_whose_ceiling_was_removed_before(outbox: Outbox, books: Books) -> None:
    (email_id,) = make_wait(books, 1)
    waits = DomainWaits(outbox)
    await finish(waits)
    assert seconds_left(books, email_id) > 50, "the ceilings are not read yet"

    waits.set_limits({})
    await finish(waits)

    assert seconds_left(books, email_id) <= 0


async def test_a_higher_ceiling_shortens_waits_and_waiting_groups_in_proportion_and_a_lower_one_changes_nothing(
    outbox: Outbox, books: Books
) -> None:
    first, second = make_wait(books, 2)
    books.connection.execute(
        "insert into domain_line values (%s, 'normal', 'acme', now() + interval '200 s')", [DOMAIN]
    )
    waits = DomainWaits(outbox)
    waits.set_limits({DOMAIN: SLOW})
    waits.set_limits({DOMAIN: DomainLimit(DOMAIN, 0.5)})
    await finish(waits)
    assert 90 < seconds_left(books, first) <= 100
    waits.set_limits({DOMAIN: SLOW})

    waits.set_limits({DOMAIN: DomainLimit(DOMAIN, 10.0)})
    await finish(waits)

    # From 0.5 to 1 to 10 emails per second.
    assert 4 < seconds_left(books, first) <= 5
    assert 9 < seconds_left(books, second) <= 10
    (group,) = books.select("select extract(epoch from until_at - now())::float8 as seconds from domain_line")
    assert 9 < group["seconds"] <= 10


async def test_many_waits_are_shortened_in_batches(outbox: Outbox, books: Books) -> None:
    email_ids = make_wait(books, BATCH + 1)
    waits = DomainWaits(outbox)
    waits.set_limits({DOMAIN: SLOW})
    waits.set_limits({DOMAIN: DomainLimit(DOMAIN, 2.0)})

    assert await finish(waits) == 2
    assert seconds_left(books, email_ids[-1]) == pytest.approx(50 * (BATCH + 1), abs=30)


@pytest.mark.parametrize(
    ("before", "now", "part"),
    [
        ((1, None), (4, None), 0.25),
        ((4, None), (1, None), 1.0),
        ((None, 2), (None, 8), 0.25),
        ((1, 2), (2, 2), 0.5),
        ((4, 2), (8, 2), 1.0),
        ((1, 2), (2, 8), 0.5),
        ((1, 2), (2, None), 0.5),
        ((1, None), (1, 5), 1.0),
        # Attempts became shorter or longer than the second that is assumed before the first one.
        ((None, 2), (None, 2, 0.1), 0.1),
        ((None, 2, 0.1), (None, 2, 0.04), 0.4),
        ((None, 2, 0.1), (None, 2, 0.06), 1.0),
        ((None, 2, 0.1), (None, 2, 5.0), 1.0),
        ((4, 2), (4, 2, 0.1), 0.5),
        ((1, 2), (1, 2, 0.1), 1.0),
        ((None, 2, 0.1), (None, 3, 0.1), 2 / 3),
    ],
)
async def test_the_part_of_a_wait_that_is_left(
    outbox: Outbox, books: Books, before: Ceilings, now: Ceilings, part: float
) -> None:
    (email_id,) = make_wait(books, 1)
    waits = DomainWaits(outbox)

    waits.set_limits({DOMAIN: DomainLimit(DOMAIN, *before)})
    waits.set_limits({DOMAIN: DomainLimit(DOMAIN, *now)})
    await finish(waits)

    assert seconds_left(books, email_id) == pytest.approx(100 * part, abs=5)


async def test_slow_attempts_between_fast_ones_shorten_the_waits_only_once(outbox: Outbox, books: Books) -> None:
    (email_id,) = make_wait(books, 1)
    waits = DomainWaits(outbox)

    for seconds in (None, 0.1, 1.0, 0.1, 1.0, 0.1):
        waits.set_limits({DOMAIN: DomainLimit(DOMAIN, None, 2, seconds)})
        await finish(waits)

    assert seconds_left(books, email_id) == pytest.approx(10, abs=3)


async def test_the_leading_relay_publishes_them_within_two_seconds(
    start: Start, settings: Settings, books: Books
) -> None:
    books.connection.execute("insert into domain_limit (domain, per_second) values (%s, 1)", [DOMAIN])
    (email_id,) = make_wait(books, 1)
    await start(settings)
    await until(lambda: books.sessions("dispatcher relay"))

    books.connection.execute("delete from domain_limit")

    await until(lambda: books.status(email_id) == "pending", seconds=2)
