"""Recovers the emails of a lost host, after their leases have expired and a grace period has passed.

The leading relay does this. The host's ledgers are lost, too, so it is unknown which emails were sent. So each email is
uncertain, and becomes held, or due again under the policy `resend`. The relay skips two kinds of leases: leases of
workers on its own host, because it can read their ledgers, and leases that have not expired by the monotonic clock. If
the lost host returns, its workers or its ledgers correct the recovery (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.retry import host_grace_seconds, recovery_interval_seconds
from dispatcher.domain.status import Status
from dispatcher.recovery.unrenewed import UnrenewedLeases
from dispatcher.store.outbox import Outbox, RecoveredEmail
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

BATCH: Final = 500


class LostHosts:
    """A service of the leading relay: recovers the emails of lost hosts.

    A new leader first only observes the leases for a while, so that live workers can renew them even after an outage of
    PostgreSQL that was longer than a lease.
    """

    def __init__(self, settings: Settings, outbox: Outbox, workers_here: Callable[[], Collection[str] | None]) -> None:
        self.interval_seconds = recovery_interval_seconds(settings.lease_seconds)
        self._settings = settings
        self._outbox = outbox
        self._workers_here = workers_here
        self._unrenewed = UnrenewedLeases(settings.lease_seconds)

    async def run_once(self) -> None:
        """Recovers a batch of emails of lost hosts. Does nothing until `workers_here` is known."""
        workers_here = self._workers_here()
        if workers_here is None:
            return
        settings = self._settings
        found = await self._outbox.find_expiring(workers_here, within_seconds=self._unrenewed.within_seconds)
        self._unrenewed.observe(found)
        expired = [lease for lease in found if self._unrenewed.has_expired(lease)][:BATCH]
        grace_seconds = host_grace_seconds(settings.lease_seconds)
        log_rescued(
            await self._outbox.recover_expired(
                settings.on_uncertain, settings.max_attempts, expired, grace_seconds=grace_seconds
            ),
            "lease_expired",
        )


def log_rescued(rescued: Iterable[RecoveredEmail], reason: str) -> None:
    for email in rescued:
        metrics.RECOVERED.add(1, reason)
        metrics.HELD.add(email.status is Status.HELD, reason)
        get_log().warning(
            "email.recovered",
            email_id=str(email.email_id),
            correlation_id=email.correlation_id,
            status=email.status,
            attempt=email.attempt_count,
            reason=reason,
        )
