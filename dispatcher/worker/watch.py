"""Watches the providers: when none may be tried, deliveries go back to RabbitMQ, for hosts that can use theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dispatcher.broker.consumer import Consumer
from dispatcher.domain.scrub import scrub
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import steady_clock
from dispatcher.host.lifecycle import unless_cut_off
from dispatcher.routing.breaker import FAILURES_IN_A_ROW, Breaker, State
from dispatcher.routing.routes import Routes
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

HAND_BACK_SECONDS: Final = 5.0
"""A shorter pause is waited out with the prefetch window in hand; giving it back and fetching it again costs more."""
RETELL_SECONDS: Final = 5.0
"""After PostgreSQL could not be told."""


class ProviderWatch:
    """Makes breakers, and acts on what they tell: logs it, tells other hosts, stops and resumes consuming."""

    def __init__(self, store: ProviderStore) -> None:
        self._store = store
        self._log = get_log()
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._untold: dict[str, tuple[State, str | None, float]] = {}

    def new_breaker(self, provider: str, *, window: int = FAILURES_IN_A_ROW) -> Breaker:
        """A breaker whose changes are acted on.

        Args:
            window: How many emails this worker may have on the wire to it at once.
        """
        # What this slot's worker said before it died is no longer true.
        self._tell_soon(provider, State.CLOSED, None, 0.0)
        _show_state(provider, State.CLOSED)
        return Breaker(
            steady_clock,
            lambda state, reason, seconds: self._note(provider, state, reason, seconds),
            window=window,
        )

    async def run(self, routes: Routes, consumer: Consumer, wake: Callable[[], None]) -> None:
        """Acts until cancelled.

        Args:
            wake: Called when more emails may be leased than before.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(unless_cut_off(self._act, routes, consumer, wake))
            # Apart: PostgreSQL may be slow to hear it, and deliveries must not wait for that.
            group.create_task(unless_cut_off(self._tell))

    async def _act(self, routes: Routes, consumer: Consumer, wake: Callable[[], None]) -> None:
        while True:
            self._changed.clear()
            wait_seconds = routes.wait_seconds
            if wait_seconds > HAND_BACK_SECONDS:
                consumer.pause()
            elif not wait_seconds:
                # Even while a probe is under way: should it end without a word, it takes a message to try again.
                consumer.resume()
                wake()
            await _wait_for(self._changed, routes.change_seconds)

    async def _tell(self) -> None:
        """Tells other hosts what changed, until cancelled."""
        while True:
            self._news.clear()
            try:
                for provider, told in list(self._untold.items()):
                    state, reason, seconds = told
                    await self._store.set_state(provider, state, reason, seconds or None)
                    if self._untold.get(provider) is told:
                        del self._untold[provider]
            except DispatcherError as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=RETELL_SECONDS)
            await _wait_for(self._news, RETELL_SECONDS if self._untold else None)

    def _tell_soon(self, provider: str, state: State, reason: str | None, seconds: float) -> None:
        self._untold[provider] = (state, reason, seconds)
        self._news.set()

    def _note(self, provider: str, state: State, reason: str | None, seconds: float) -> None:
        words = None if reason is None else scrub(reason)
        _show_state(provider, state)
        self._tell_soon(provider, state, words, seconds)
        self._changed.set()
        if state is State.CLOSED:
            self._log.info("provider.resumed", provider=provider)
        elif state is not State.HALF_OPEN:
            log = self._log.error if state is State.OPEN else self._log.warning
            log("provider.paused", provider=provider, state=state, reason=words, seconds=round(seconds, 1))


def _show_state(provider: str, state: State) -> None:
    for each in State:
        metrics.BREAKERS.set(each is state, provider, each)


async def _wait_for(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
