"""Emails for which a connection is idle are sent without a task, with the same outcomes and the same promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest

from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from tests.providers.sendgrid_place import SendGridPlace, sendgrid_place
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider


@pytest.fixture
async def place(bench: Bench, tmp_path: Path) -> AsyncIterator[SendGridPlace]:
    """A worker's sendgrid adapter after one email, so that one connection is idle."""
    async with sendgrid_place(tmp_path / "double") as opened:
        yield opened


class FailingProvider(ScriptedProvider):
    """Leaves the first email to a task. Then fails in `begin`, after the email is marked as on the wire, or before."""

    def __init__(self, *, is_marked: bool = True) -> None:
        super().__init__()
        self._is_marked = is_marked

    def begin(self, _: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        """See `contract.PromptProvider.begin`."""
        if not self.accepted:
            return None
        if self._is_marked:
            attempt.mark_on_wire()
        raise OSError


async def warm(bench: Bench, *providers: object, **given: str) -> None:
    """Starts a worker, and sends one email. Now a connection is idle, and the worker knows who is suppressed."""
    worker = await bench.start(providers, **given)  # type: ignore[arg-type]
    await bench.enqueue()
    await bench.settled({"sent": 1})
    await until(lambda: worker.in_flight == 0)


def sending_tasks() -> int:
    return sum(getattr(task.get_coro(), "__name__", "") == "_send" for task in asyncio.all_tasks())


def times(place: SendGridPlace, email_id: UUID) -> int:
    return place.double.requests[str(email_id)]


async def test_an_email_on_an_idle_connection_needs_no_task(bench: Bench, place: SendGridPlace) -> None:
    await warm(bench, place.provider)
    place.double.behaviour.latency_seconds = 0.3

    (email_id,) = await bench.enqueue()
    await until(lambda: bench.workers[0].in_flight == 1)

    assert sending_tasks() == 0
    await bench.settled({"sent": 2})
    assert times(place, email_id) == 1
    await bench.nothing_left_on_the_queue()


async def test_a_lost_answer_holds_the_email(bench: Bench, place: SendGridPlace) -> None:
    await warm(bench, place.provider)
    place.double.behaviour.fault, place.double.behaviour.times = Fault.CLOSE, 1

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1, "held": 1})
    assert times(place, email_id) == 1
    assert bench.books.outcomes(email_id) == ["uncertain"]


async def test_an_error_after_the_ledger_slot_holds_the_email_and_makes_no_second_request(bench: Bench) -> None:
    provider = FailingProvider()
    await warm(bench, provider)

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1, "held": 1})
    assert bench.books.outcomes(email_id) == ["uncertain"]
    assert email_id not in provider.calls


async def test_an_error_before_the_ledger_slot_leaves_the_email_to_a_task(bench: Bench) -> None:
    provider = FailingProvider(is_marked=False)
    await warm(bench, provider)

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 2})
    assert provider.accepted[email_id] == 1


async def test_a_deferred_email_is_retried_under_its_lease(bench: Bench, place: SendGridPlace) -> None:
    await warm(bench, place.provider)
    place.double.behaviour.fault, place.double.behaviour.times = Reply(503), 1

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 2})
    assert bench.books.outcomes(email_id) == ["deferred", "accepted"]


async def test_a_refused_key_moves_the_email_to_the_next_provider(bench: Bench, place: SendGridPlace) -> None:
    other = ScriptedProvider("other")
    await warm(bench, place.provider, other)
    place.double.behaviour.fault = Reply(401, b"{}")

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 2})
    assert other.accepted == {email_id: 1}


async def test_a_drain_that_times_out_holds_the_email_on_the_wire(bench: Bench, place: SendGridPlace) -> None:
    await warm(bench, place.provider, DRAIN_SECONDS="0.1")
    place.double.behaviour.latency_seconds = 60
    (email_id,) = await bench.enqueue()
    await until(lambda: times(place, email_id) == 1)

    await bench.workers[0].stop()

    assert bench.books.statuses() == {"sent": 1, "held": 1}
