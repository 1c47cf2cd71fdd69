"""An email that is pinned to a provider with idempotency keys; see `domain.decision`."""

from __future__ import annotations

from typing import NamedTuple


class Pin(NamedTuple):
    """The only provider that may be tried, because it may have accepted the email under an idempotency key.

    Attributes:
        since: When the first attempt whose outcome is unknown began (`clock.steady_clock`).
    """

    provider: str
    since: float
