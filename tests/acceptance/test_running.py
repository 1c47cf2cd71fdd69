"""What one running host does with emails, webhooks and metrics.

The tests share the host. Each leaves it as it found it: all emails are finished, and the provider behaves normally.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.domain.webhook import new_secret
from dispatcher.telemetry.metric_files import PREFIXES
from tests.acceptance.harness import Host, Sink, address_of, emails, failing, get, new_host, sample, stop
from tests.broker.declarer import Declarer
from tests.cli.commandline import CommandLine
from tests.monitor.receiver import Receiver, write_ca
from tests.supervisor.program import Program, eventually

SENT = 'dispatcher_emails_total{outcome="accepted",provider="smtp"}'
LAST = "dispatcher_end_to_end_seconds_count"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Running:
    def __init__(self, host: Host, sink: Sink, run: Program) -> None:
        self.host, self.sink, self.run = host, sink, run
        self.ids: set[UUID] = set()

    def enqueue(self, emails: Iterable[Email]) -> set[UUID]:
        ids = self.host.enqueue(emails)
        self.ids |= ids
        return ids

    def statuses(self, ids: Iterable[UUID]) -> Counter[str]:
        rows = self.host.rows()
        return Counter(rows[email_id].status for email_id in ids)

    def await_outcome(self, ids: Iterable[UUID]) -> Counter[str]:
        self.host.await_finished(self.ids).assert_balanced()
        return self.statuses(ids)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, servers: Servers, declarer: Declarer, receiver: Receiver, ca: trustme.CA
) -> Iterator[Running]:
    folder, name = tmp_path_factory.mktemp("host"), f"test.{secrets.token_hex(6)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    with new_host(folder, servers, topology) as host:
        sink = host.sink()
        run = host.run(
            DLQ_PROBE_SECONDS=1,
            METRICS_ADDRESS="127.0.0.1:0",
            WEBHOOKS_ALLOW_PRIVATE="on",
            CA_FILE=write_ca(ca, folder),
        )
        host.await_consumers()
        run.await_events("relay.leading")
        yield Running(host, sink, run)
        stop(run)
    declarer.delete(topology)


@pytest.fixture
def connection(place: Running) -> Iterator[psycopg.Connection]:
    with psycopg.connect(place.host.database_url, autocommit=True) as opened:
        yield opened


def test_an_attempt_is_one_log_line_with_all_of_its_ids(place: Running, connection: psycopg.Connection) -> None:
    (email,) = emails(1, name="logged")
    email_id = enqueue(connection, email, traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01").email_id
    place.ids.add(email_id)

    assert place.await_outcome({email_id}) == {"sent": 1}
    event = place.run.await_events("email.attempted", email_id=str(email_id))
    assert (event["trace_id"], event["correlation_id"]) == (TRACE_ID, "order-0")
    assert {"attempt", "provider", "outcome", "status", "error_type", "duration_ms", "worker"} <= event.keys()


def test_replayed_emails_are_sent_once_and_their_dead_letters_leave_the_dlq(place: Running) -> None:
    dlq = place.host.topology.dlq
    others = place.host.rabbit.waiting(dlq)
    place.sink.behave(script={"rcpt": "550 5.1.1 User unknown"})
    ids = place.enqueue(emails(3, name="replayed"))
    assert place.await_outcome(ids) == {"failed": 3}
    place.sink.behave()
    command = CommandLine(place.host.folder, place.host.environment(), needs_process=False)

    assert command("dlq", "replay", *map(str, ids), "--reason", "mended", "--yes").code == 0

    eventually(lambda: place.statuses(ids) == {"sent": 3}, "the delivery")
    # Counts only: while a test reads the messages, the sweep cannot see them.
    eventually(lambda: place.host.rabbit.waiting(dlq) == others, "the sweep of the DLQ")
    assert place.await_outcome(ids) == {"sent": 3}


def test_emails_of_a_paused_tenant_wait_until_its_end_or_expire_and_the_feed_and_webhook_say_so(
    place: Running, connection: psycopg.Connection, receiver: Receiver
) -> None:
    secret = new_secret()
    connection.execute("update outgoing_feed set is_on = true, wanted_at = now()")
    connection.execute(
        "insert into webhook (url, kinds, secret) values (%s, array['sent', 'cancelled'], %s)", [receiver.url, secret]
    )
    assert place.host.command("pause", "tenant", "acme", "--reason", "complaints").await_exit() == 0
    in_force = "select now() - max(began_at) > interval '2 seconds' from pause"
    eventually(
        lambda: connection.execute(in_force.encode()).fetchone() == (True,), "the time until a pause is in force"
    )
    of_acme = [replace(each, tenant_id="acme") for each in emails(20, name="acme")]
    expires_at = datetime.now(UTC) + timedelta(seconds=3)
    code = Email.from_json(of_acme.pop().to_json() | {"expires_at": expires_at.isoformat()})

    paused, others = place.enqueue([*of_acme, code]), place.enqueue(emails(20, name="other"))

    eventually(lambda: place.statuses(others) == {"sent": 20}, "the emails of others")
    eventually(lambda: place.statuses(paused) == {"pending": 19, "cancelled": 1}, "the expiry", seconds=20)
    assert not place.sink.delivered().keys() & paused
    assert place.host.command("resume", "tenant", "acme").await_exit() == 0
    assert place.await_outcome(paused) == {"sent": 19, "cancelled": 1}

    def posted() -> Counter[str]:  # a post that is repeated has the same id
        kinds = {one.headers["webhook-id"]: one.json["type"].rpartition(".")[2] for one in receiver.posted}
        return Counter(kinds.values())

    eventually(lambda: posted() == {"sent": 39, "cancelled": 1}, lambda: f"the webhooks, not {posted()}")
    for one in receiver.posted:
        Verifier(secret).verify(one.body.decode(), dict(one.headers))
    connection.execute("delete from webhook")


def test_metrics_agree_with_the_books_while_workers_die(place: Running) -> None:
    address = address_of(place.run)

    def await_count() -> None:
        sent = sum(place.sink.delivered().values())
        eventually(lambda: sample(address, SENT) == sample(address, LAST) == sent, f"the count of {sent} emails")

    await_count()
    for number in range(3):
        place.await_outcome(place.enqueue(emails(50, name=f"round-{number}")))
        await_count()
        os.kill(place.run.pid_of("worker 0"), signal.SIGKILL)
        place.run.await_events("process.exited", number + 1, role="worker 0")

    reasons = ("crashed", "could_not_boot")
    names = [f'dispatcher_process_restarts_total{{reason="{each}",role="worker"}}' for each in reasons]
    assert sum(sample(address, name) or 0 for name in names) == 3
    await_count()
    eventually(lambda: failing(address) == [], "readiness")
    assert get(address, "/healthz")[0] == 200
    slots = 2 + 1 + 1 + 1  # workers, relay, monitor, parent
    assert len(list((place.host.run_dir / "metrics").glob("*.db"))) <= slots * len(PREFIXES)
