"""An email that expires while its provider is away is never sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from dispatcher import Email
from tests.acceptance.double import Double
from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually


@pytest.fixture
def double(tmp_path: Path, host: Host) -> Iterator[Double]:
    """A SendGrid double for this test, which receives the host's emails."""
    made = Double(tmp_path / "double")
    host.recipient = made
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("expires_in", "away"), [(3.0, 5.0), pytest.param(60.0, 90.0, marks=pytest.mark.slow)], ids=["3 s", "60 s"]
)
def test_a_code_that_expires_while_the_provider_is_away_is_cancelled_and_never_sent(
    host: Host, double: Double, expires_in: float, away: float
) -> None:
    with psycopg.connect(host.database_url) as connection:
        connection.execute("update outgoing_feed set is_on = true, wanted_at = now()")
    run = host.run(RETRY_BASE_SECONDS=1)
    host.await_finished(host.enqueue(emails(1, name="first")))
    double.kill()
    back_at = time.monotonic() + away

    expires_at = datetime.now(UTC) + timedelta(seconds=expires_in)
    (receipt,) = host.enqueue(emails(1))
    (code,) = host.enqueue([_code(expires_at)])
    eventually(lambda: host.rows()[code].status == "cancelled", "the expiry", seconds=expires_in + 15)
    eventually(lambda: time.monotonic() > back_at, "the end of the outage", seconds=away)
    double.start()

    eventually(lambda: host.rows()[receipt].status == "sent", "the other email", seconds=60)
    stop(run)
    assert host.rows()[code].error_type == "expired"
    assert double.delivered()[code] == 0
    assert not host.rabbit.read_all(host.topology.dlq)
    with psycopg.connect(host.database_url) as connection:
        events = connection.execute("select kind, reason from outgoing_event where email_id = %s", [code]).fetchall()
    assert events == [("cancelled", "expired")]


def _code(expires_at: datetime) -> Email:
    (plain,) = emails(1, name="code")
    return Email.from_json(plain.to_json() | {"expires_at": expires_at.isoformat()})
