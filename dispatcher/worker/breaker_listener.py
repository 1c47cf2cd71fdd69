"""Acts on changes of circuit breakers: logs each change, and stores it in PostgreSQL for `dispatcher status`.

If no provider may be tried, the worker stops consuming and returns its messages to RabbitMQ. RabbitMQ delivers the
messages to hosts with a working provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dispatcher.broker.consumer import Consumer
from dispatcher.domain.scrub import scrub
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import steady_clock
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.routing.breaker import FAILURES_IN_A_ROW, BreakerState, CircuitBreaker
from dispatcher.routing.routes import Routes
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

KEEP_PREFETCHED_SECONDS: Final = 5.0
"""If a provider may be tried again within this time, the worker keeps its prefetched messages, because it would cost
more to return these messages and fetch them again."""
RETRY_SECONDS: Final = 5.0
"""The wait before the next try to store a breaker's state, after PostgreSQL has failed."""


class BreakerListener:
    """Creates the circuit breakers of this worker, and acts on their changes."""

    def __init__(self, store: ProviderStore) -> None:
        self._store = store
        self._log = get_log()
        self._changed = asyncio.Event()
        self._has_unpublished = asyncio.Event()
        self._unpublished: dict[str, tuple[BreakerState, str | None, float]] = {}

    def new_breaker(self, provider: str, *, window: int = FAILURES_IN_A_ROW) -> CircuitBreaker:
        # PostgreSQL may still have the state of the worker that used this slot before. Overwrite that state.
        self._queue_state(provider, BreakerState.CLOSED, None, 0.0)
        _show_state(provider, BreakerState.CLOSED)
        return CircuitBreaker(
            steady_clock,
            lambda state, reason, seconds: self._on_change(provider, state, reason, seconds),
            window=window,
        )

    def note_pauses(self) -> None:
        """Makes `run` check which providers may be tried, because an operator paused or resumed a provider."""
        self._changed.set()

    async def apply_resumes(self, routes: Routes) -> None:
        """Ends the waits of breakers whose providers an operator has resumed. While no breaker waits, asks nothing."""
        if routes.change_seconds is not None:
            routes.resume(await self._store.take_resumes())

    async def run(self, routes: Routes, consumer: Consumer, wake: Callable[[], None]) -> None:
        """Acts on changes of breakers and on pauses until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._control_consuming, routes, consumer, wake))
            # A separate task, so that a slow PostgreSQL does not delay `_control_consuming`.
            group.create_task(raise_on_stray_cancel(self._publish_states))

    async def _control_consuming(self, routes: Routes, consumer: Consumer, wake: Callable[[], None]) -> None:
        while True:
            self._changed.clear()
            wait_seconds = routes.wait_seconds
            if wait_seconds > KEEP_PREFETCHED_SECONDS:
                consumer.pause()
            elif not wait_seconds:
                # Resume consuming during a probe, too: if the probe ends without an answer, the next probe needs a new
                # message.
                consumer.resume()
                wake()
            await _wait_for(self._changed, routes.change_seconds)

    async def _publish_states(self) -> None:
        while True:
            self._has_unpublished.clear()
            try:
                for provider, change in list(self._unpublished.items()):
                    state, reason, seconds = change
                    await self._store.set_state(provider, state, reason, seconds or None)
                    if self._unpublished.get(provider) is change:
                        del self._unpublished[provider]
            except DispatcherError as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=RETRY_SECONDS)
            await _wait_for(self._has_unpublished, RETRY_SECONDS if self._unpublished else None)

    def _queue_state(self, provider: str, state: BreakerState, reason: str | None, seconds: float) -> None:
        self._unpublished[provider] = (state, reason, seconds)
        self._has_unpublished.set()

    def _on_change(self, provider: str, state: BreakerState, reason: str | None, seconds: float) -> None:
        words = None if reason is None else scrub(reason)
        _show_state(provider, state)
        self._queue_state(provider, state, words, seconds)
        self._changed.set()
        if state is BreakerState.CLOSED:
            self._log.info("provider.resumed", provider=provider)
        elif state is not BreakerState.HALF_OPEN:
            log = self._log.error if state is BreakerState.OPEN else self._log.warning
            log("provider.paused", provider=provider, state=state, reason=words, seconds=round(seconds, 1))


def _show_state(provider: str, state: BreakerState) -> None:
    for each in BreakerState:
        metrics.BREAKERS.set(each is state, provider, each)


async def _wait_for(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
