"""Every event reaches its webhook, signed and with one id, although the process that delivers is killed."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

from dispatcher.domain.webhook import new_secret
from tests.acceptance.harness import Host, emails, stop
from tests.monitor.receiver import Posted, Receiver, receiving, write_ca
from tests.supervisor.program import Program, eventually

EMAILS = 400
KILLS = 3


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running


def add_webhook(host: Host, url: str) -> str:
    """Adds a webhook for all tenants and kinds; returns its secret."""
    secret = new_secret()
    with psycopg.connect(host.database_url) as connection:
        connection.execute("update outgoing_feed set is_on = true")
        connection.execute(
            "insert into webhook (url, kinds, secret) values (%s, array['sent', 'failed', 'held'], %s)", [url, secret]
        )
    return secret


def kill_while_it_posts(run: Program, receiver: Receiver) -> None:
    """Kills the monitor with SIGKILL after some posts, and waits for the next monitor."""
    before, monitor = len(receiver.posted), run.pid_of("monitor")
    eventually(lambda: len(receiver.posted) > before + 20, "posts before a kill")
    os.kill(monitor, signal.SIGKILL)
    eventually(lambda: run.pid_of("monitor") != monitor, "a new monitor")


@pytest.mark.slow
def test_every_event_arrives_with_one_id_although_the_monitor_is_killed(
    host: Host, receiver: Receiver, ca: trustme.CA, tmp_path: Path
) -> None:
    def answer(_: Posted) -> int:
        time.sleep(0.05)  # a kill then meets posts that are in progress, and events that are not saved
        return 204

    receiver.status_of = answer
    secret = add_webhook(host, receiver.url)
    email_ids = host.enqueue(emails(EMAILS))
    run = host.run(WEBHOOKS_ALLOW_PRIVATE="on", CA_FILE=write_ca(ca, tmp_path))

    for _ in range(KILLS):
        kill_while_it_posts(run, receiver)

    def ids_by_email() -> dict[UUID, set[str]]:
        found: dict[UUID, set[str]] = defaultdict(set)
        for posted in list(receiver.posted):
            found[UUID(posted.data["email_id"])].add(posted.headers["webhook-id"])
        return found

    eventually(lambda: ids_by_email().keys() == email_ids, "an event for each email")
    assert {len(ids) for ids in ids_by_email().values()} == {1}
    assert len(receiver.posted) > EMAILS  # at least one kill met posts that were not saved
    for posted in receiver.posted:
        Verifier(secret).verify(posted.body.decode(), dict(posted.headers))
    stop(run)
