"""The ses adapter keeps its deadlines, waits, and reuses connections, as the server's record of requests shows."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.domain.outcome import Accepted, Uncertain
from dispatcher.providers.contract import NoFreeConnection
from tests.providers.attempts import FakeAttempt
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.outcome_table import outcome_text
from tests.providers.ses_place import ses_place
from tests.providers.test_ses_outcomes import ELSEWHERE, LATE
from tests.waiting import until


async def test_mark_on_wire_is_called_once_a_connection_is_open(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    async with ses_place(tmp_path) as place:

        def leaving() -> None:
            seen.append((len(place.double.sessions), place.double.begun.total()))

        deadline = asyncio.get_running_loop().time() + 20
        await place.provider.send(an_email(), FakeAttempt(1, deadline, leaving))
        await place.provider.send(an_email(), FakeAttempt(1, deadline, leaving))

    assert [begun for _, begun in seen] == [0, 1]
    assert seen[1][0] == 1


class LeaseExpired(Exception):
    """An exception that a worker raises in `mark_on_wire`."""


async def test_a_worker_can_refuse_in_mark_on_wire(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LeaseExpired

    async with ses_place(tmp_path, connections=1) as place:
        deadline = asyncio.get_running_loop().time() + 20
        with pytest.raises(LeaseExpired):
            await place.provider.send(an_email(), FakeAttempt(1, deadline, refuse))
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert place.double.requests == {str(email.email_id): 1}


async def test_nothing_is_sent_after_the_deadline(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        await send(place.provider, an_email())

        sending = await send(place.provider, an_email(), seconds=0)

        assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
        assert sending.left == 0
        assert place.double.begun.total() == 1


async def test_a_wait_without_a_free_connection_does_not_count_against_ses(tmp_path: Path) -> None:
    async with ses_place(tmp_path, Behaviour(Fault.HANG), connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email(), seconds=LATER_SECONDS, leaves=True))
        await until(lambda: place.double.begun.total() == 1)
        with pytest.raises(NoFreeConnection):
            await send(place.provider, an_email(), seconds=SOON_SECONDS)

        assert isinstance((await first).outcome, Uncertain)
        assert place.double.begun.total() == 1


async def test_the_deadline_restarts_when_a_connection_is_acquired(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with ses_place(tmp_path, Behaviour(latency_seconds=LATER_SECONDS), connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email()))
        await until(lambda: place.double.begun.total() == 1)
        # The response comes after this deadline, but before the later deadline that the attempt gets when the
        # connection is acquired.
        attempt = FakeAttempt(1, loop.time() + 1.5 * LATER_SECONDS, lambda: None)
        attempt.admission = lambda: loop.time() + PATIENCE_SECONDS

        assert isinstance(await place.provider.send(an_email(), attempt), Accepted)
        assert isinstance((await first).outcome, Accepted)


async def test_an_email_refused_in_connection_acquired_frees_its_connection(tmp_path: Path) -> None:
    def refuse() -> float:
        raise LeaseExpired

    async with ses_place(tmp_path, connections=1) as place:
        attempt = FakeAttempt(1, asyncio.get_running_loop().time() + PATIENCE_SECONDS, lambda: None, admission=refuse)
        with pytest.raises(LeaseExpired):
            await place.provider.send(an_email(), attempt)

        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)


async def test_a_cancelled_send_posts_nothing(tmp_path: Path) -> None:
    async with ses_place(tmp_path, connections=1) as place:
        await send(place.provider, an_email())
        place.double.drop_connections()
        await until(lambda: not place.double.sessions)
        task = asyncio.create_task(send(place.provider, an_email()))
        queued = asyncio.create_task(send(place.provider, an_email()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        queued.cancel()
        await asyncio.gather(task, queued, return_exceptions=True)
        sending = await send(place.provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert place.double.begun.total() == 2


async def test_an_idle_connection_that_the_server_closed_has_no_effect(tmp_path: Path, authority: Authority) -> None:
    async with ses_place(tmp_path, tls=authority.server, ca_file=authority.ca_file) as place:
        for _ in range(3):
            sending = await send(place.provider, an_email())
            place.double.drop_connections()
            await until(lambda: not place.double.sessions)
            assert isinstance(sending.outcome, Accepted)

        assert place.double.begun.total() == 3
        assert place.double.connections == 3


async def test_connections_are_limited_by_the_setting_and_reused(tmp_path: Path) -> None:
    async with ses_place(tmp_path, connections=3) as place:
        await asyncio.gather(*(send(place.provider, an_email()) for _ in range(60)))

        assert 1 <= place.double.connections <= 3


async def test_a_connection_without_a_response_is_closed_at_the_deadline(tmp_path: Path) -> None:
    async with ses_place(tmp_path, Behaviour(Fault.HANG), connections=1) as place:
        first = await send(place.provider, an_email(), seconds=SOON_SECONDS, leaves=True)
        place.double.behaviour = Behaviour()
        second = await send(place.provider, an_email())
        queued = await asyncio.gather(*(send(place.provider, an_email()) for _ in range(10)))

    assert isinstance(first.outcome, Uncertain)
    assert isinstance(second.outcome, Accepted)
    assert all(isinstance(sending.outcome, Accepted) for sending in queued)


async def test_emails_use_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with ses_place(tmp_path, Behaviour(latency_seconds=SOON_SECONDS), connections=50) as place:
        sendings = [asyncio.create_task(send(place.provider, an_email())) for _ in range(50)]
        await until(lambda: place.double.begun.total() == 50)
        threads = {thread.name for thread in set(threading.enumerate()) - before}
        await asyncio.gather(*sendings)

    assert {name for name in threads if not name.startswith("asyncio")} <= {"aws-credentials"}
