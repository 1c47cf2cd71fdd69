"""The ceilings of recipient domains: operators set the ceilings, and each worker claims a part of them.

A token allows a worker to send one email. A slot allows a worker to make one attempt at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

from dispatcher.domain.controls import MOST_WAITING, LimitedDomain
from dispatcher.store.connections import Pool
from dispatcher.store.statements import Source, fetch, statement

BURST_SECONDS: Final = 0.5
"""A domain's token bucket contains at most the tokens of this many seconds. The relay wakes waiting emails more often
than this, so no tokens are lost while emails wait."""
SLOT_SECONDS: Final = 15.0
"""How long a worker may use the slots of a domain without asking again. If the worker dies, the slots are free after
this time."""
NEW_SHARE: Final = 0.1
"""The weight of the newest attempt in the mean length of attempts."""


class Claim(NamedTuple):
    """The part of a domain's ceilings that a worker got."""

    tokens: int | None  # how many emails the worker may send now; None: no ceiling per second
    slots: int | None  # how many attempts it may make at the same time; None: no such ceiling
    attempt_seconds: float | None = None  # the mean length of all workers' latest attempts


class DomainStore:
    """Takes tokens and slots of recipient domains, for one worker. Raises StoreUnavailable if the same call might
    succeed later."""

    def __init__(self, pool: Pool, *, worker: str) -> None:
        self._pool = pool
        self._worker = worker

    async def claim(
        self, domain: str, *, tokens: int, slots: int, used: int, lengths: Sequence[float] = ()
    ) -> Claim | None:
        """Takes up to `tokens` tokens, and slots that the worker may use for `SLOT_SECONDS`. None if the domain has no
        ceilings.

        `slots`: how many slots the worker wants; 0 to give all slots back. `used`: how many attempts the worker is
        making now; they keep their slots, even if the worker gets fewer. `lengths`: the lengths, in seconds, of the
        worker's attempts since the last claim.
        """
        parameters = {
            "domain": domain,
            "worker": self._worker,
            "wanted_tokens": tokens,
            "wanted_slots": slots,
            "used": used,
            "burst_seconds": BURST_SECONDS,
            "slot_seconds": SLOT_SECONDS,
            "attempts": len(lengths),
            "mean_seconds": fmean(lengths) if lengths else 0.0,
            "new_share": NEW_SHARE,
        }
        return next(iter(await fetch(self._pool, "claim_domain", parameters, into=Claim)), None)


@statement
async def count_domain_waits(source: Source, *, most: int = MOST_WAITING) -> list[LimitedDomain]: ...
