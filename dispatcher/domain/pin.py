"""The provider to which an uncertain email is pinned; see `domain.decision`."""

from __future__ import annotations

from typing import NamedTuple


class Pin(NamedTuple):
    """The only provider that may be tried again, because it may have accepted the email under an idempotency key.

    Attributes:
        provider: The provider's name.
        since: When the first uncertain attempt began, by `clock.steady_clock`.
    """

    provider: str
    since: float
