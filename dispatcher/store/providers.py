"""The state of providers that the workers of all hosts share: the rate, and which workers can use the provider."""

from __future__ import annotations

from dispatcher.domain.values import dataclass
from dispatcher.domain.waiting import ProviderProblem
from dispatcher.store.connections import Pool
from dispatcher.store.statements import Source, fetch, statement


@dataclass(frozen=True, slots=True)
class ProviderRate:
    """How many emails per second all hosts together may send now through a provider with a ceiling."""

    provider: str
    per_second: float
    was_throttled: bool
    was_used: bool


class ProviderStore:
    """Takes tokens of providers, and reports the states of providers, for one worker. Each method raises
    StoreUnavailable if the same call might succeed later. Rates and ceilings are in emails per second."""

    def __init__(self, pool: Pool, *, slot: str) -> None:
        self._pool = pool
        self._slot = slot

    async def begin_rate(self, provider: str, ceiling: float) -> None:
        """Creates the provider's token bucket if it does not exist."""
        await fetch(self._pool, "begin_rate", {"provider": provider, "ceiling": ceiling})

    async def take_tokens(self, provider: str, *, ceiling: float, burst: float, wanted: int) -> tuple[int, float]:
        """Takes up to `wanted` tokens, one per email, from the provider's bucket, which can contain `burst` tokens.

        Returns the number of tokens taken, and the current rate. Creates an empty bucket if the provider has none.
        """
        parameters = {"provider": provider, "ceiling": ceiling, "burst": burst, "wanted": wanted}
        if rows := await fetch(self._pool, "take_tokens", parameters):
            return rows[0][0], rows[0][1]
        await self.begin_rate(provider, ceiling)
        return 0, ceiling

    async def halve_rate(self, provider: str, ceiling: float) -> float | None:
        """Halves the rate after the provider throttled us. Returns the new rate; None, and changes nothing, if the rate
        was already halved less than a second ago."""
        rows = await fetch(self._pool, "halve_rate", {"provider": provider, "ceiling": ceiling})
        return rows[0][0] if rows else None

    async def set_state(self, provider: str, state: str, reason: str | None, seconds: float | None) -> None:
        """Stores the state of this worker's circuit breaker, and how long the state lasts (None: unknown)."""
        parameters = {"provider": provider, "slot": self._slot, "state": state, "reason": reason, "seconds": seconds}
        await fetch(self._pool, "set_provider_state", parameters)

    async def take_resumes(self) -> list[str]:
        """The providers that an operator has resumed while this worker cannot use them. Returns each resume once."""
        return [row[0] for row in await fetch(self._pool, "take_resumes", {"slot": self._slot})]

    async def delete_states(self) -> None:
        """Deletes the states that workers in this slot have stored. Call this when the worker starts or exits."""
        await fetch(self._pool, "delete_provider_states", {"slot": self._slot})


@statement
async def find_troubles(source: Source) -> list[ProviderProblem]: ...
@statement
async def list_rates(source: Source) -> list[ProviderRate]: ...
