"""When the expired leases of a vanished host are settled."""

from __future__ import annotations

from typing import Final

HOST_GRACE_SECONDS: Final = 5.0
"""For so long, or for half the lease's length, an expired lease is left to the relay of its owner's host, which can
read the owner's in-flight ledger."""
MOST_RESCUE_SECONDS: Final = 5.0
"""The longest time between two searches for expired leases of other hosts."""


def longest_rescue_seconds(lease_seconds: float) -> float:
    """How long after its expiry a vanished host's lease is settled at the latest, while a relay leads."""
    return host_grace_seconds(lease_seconds) + rescue_interval_seconds(lease_seconds)


def host_grace_seconds(lease_seconds: float) -> float:
    """How long an expired lease is left to the relay of its owner's host."""
    return min(HOST_GRACE_SECONDS, lease_seconds / 2)


def rescue_interval_seconds(lease_seconds: float) -> float:
    """How often the leading relay searches for expired leases of other hosts."""
    return min(MOST_RESCUE_SECONDS, lease_seconds / 4)
