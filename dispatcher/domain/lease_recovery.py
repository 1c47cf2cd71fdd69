"""How long it takes to recover an email after its lease has expired, if the host of the lease's owner is lost."""

from __future__ import annotations

from typing import Final

HOST_GRACE_SECONDS: Final = 5.0
"""Grace period after a lease expires, at most half the lease. In this period, only the relay of the owner's host may
recover the email, because that relay can read the owner's in-flight ledger."""
MAX_RECOVERY_INTERVAL_SECONDS: Final = 5.0
"""The longest interval between two searches for expired leases of other hosts."""


def longest_recovery_seconds(lease_seconds: float) -> float:
    """If a host is lost: the longest time from the expiry of one of its leases to the recovery of the leased email.
    Assumes that a relay is the leader."""
    return host_grace_seconds(lease_seconds) + recovery_interval_seconds(lease_seconds)


def host_grace_seconds(lease_seconds: float) -> float:
    """The grace period after a lease expires. During this time, only the relay of the owner's host may recover the
    email."""
    return min(HOST_GRACE_SECONDS, lease_seconds / 2)


def recovery_interval_seconds(lease_seconds: float) -> float:
    """How often the leading relay searches for expired leases of other hosts."""
    return min(MAX_RECOVERY_INTERVAL_SECONDS, lease_seconds / 4)
