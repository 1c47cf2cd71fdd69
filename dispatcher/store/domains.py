"""The ceilings of recipient domains: sets them, and takes tokens and slots for a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dispatcher.domain.controls import DomainLimit
from dispatcher.store.connections import Pool, Session
from dispatcher.store.lanes import Author
from dispatcher.store.statements import Source, fetch, fetch_sync

BURST_SECONDS: Final = 0.5
"""The size of a domain's bucket, in seconds. Waiting emails become due several times in this time."""
SLOT_SECONDS: Final = 15.0
"""How long a worker may use the slots of a domain without asking again. If the worker dies, they are free after this
time."""
MOST_WAITING: Final = 10_000
"""The emails that wait for a domain's ceiling are counted up to this number."""


class Claim(NamedTuple):
    """What a worker got of a domain's ceilings.

    Attributes:
        tokens: The emails that it may send now; None if no rate is set.
        slots: The attempts that it may make at the same time; None if no such number is set.
    """

    tokens: int | None
    slots: int | None


@dataclass(frozen=True, slots=True)
class LimitedDomain:
    """A domain that has ceilings, and the emails that wait for them.

    Attributes:
        waiting: Counted up to `MOST_WAITING`.
    """

    limit: DomainLimit
    waiting: int

    def describe(self) -> str:
        """A sentence such as `12 emails wait: example.org may get 5 emails per second.`"""
        more = " or more" if self.waiting >= MOST_WAITING else ""
        wait = "email waits" if self.waiting == 1 else "emails wait"
        return f"{self.waiting:,}{more} {wait}: {self.limit.describe()}."


class DomainStore:
    """A worker's statements about recipient domains. Raises StoreUnavailable if the same call may succeed later."""

    def __init__(self, pool: Pool, *, worker: str) -> None:
        self._pool = pool
        self._worker = worker

    async def claim(self, domain: str, *, tokens: int, slots: int, used: int) -> Claim | None:
        """Takes tokens, and decides how many slots this worker has for the next `SLOT_SECONDS`.

        Args:
            tokens: The most tokens to take.
            slots: How many slots the worker wants; 0 gives all back.
            used: How many attempts are running.

        Returns:
            None if the domain has no ceilings.
        """
        parameters = {
            "domain": domain,
            "worker": self._worker,
            "wanted_tokens": tokens,
            "wanted_slots": slots,
            "used": used,
            "burst_seconds": BURST_SECONDS,
            "slot_seconds": SLOT_SECONDS,
        }
        return next(iter(await fetch(self._pool, "claim_domain", parameters, into=Claim)), None)


async def set_limit(source: Source, domain: str, values: Mapping[str, Any], author: Author) -> DomainLimit:
    """Sets the values that are not None, and keeps the others; audited in the same commit.

    Args:
        values: `per_second` and `concurrent`.
    """
    (limit,) = await fetch(source, "set_domain_limit", {"domain": domain, **values, **author}, into=DomainLimit)
    return limit


async def remove_limit(source: Source, domain: str, author: Author) -> bool:
    """Deletes the ceilings of a domain, audited in the same commit; False if it has none."""
    return bool(await fetch(source, "remove_domain_limit", {"domain": domain, **author}))


async def count_domain_waits(source: Source) -> list[LimitedDomain]:
    """The domains that have ceilings, by name, and how many emails wait for each."""
    return await fetch(source, "count_domain_waits", {"most": MOST_WAITING}, into=_limited)


def count_domain_waits_sync(connection: Session) -> list[LimitedDomain]:
    """As `count_domain_waits`, on a synchronous connection."""
    return fetch_sync(connection, "count_domain_waits", {"most": MOST_WAITING}, into=_limited)


def _limited(domain: str, per_second: float | None, concurrent: int | None, waiting: int) -> LimitedDomain:
    return LimitedDomain(DomainLimit(domain, per_second, concurrent), waiting)
