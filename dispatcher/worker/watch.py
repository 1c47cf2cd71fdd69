"""Watches the providers: when none may be tried, deliveries go back to RabbitMQ, for hosts that can use theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dispatcher.broker.consumer import Consumer
from dispatcher.errors import StoreUnavailable
from dispatcher.routing.breaker import Breaker, State
from dispatcher.routing.routes import Routes
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.sending import steady_clock

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
        self._untold: dict[str, tuple[State, str | None, float]] = {}

    def new_breaker(self, provider: str) -> Breaker:
        """A breaker whose changes are acted on."""
        return Breaker(steady_clock, lambda state, reason, seconds: self._note(provider, state, reason, seconds))

    async def run(self, routes: Routes, consumer: Consumer, wake: Callable[[], None]) -> None:
        """Acts until cancelled.

        Args:
            wake: Called when more emails may be leased than before.
        """
        while True:
            self._changed.clear()
            wait_seconds = routes.wait_seconds
            if wait_seconds > HAND_BACK_SECONDS:
                consumer.pause()
            elif routes.room != 0:
                consumer.resume()
                wake()
            all_told = await self._tell()
            await self._wait(wait_seconds, all_told=all_told)

    async def _wait(self, wait_seconds: float, *, all_told: bool) -> None:
        timeouts = [wait_seconds] if wait_seconds else []
        timeouts += [] if all_told else [RETELL_SECONDS]
        try:
            async with asyncio.timeout(min(timeouts) if timeouts else None):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _tell(self) -> bool:
        """Tells other hosts what changed; whether everything is told."""
        for provider, told in list(self._untold.items()):
            state, reason, seconds = told
            try:
                await self._store.set_state(provider, state, reason, seconds or None)
            except StoreUnavailable:
                return False
            if self._untold.get(provider) is told:
                del self._untold[provider]
        return True

    def _note(self, provider: str, state: State, reason: str | None, seconds: float) -> None:
        self._untold[provider] = (state, reason, seconds)
        self._changed.set()
        if state is State.CLOSED:
            self._log.info("provider.resumed", provider=provider)
        elif state is not State.HALF_OPEN:
            self._log.error(
                "provider.paused", provider=provider, state=state, reason=reason, seconds=round(seconds, 1)
            )
