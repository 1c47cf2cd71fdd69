"""When leases that ran out are settled whose worker's host is gone."""

from __future__ import annotations

from typing import Final

HOST_GRACE_SECONDS: Final = 5.0
"""A lease that ran out is left to the relay of its owner's host for so long, or for half of its length: that one can
look into the owner's in-flight ledger."""
MOST_RESCUE_SECONDS: Final = 5.0
"""Between two looks for the leases of other hosts, at most."""


def longest_rescue_seconds(lease_seconds: float) -> float:
    """How long after its end the lease of a vanished host is settled, at most, while a relay leads."""
    return host_grace_seconds(lease_seconds) + rescue_interval_seconds(lease_seconds)


def host_grace_seconds(lease_seconds: float) -> float:
    """How long a lease that ran out is left to the relay of its owner's host."""
    return min(HOST_GRACE_SECONDS, lease_seconds / 2)


def rescue_interval_seconds(lease_seconds: float) -> float:
    """How often the leading relay looks for such leases."""
    return min(MOST_RESCUE_SECONDS, lease_seconds / 4)
