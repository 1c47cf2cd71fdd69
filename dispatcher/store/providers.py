"""What workers on all hosts agree on about a provider: its rate, and whether it can be used now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dispatcher.domain.waiting import Trouble
from dispatcher.store.connections import Pool, Session
from dispatcher.store.statements import fetch, fetch_sync


@dataclass(frozen=True, slots=True)
class ProviderState:
    """What one worker slot says of a provider.

    Attributes:
        state: `paused` (throttled), `open` (failing as a whole) or `half_open` (trying one email).
        seconds_left: How long it lasts; None or below zero where it should have ended.
    """

    provider: str
    slot: str
    state: str
    reason: str | None
    seconds_left: float | None


class ProviderStore:
    """A worker's statements about providers; each raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool, *, slot: str) -> None:
        self._pool = pool
        self._slot = slot

    async def begin_rate(self, provider: str, ceiling: float) -> None:
        """Makes sure that the provider's bucket exists; `ceiling` in emails per second."""
        await fetch(self._pool, "begin_rate", {"provider": provider, "ceiling": ceiling})

    async def take_tokens(self, provider: str, *, ceiling: float, burst: float, wanted: int) -> tuple[int, float]:
        """How many of the wanted tokens there are, and the rate in emails per second at which more come.

        Where the provider has no bucket yet, one begins to fill.
        """
        parameters = {"provider": provider, "ceiling": ceiling, "burst": burst, "wanted": wanted}
        if rows := await fetch(self._pool, "take_tokens", parameters):
            return rows[0][0], rows[0][1]
        await self.begin_rate(provider, ceiling)
        return 0, ceiling

    async def halve_rate(self, provider: str, ceiling: float) -> float | None:
        """Halves the rate after the provider throttled us; the new rate, or None if somebody has just done it."""
        rows = await fetch(self._pool, "halve_rate", {"provider": provider, "ceiling": ceiling})
        return rows[0][0] if rows else None

    async def set_state(self, provider: str, state: str, reason: str | None, seconds: float | None) -> None:
        """Tells others how this worker sees the provider."""
        parameters = {"provider": provider, "slot": self._slot, "state": state, "reason": reason, "seconds": seconds}
        await fetch(self._pool, "set_provider_state", parameters)

    async def forget_states(self) -> None:
        """Takes back what this slot said: its worker begins, or ends."""
        await fetch(self._pool, "forget_provider_states", {"slot": self._slot})


def list_states(connection: Session) -> list[ProviderState]:
    """The providers that workers cannot use now; empty where all is well."""
    return fetch_sync(connection, "list_provider_states", into=ProviderState)


_WORST_FIRST: Final = ("open", "half_open", "paused")


def find_trouble(connection: Session) -> list[Trouble]:
    """A row per provider that some worker cannot use now, by name; empty where all is well."""
    return worst_states(list_states(connection))


def worst_states(states: Iterable[ProviderState]) -> list[Trouble]:
    """The troubles in these states, one per provider."""
    by_provider: dict[str, list[ProviderState]] = {}
    for state in states:
        by_provider.setdefault(state.provider, []).append(state)
    return [_worst(states) for _, states in sorted(by_provider.items())]


def _worst(states: list[ProviderState]) -> Trouble:
    # Of equals, the one that lasts longest.
    worst = min(states, key=lambda each: (_WORST_FIRST.index(each.state), -(each.seconds_left or 0.0)))
    seconds_left = None if worst.seconds_left is None else max(0.0, worst.seconds_left)
    return Trouble(worst.provider, worst.state, len(states), worst.reason, seconds_left)
