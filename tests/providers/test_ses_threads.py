"""Deadlines, threads and kept connections of the ses adapter; judged by what was posted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dispatcher.dev.http_behaviour import Act, Behaviour
from dispatcher.domain.outcome import Accepted, Uncertain
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, NoPlace
from dispatcher.providers.ses import SesProvider
from dispatcher.providers.ses_client import SesOptions, new_client
from dispatcher.providers.ses_wire import IDLE_SECONDS, WatchedHTTPConnection, watch
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, Sending, an_email, send
from tests.providers.listeners import listening, say_nothing, unresolved
from tests.providers.ses_place import REGION, aws_environment, ses_place
from tests.providers.test_ses_outcomes import ELSEWHERE, LATE, words_for
from tests.waiting import until


async def test_leaving_is_called_on_the_loop_when_a_connection_stands(tmp_path: Path) -> None:
    seen: list[tuple[bool, int, int]] = []
    async with ses_place(tmp_path) as place:

        def leaving() -> None:
            is_main = threading.current_thread() is threading.main_thread()
            seen.append((is_main, len(place.double.sessions), place.double.begun.total()))

        deadline = asyncio.get_running_loop().time() + 20
        await place.provider.send(an_email(), Attempt(1, deadline, leaving))
        await place.provider.send(an_email(), Attempt(1, deadline, leaving))

    assert [is_main for is_main, _, _ in seen] == [True, True]
    assert [begun for _, _, begun in seen] == [0, 1]
    assert seen[1][1] == 1


class LeaseRanOut(Exception):
    """What a worker raises inside `leaving`."""


async def test_a_worker_may_refuse_at_the_last_moment(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LeaseRanOut

    async with ses_place(tmp_path, threads=1) as place:
        deadline = asyncio.get_running_loop().time() + 20
        with pytest.raises(LeaseRanOut):
            await place.provider.send(an_email(), Attempt(1, deadline, refuse))
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert place.double.requests == {str(email.email_id): 1}


async def test_nothing_leaves_after_the_deadline(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        await send(place.provider, an_email())

        sending = await send(place.provider, an_email(), seconds=0)

        assert (LATE, words_for(sending.outcome)) in ELSEWHERE
        assert sending.left == 0
        assert place.double.begun.total() == 1


async def test_threads_that_hang_take_nobody_with_them(tmp_path: Path) -> None:
    """Two threads hang where nothing can wake them; who waits for a third is told so, and nothing is ever posted."""
    async with ses_place(tmp_path, threads=2) as place:
        await send(place.provider, an_email())  # the client is open
        place.double.drop_connections()
        await until(lambda: not place.double.sessions)
        place.double.requests.clear()
        with unresolved() as answer:
            attempts = [send(place.provider, an_email(), seconds=SOON_SECONDS) for _ in range(4)]
            ended = await asyncio.gather(*attempts, return_exceptions=True)
            answer.set()
        email = an_email()
        after = await send(place.provider, email)

        sendings = [each for each in ended if isinstance(each, Sending)]
        assert [type(each) for each in ended if not isinstance(each, Sending)] == [NoPlace] * 2
        assert [(LATE, words_for(sending.outcome)) in ELSEWHERE for sending in sendings] == [True] * 2
        assert [sending.left for sending in sendings] == [0] * 2
        assert isinstance(after.outcome, Accepted)
        assert place.double.requests == {str(email.email_id): 1}


async def test_who_has_waited_for_a_thread_has_all_of_his_time_then(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with ses_place(tmp_path) as place, slow_provider(place.double.url, threads=1) as (provider, slow):
        first = asyncio.create_task(send(provider, an_email()))
        await until(slow.answered.is_set)
        attempt = Attempt(1, loop.time() + LATER_SECONDS, lambda: None)
        attempt.admission = lambda: loop.time() + PATIENCE_SECONDS
        second = asyncio.create_task(provider.send(an_email(), attempt))
        await asyncio.sleep(0)

        slow.go_on.set()

        assert isinstance((await first).outcome, Accepted)
        assert isinstance(await second, Accepted)
        assert attempt.deadline > loop.time() + LATER_SECONDS


async def test_whoever_is_not_admitted_leaves_his_thread_to_others(tmp_path: Path) -> None:
    def refuse() -> float:
        raise LeaseRanOut

    async with ses_place(tmp_path, threads=1) as place:
        attempt = Attempt(1, asyncio.get_running_loop().time() + PATIENCE_SECONDS, lambda: None, admission=refuse)
        with pytest.raises(LeaseRanOut):
            await place.provider.send(an_email(), attempt)

        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)


async def test_cancelled_before_it_left_nothing_is_posted(tmp_path: Path) -> None:
    async with ses_place(tmp_path, threads=1) as place:
        await send(place.provider, an_email())
        place.double.drop_connections()
        await until(lambda: not place.double.sessions)
        with unresolved() as answer:
            task = asyncio.create_task(send(place.provider, an_email()))
            queued = asyncio.create_task(send(place.provider, an_email()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            queued.cancel()
            await asyncio.gather(task, queued, return_exceptions=True)
            answer.set()
        sending = await send(place.provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert place.double.begun.total() == 2


async def test_a_kept_connection_that_the_server_closed_costs_nothing(tmp_path: Path, authority: Authority) -> None:
    async with ses_place(tmp_path, tls=authority.server, ca_file=authority.ca_file) as place:
        for _ in range(3):
            sending = await send(place.provider, an_email())
            place.double.drop_connections()
            await until(lambda: not place.double.sessions)
            assert isinstance(sending.outcome, Accepted)

        assert place.double.begun.total() == 3
        assert place.double.connections == 3


async def test_connections_are_kept_one_per_thread(tmp_path: Path) -> None:
    async with ses_place(tmp_path, threads=3) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(60)))

        assert 1 <= place.double.connections <= 3


async def test_a_connection_that_was_idle_for_long_is_given_up() -> None:
    async with listening(say_nothing) as port:
        connection = WatchedHTTPConnection("127.0.0.1", port)
        await asyncio.to_thread(connection.connect)
        was_connected = connection.is_connected
        connection.used_at -= IDLE_SECONDS

        assert was_connected
        assert not connection.is_connected
        connection.close()


class Slow:
    """A client whose next thread waits, once the answer is read, before it returns."""

    def __init__(self, options: SesOptions) -> None:
        self.answered = threading.Event()
        self.go_on = threading.Event()
        self.client = new_client(options)
        self.client.meta.events.register("after-call.sesv2.SendEmail", self._wait)

    def _wait(self, **_: object) -> None:
        if not self.answered.is_set():
            self.answered.set()
            assert self.go_on.wait(20)


@asynccontextmanager
async def slow_provider(url: str, threads: int) -> AsyncIterator[tuple[SesProvider, Slow]]:
    """The adapter with such a client."""
    options = SesOptions(REGION, url, threads=threads)
    with aws_environment():
        slow = await asyncio.to_thread(Slow, options)
        provider = SesProvider(options, lambda _: slow.client)
        try:
            yield provider, slow
        finally:
            slow.go_on.set()
            await provider.close()


async def test_an_answer_after_the_deadline_is_dropped_and_logged(tmp_path: Path) -> None:
    email = an_email()
    async with ses_place(tmp_path) as place, slow_provider(place.double.url, threads=1) as (provider, slow):
        with capture_logs() as logs:
            sending = await send(provider, email, seconds=LATER_SECONDS)
            slow.go_on.set()
            after = await send(provider, an_email())

    assert isinstance(sending.outcome, Uncertain)
    assert isinstance(after.outcome, Accepted)
    assert [(line["event"], line["email_id"], line["outcome"]) for line in logs] == [
        ("email.answered_late", str(email.email_id), "accepted")
    ]


async def test_a_deadline_shuts_no_connection_under_another_email(tmp_path: Path) -> None:
    """The first one's answer is read and its connection carries the second one when the first one's deadline passes."""
    async with ses_place(tmp_path) as place, slow_provider(place.double.url, threads=2) as (provider, slow):
        first = asyncio.create_task(send(provider, an_email(), seconds=LATER_SECONDS))
        await until(slow.answered.is_set)
        place.double.behaviour.latency_seconds = 1.5 * LATER_SECONDS
        second = await send(provider, an_email())

        assert isinstance((await first).outcome, Uncertain)
        assert isinstance(second.outcome, Accepted)
        assert place.double.connections == 1


def test_a_botocore_that_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ProviderFault, match="botocore"):
        watch(object())


async def test_one_thread_that_waits_for_an_answer_is_freed_at_the_deadline(tmp_path: Path) -> None:
    async with ses_place(tmp_path, Behaviour(Act.HANG), threads=1) as place:
        first = await send(place.provider, an_email(), seconds=SOON_SECONDS, leaves=True)
        place.double.behaviour = Behaviour()
        second = await send(place.provider, an_email())
        queued = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(10)))

    assert isinstance(first.outcome, Uncertain)
    assert isinstance(second.outcome, Accepted)
    assert all(isinstance(sending.outcome, Accepted) for sending in queued)
