"""Where emails share calls, leases wait a moment for as many as a call takes; elsewhere for nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from pika import BasicProperties

from dispatcher.broker.consumer import Delivery
from dispatcher.broker.pointer import Pointer
from dispatcher.config import Settings, load
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt, CallLimits, Part
from dispatcher.routing.breaker import Breaker
from dispatcher.routing.routes import Route, Routes
from dispatcher.worker import pipeline
from dispatcher.worker.coalescing import coalesced
from dispatcher.worker.leasing import Leasing
from dispatcher.worker.outage import StoreOutage
from tests.worker.scripted import ScriptedProvider

FOR_EVER = 3600.0
FULL = 8


class Store:
    """Leases nothing, and notes how many were asked for together."""

    def __init__(self) -> None:
        self.asked_for: list[int] = []
        self.locked = self

    async def around(self, email_ids: dict[UUID, str], lease: Any) -> tuple[Any, set[UUID]]:
        """Nothing is locked."""
        return await lease(set(email_ids)), set()

    async def lease(self, keys_by_id: dict[UUID, str], _seconds: float) -> list[Any]:
        """No leases."""
        self.asked_for.append(len(keys_by_id))
        return []

    async def find_standing(self, _email_ids: Sequence[UUID]) -> dict[UUID, Any]:
        """No such emails: their messages go to the DLQ."""
        return {}


class Consumer:
    """Takes every answer."""

    def ack(self, deliveries: list[Delivery]) -> None:
        """Nothing to ack."""

    def reject(self, delivery: Delivery) -> None:
        """Noted by nobody."""


@dataclass
class Arrivals:
    """What arrives for leases that wait for ever where they wait."""

    store: Store
    leasing: Leasing

    async def come(self, count: int) -> None:
        """So many arrive at once, and everything happens that happens at once."""
        for _ in range(count):
            email_id = uuid4()
            delivery = Delivery(1, 1, b"", BasicProperties(), redelivered=False)
            self.leasing.add(delivery, Pointer(email_id, "key"))
        for _ in range(20):
            await asyncio.sleep(0)


def arrivals(*, full: int | None) -> Arrivals:
    """Leases that are being taken."""
    store = Store()
    leasing = Leasing(
        store,  # type: ignore[arg-type]
        Consumer(),  # type: ignore[arg-type]
        StoreOutage(),
        lease_seconds=60.0,
        full=full,
        linger_seconds=FOR_EVER,
        room=lambda: 100,
        in_hand=lambda _: False,
        begin=lambda *_: None,
    )
    return Arrivals(store, leasing)


async def test_after_a_good_many_as_many_as_a_call_takes_are_waited_for() -> None:
    here = arrivals(full=FULL)
    running = asyncio.create_task(here.leasing.run())
    await here.come(FULL // 2)
    await here.come(FULL - 1)
    before = list(here.store.asked_for)
    await here.come(1)

    assert before == [FULL // 2]
    assert here.store.asked_for == [FULL // 2, FULL]
    running.cancel()


async def test_what_comes_now_and_then_waits_for_nobody() -> None:
    here = arrivals(full=FULL)
    running = asyncio.create_task(here.leasing.run())
    for _ in range(3):
        await here.come(1)

    assert here.store.asked_for == [1, 1, 1]
    running.cancel()


async def test_a_stop_does_not_wait_for_company() -> None:
    here = arrivals(full=FULL)
    running = asyncio.create_task(here.leasing.run())
    await here.come(FULL // 2)
    await here.come(1)

    await asyncio.wait_for(here.leasing.stop(), 10)

    assert here.store.asked_for == [FULL // 2]
    running.cancel()


class Sharing(ScriptedProvider):
    """Emails may share its calls."""

    @property
    def limits(self) -> CallLimits:
        """Thirty at most."""
        return CallLimits(emails=30, recipients=1000, octets=1_000_000)

    def part_of(self, email: OutgoingEmail) -> Part | None:
        """Never asked for here."""
        raise NotImplementedError

    async def send_many(self, parts: Sequence[Part], attempt: Attempt) -> Any:
        """Never called here."""
        raise NotImplementedError


@pytest.mark.parametrize(
    ("prefetch", "most", "full"), [(256, 100, 30), (256, 20, 20), (40, 100, 20), (256, 1, None)], ids=str
)
async def test_a_full_lease_is_what_a_call_takes_and_at_most_half_of_the_window(
    monkeypatch: pytest.MonkeyPatch, prefetch: int, most: int, full: int | None
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(pipeline, "Leasing", lambda *_, **given: told.update(given))
    route = Route(coalesced(Sharing(), most), Breaker(time.monotonic, lambda *_: None))

    pipeline.Pipeline(
        settings(prefetch),
        consumer=None,  # type: ignore[arg-type]
        store=None,  # type: ignore[arg-type]
        routes=Routes([route]),
        watch=None,  # type: ignore[arg-type]
        ledger=None,  # type: ignore[arg-type]
    )

    assert told["full"] == full


def settings(prefetch: int) -> Settings:
    """Those of a worker with that window."""
    return load({"DISPATCHER_PREFETCH": str(prefetch)})
