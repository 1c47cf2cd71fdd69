"""Records results and releases leases of a dead or frozen worker, as its in-flight ledger proves.

Skips emails whose row is locked, and emails for which PostgreSQL refuses the statement, so that they do not delay other
emails. The next settlement of the ledger tries the skipped emails again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.decision import decide
from dispatcher.domain.outcome import Uncertain
from dispatcher.domain.retry import RetryLimits, RetryPolicy
from dispatcher.domain.status import Status
from dispatcher.errors import StatementRefused
from dispatcher.host.ledger_format import InFlightAttempt
from dispatcher.providers.capabilities import idempotency_keys_of
from dispatcher.store.connections import Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, BatchOutcome, LockedRows
from dispatcher.store.results import result_of
from dispatcher.store.settlement import FoundLease, release_found
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

Report = Callable[[Path, str], None]
"""Reports a ledger that cannot be settled: its path, and the reason."""


class Settlement:
    """Records results and releases leases. `locked`: emails that are skipped for now, because their rows are locked."""

    def __init__(self, settings: Settings, pool: Pool, report: Report, *, reason: str, fate: str) -> None:
        """`fate`, such as "The worker died", begins the detail of every uncertain outcome."""
        self.locked = LockedRows(pool, retry_seconds=RETRY_REFUSED_SECONDS)
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self.redeliver_seconds = settings.redeliver_for
        self._key_seconds = idempotency_keys_of(settings.providers)
        self._pool = pool
        self._report = report
        self.reason = reason
        self._fate = fate

    def judge(
        self,
        attempt: InFlightAttempt,
        attempt_base: int,
        pinned_seconds: float | None,
        limits: RetryLimits | None,
    ) -> Result:
        """Decides the result of an attempt in a ledger. An attempt without an answer is uncertain.

        `attempt_base`: the attempts before the last replay or redelivery. `pinned_seconds`, `limits`: None if the email
        has none.
        """
        outcome = attempt.outcome or Uncertain(f"{self._fate} while the email was on the wire.")
        key_seconds = self._key_seconds.get(attempt.provider)
        if pinned_seconds is not None:
            key_seconds = (key_seconds or 0.0) - pinned_seconds
        elif key_seconds is not None:
            is_uncertain = isinstance(outcome, Uncertain)
            key_seconds = key_seconds - (time.time() - attempt.started_at) if is_uncertain else None
        number = attempt.attempt_number - attempt_base
        decision = decide(
            outcome, number, attempt.policy, self._policy, random.random, key_seconds=key_seconds, limits=limits
        )
        return result_of(attempt, outcome, decision, is_pinned=key_seconds is not None)

    async def record(self, store: LeaseStore, path: Path, results: Sequence[Result]) -> BatchOutcome[set[UUID]]:
        """Records results; `answers` contains the emails whose lease was still valid. If PostgreSQL refuses a result,
        tries again without the provider's texts, then reports the error."""
        by_id = {result.email_id: result for result in results}

        async def record(free: set[UUID]) -> set[UUID]:
            try:
                return await store.record([by_id[email_id] for email_id in free])
            except StatementRefused:
                if len(free) > 1:
                    raise
                return await store.record([by_id[email_id].without_provider_texts() for email_id in free])

        return self.reported(path, await self.locked.execute_unlocked(by_id, record))

    async def release(self, path: Path, leases: Collection[FoundLease]) -> BatchOutcome[set[UUID]]:
        """Releases leases that have not changed since they were found; `answers` contains the released emails."""
        by_id: Mapping[UUID, FoundLease] = {lease.email_id: lease for lease in leases}

        async def release(free: set[UUID]) -> set[UUID]:
            async with session(self._pool) as connection:
                return await release_found(connection, [by_id[email_id] for email_id in free])

        return self.reported(path, await self.locked.execute_unlocked(by_id, release))

    def reported(self, path: Path, outcome: BatchOutcome[set[UUID]]) -> BatchOutcome[set[UUID]]:
        """Reports PostgreSQL's error about each email that it refused. Returns `outcome`."""
        for error in outcome.refused.values():
            self._report(path, error.message)
        return outcome

    def log(self, worker: str, released: int, recorded: Sequence[Result]) -> None:
        """Logs what was done for a ledger, and adds it to the metrics."""
        uncertain = sum(result.outcome == "uncertain" for result in recorded)
        for result in recorded:
            metrics.ATTEMPTS.add(1, result.provider, result.outcome, result.error_type or "none")
            if result.status in (Status.SENT, Status.FAILED, Status.HELD):
                metrics.EMAILS.add(1, result.provider, result.outcome)
        metrics.RECOVERED.add(released, self.reason)
        metrics.HELD.add(sum(result.status is Status.HELD for result in recorded), self.reason)
        get_log().warning(
            "ledger.settled",
            worker=worker,
            reason=self.reason,
            released=released,
            recorded=len(recorded) - uncertain,
            uncertain=uncertain,
        )
