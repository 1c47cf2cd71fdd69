"""A host's network: proxies between the host and PostgreSQL and RabbitMQ, which an action can cut or black-hole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.broker.proxy import Proxy

SERVERS: Final = (POSTGRES, RABBITMQ)
TURN_SECONDS: Final = 30.0
"""The time limit for a command, which takes the proxies' thread far less time."""


class Network:
    """Runs the proxies in their own thread. Every method returns when the proxies have carried out the command.
    `urls` has the URL of each server's proxy."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies = {name: Proxy(url) for name, url in urls.items()}
        self._away: frozenset[str] = frozenset()
        self._do(*self._proxies, act=Proxy.__aenter__)
        self.urls = {name: proxy.url for name, proxy in self._proxies.items()}

    @property
    def away(self) -> frozenset[str]:
        return self._away

    def cut(self, names: Collection[str]) -> None:
        """Cut the connections to these servers, and refuse new connections, until `heal`."""
        self._away |= frozenset(names)
        self._do(*names, act=Proxy.sever)

    def black_hole(self, names: Collection[str]) -> None:
        """Keep the connections to these servers open without forwarding anything, until `heal`."""
        self._away |= frozenset(names)
        self._do(*names, act=Proxy.freeze_node)

    def heal(self) -> None:
        """Let the host reach every server again. Idempotent."""
        self._do(*self._proxies, act=Proxy.thaw)
        self._away = frozenset()

    def close(self) -> None:
        self._do(*self._proxies, act=Proxy.__aexit__)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, *names: str, act: Callable[[Proxy], Awaitable[object] | None]) -> None:
        async def act_on_each() -> None:
            for name in names:
                if (acting := act(self._proxies[name])) is not None:
                    await acting

        asyncio.run_coroutine_threadsafe(act_on_each(), self._loop).result(TURN_SECONDS)
