"""libfaketime sets the clock of real processes forward and back while they send emails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dispatcher.dev import cache, debian
from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import Program

BATCH = 150
REMEDY = "Check the network: Debian's package libfaketime is needed."


@dataclass(frozen=True, slots=True)
class Clock:
    """A wall clock that a test can set. The monotonic clock and PostgreSQL's clock are not affected."""

    file: Path

    @property
    def environment(self) -> dict[str, Any]:
        return {
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": self.file,
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(f"{ahead}\n")
        new.replace(self.file)


def _library() -> Path:
    def build(folder: Path) -> None:
        debian.fetch("libfaketime", folder, even_if_installed="libfaketime", remedy=REMEDY, progress=print)

    return next(cache.obtain("libfaketime-debian", build).rglob("libfaketimeMT.so.1"))


@pytest.mark.slow  # five jumps of the clock under load
def test_a_clock_that_jumps_loses_no_lease_and_no_email(host: Host, tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    clock.set("+0")
    sink = host.sink("--latency-ms", "200", "--slow-ms", "2000")
    run = host.run(LEASE_SECONDS=5, SEND_TIMEOUT_SECONDS=10, SMTP_CONNECTIONS=20, **clock.environment)
    run.await_events("relay.leading")
    # Sending takes longer than a third of the lease, so the worker renews the lease meanwhile.
    ids = host.enqueue(emails(1, name="slow", to=lambda _: "slow@example.org"))

    for number, ahead in enumerate(("+1h", "-2h", "+30d", "-30d", "+0")):
        delivered = len(sink.delivered())
        ids |= host.enqueue(emails(BATCH, name=f"batch-{number}"))
        # The clock jumps while some emails are on the wire.
        host.await_delivered(delivered + BATCH // 3)
        clock.set(ahead)
    books = host.await_finished(ids)
    stop(run)

    books.assert_balanced()
    assert books.counts == {"sent": 5 * BATCH + 1}
    _assert_undisturbed(run)
    with psycopg.connect(host.database_url) as connection:
        wrong = connection.execute("select count(*) from every_attempt where finished_at < started_at").fetchone()
    assert wrong == (0,)


def _assert_undisturbed(run: Program) -> None:
    for event in ("email.lease_lost", "email.recovered", "process.hung", "error.unexpected", "message.duplicated"):
        assert run.events(event) == [], event
    attempts = run.events("email.attempted")
    assert len(attempts) == 5 * BATCH + 1
    assert all(0 <= event["duration_ms"] < 15_000 for event in attempts)
    # The log's timestamps prove that the clock jumped.
    assert len({event["timestamp"][:10] for event in attempts}) >= 3
