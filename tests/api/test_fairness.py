"""Requests take turns: those of one caller or tenant, however many, leave the others permits, sessions, look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final
from uuid import UUID

import psycopg
import pytest

from dispatcher.admission.fair_limiter import FairTurns
from dispatcher.admission.problems import Problem
from dispatcher.domain.api_key import Secret
from tests.api.running_api import EMAIL, Answer, Api, make_key
from tests.store.suppressing import hasher_of
from tests.waiting import DEADLINE_SECONDS, until

MANY: Final = 200
FLOOD: Final = 12
ALL: Final = ["send", "read", "operate"]


class Requests:
    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self._ends: list[asyncio.Event] = []
        self.holding: list[str] = []

    def send(self, name: str, count: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._hold(name)) for _ in range(count)]

    async def _hold(self, name: str) -> None:
        async with self._turns.turn(name):
            end = asyncio.Event()
            self.holding.append(name)
            self._ends.append(end)
            await end.wait()

    def end_oldest(self) -> None:
        self._ends.pop(0).set()
        self.holding.pop(0)


@pytest.mark.parametrize("permits", [2, 4])
async def test_a_caller_within_its_half_never_waits_for_another_caller(permits: int) -> None:
    turns = FairTurns(permits, seconds=DEADLINE_SECONDS)
    requests = Requests(turns)
    tasks = requests.send("a", MANY)
    await until(lambda: len(requests.holding) == permits // 2)

    admitted = 0
    for _ in range(MANY):
        async with asyncio.timeout(DEADLINE_SECONDS), turns.turn("b"):
            admitted += 1

    assert (admitted, len(requests.holding)) == (MANY, permits // 2)
    for task in tasks:
        task.cancel()


async def test_a_caller_that_joins_waits_for_one_turn_of_each_other_caller() -> None:
    requests = Requests(FairTurns(4, seconds=DEADLINE_SECONDS))
    tasks = [*requests.send("a", MANY), *requests.send("b", MANY)]
    await until(lambda: requests.holding == ["a", "a", "b", "b"])
    tasks += requests.send("c")
    await asyncio.wait(tasks, timeout=0)

    for _ in range(2):
        requests.end_oldest()
        await until(lambda: len(requests.holding) == 4)
    assert "c" in requests.holding
    for task in tasks:
        task.cancel()


async def test_a_request_whose_turn_does_not_come_is_refused_and_no_permit_is_lost() -> None:
    turns = FairTurns(2, seconds=0)
    requests = Requests(turns)
    async with turns.turn("a"):
        with pytest.raises(Problem) as refused:
            async with turns.turn("a"):
                pytest.fail("two permits of two")
    tasks = requests.send("a") + requests.send("b")
    await until(lambda: sorted(requests.holding) == ["a", "b"])

    assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
    for task in tasks:
        task.cancel()


async def test_a_request_that_is_cancelled_as_it_gets_its_permit_gives_the_permit_back() -> None:
    turns = FairTurns(2, seconds=DEADLINE_SECONDS)
    requests = Requests(turns)
    (first,) = requests.send("a")
    await until(lambda: requests.holding)
    (second,) = requests.send("a")
    waiting = asyncio.create_task(asyncio.wait([second], timeout=0))
    await waiting
    first.cancel()
    await asyncio.wait([first])  # its permit goes to the second request, which has not continued yet
    second.cancel()
    await asyncio.wait([second])

    async with asyncio.timeout(DEADLINE_SECONDS), turns.turn("a"):
        pass


@contextmanager
def other_transaction(database_url: str, statement: str) -> Iterator[None]:
    """A transaction that has executed a statement, and keeps its locks during the block."""
    with psycopg.connect(database_url, application_name="test session") as outside:
        outside.execute(statement.encode())
        yield
        outside.rollback()


@asynccontextmanager
async def flood(
    api: Api, connection: psycopg.Connection, lock: str, request: Callable[[], Awaitable[Answer]]
) -> AsyncIterator[None]:
    """During the block, many requests wait for the statement's locks, or for each other: few of them are answered."""
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with other_transaction(api.settings.database_url, lock):
        tasks = [asyncio.ensure_future(request()) for _ in range(FLOOD)]
        await until(lambda: connection.execute(waiting).fetchall()[0][0] > 0)
        for _ in range(2 * FLOOD):  # all of them have arrived
            assert (await api.get("/healthz")).status == 200
        yield
        answered = sum(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    assert answered < FLOOD / 2


async def test_operators_requests_of_one_tenant_leave_sessions_to_other_tenants_and_to_recipients(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = UUID((await api.post("a", EMAIL)).json["id"])
    token = hasher_of(connection).unsubscribe_token(email_id, "ann@example.org")
    first, second, third = (make_key(connection, tenant_id=tenant, scopes=ALL) for tenant in ("a", "b", None))
    pause = "insert into dispatcher.pause (scope, name, reason, actor) values ('tenant', 'a', 'test', 'test')"
    reason = {"reason": "test"}

    async with flood(api, connection, pause, lambda: api.call("POST", "/v1/pauses", body=reason, token=first)):
        others = await asyncio.gather(
            api.get("/v1/pauses", token=second),
            api.get("/v1/webhooks", token=second),
            api.get("/v1/suppressions", token=second),
            api.call("POST", "/v1/emails/cancel", body=reason | {"all": True}, token=second),
            api.call("POST", "/v1/webhooks", body=reason | {"url": "https://example.org/"}, token=second),
            api.get("/v1/webhooks?tenant_id=a", token=third),
            api.call("POST", f"/v1/unsubscribe/{token}", raw=b""),
        )

    assert [answer.status for answer in others] == [200, 200, 200, 200, 201, 200, 200]


async def test_look_ups_of_one_tenant_do_not_delay_those_of_another(api: Api, connection: psycopg.Connection) -> None:
    await api.post("a", EMAIL | {"tenant_id": "a"})
    first, second = (make_key(connection, tenant_id=tenant) for tenant in ("a", "b"))

    for table, slow, quick in (
        ("email_content", "/v1/emails?tag=x", "/v1/emails?status=pending"),
        ("outgoing_event", "/v1/events", "/v1/emails"),
    ):
        lock = f"lock table dispatcher.{table} in access exclusive mode"
        async with flood(api, connection, lock, partial(api.get, slow, token=first)):
            for _ in range(FLOOD):
                assert (await api.get(quick, token=second)).status == 200


async def test_unknown_keys_do_not_delay_known_ones(api: Api, connection: psycopg.Connection) -> None:
    known = make_key(connection)
    assert (await api.get("/v1/emails", token=known)).status == 200

    lock = "lock table dispatcher.api_key in access exclusive mode"
    async with flood(api, connection, lock, lambda: api.get("/v1/emails", token=Secret.new().text())):
        for _ in range(FLOOD):
            assert (await api.get("/v1/emails", token=known)).status == 200
