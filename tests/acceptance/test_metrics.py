"""The metrics of a running host agree with the database and the provider, even if workers die often."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from uuid import UUID

import pytest

from dispatcher.telemetry.metric_files import PREFIXES
from tests.acceptance.harness import Host, emails, stop
from tests.acceptance.prometheus import Prometheus, promtool, scraping
from tests.supervisor.program import Program, eventually
from tests.telemetry.grafana import RULES, queries
from tests.telemetry.pictures import parsed
from tests.telemetry.test_deploy import named

SENT = 'dispatcher_emails_total{outcome="accepted",provider="capture"}'
LAST = "dispatcher_end_to_end_seconds_count"
"""The metric that a worker records last for each batch."""


def address_of(run: Program) -> str:
    listener: str = run.await_events("http.listening")["listener"]
    return listener


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sample(address: str, name: str) -> float | None:
    return parsed(get(address, "/metrics")[1]).get(name)


def enqueue_mixed(host: Host, name: str) -> set[UUID]:
    """Enqueue emails that the provider accepts, defers at first, or refuses."""
    kinds = ("customer", "greylisted", "refused")
    return host.enqueue(emails(90, name=name, to=lambda number: f"{kinds[number % 3]}-{name}-{number}@example.org"))


def firing_alerts(prometheus: Prometheus) -> set[str]:
    """Alerts whose condition is true, for however short a time."""
    return {rule["name"] for rule in prometheus.rules() if rule["state"] != "inactive"}


def await_count(address: str, count: int) -> None:
    eventually(lambda: sample(address, SENT) == sample(address, LAST) == count, f"the count of {count} emails")


def restarts(address: str) -> float:
    """The number of restarts of workers that died, including during boot."""
    samples = parsed(get(address, "/metrics")[1])
    reasons = ("crashed", "could_not_boot")
    return sum(samples[f'dispatcher_process_restarts_total{{reason="{each}",role="worker"}}'] for each in reasons)


def failing(address: str) -> list[str]:
    checks = json.loads(get(address, "/readyz")[1])["checks"]
    return [name for name, check in checks.items() if not check["ok"]]


def test_metrics_agree_with_the_books_while_workers_die(host: Host) -> None:
    run = host.run(METRICS_ADDRESS="127.0.0.1:0")
    address = address_of(run)
    ids: set[UUID] = set()
    for round_number in range(3):
        ids |= host.enqueue(emails(100, name=f"round-{round_number}"))
        host.await_finished(ids)
        await_count(address, len(ids))
        os.kill(run.pid_of("worker 0"), signal.SIGKILL)
        run.await_events("process.exited", round_number + 1, role="worker 0")

    host.books(ids).assert_balanced()
    assert restarts(address) == 3
    assert sample(address, LAST) == len(ids)
    eventually(lambda: failing(address) == [], "readiness")
    assert get(address, "/healthz")[0] == 200
    slots = 2 + 1 + 1 + 1  # workers, relay, monitor, parent
    assert len(list((host.run_dir / "metrics").glob("*.db"))) <= slots * len(PREFIXES)
    stop(run)


def test_a_host_without_a_metrics_folder_or_port_keeps_sending(host: Host) -> None:
    host.run_dir.mkdir(mode=0o700)
    (host.run_dir / "metrics").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = host.run(METRICS_ADDRESS=f"127.0.0.1:{taken.getsockname()[1]}")
        ids = host.enqueue(emails(20))

        host.await_finished(ids).assert_balanced()
        assert run.await_events("metrics.unwritable")
        assert run.await_events("http.bind_failed")
    stop(run)


@pytest.mark.slow
def test_prometheus_accepts_our_rules() -> None:
    checked = promtool("check", "rules", RULES)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_every_panel_and_rule_works_in_a_prometheus_that_scrapes_a_host(host: Host) -> None:
    host.sink()
    run = host.run(METRICS_ADDRESS="127.0.0.1:0")
    host.await_finished(enqueue_mixed(host, "before"))
    with scraping(address_of(run), host.folder / "prometheus") as prometheus:
        host.await_finished(enqueue_mixed(host, "scraped"))
        eventually(lambda: prometheus.query("sum(rate(dispatcher_emails_total[1m])) > 0"), "a rate")

        present = {found["metric"]["__name__"] for found in prometheus.query('{__name__=~"dispatcher_.+"}')}
        # An event that never happened, such as a throttle, has no series. The query for such an event must still be
        # valid.
        answers = {expression: prometheus.query(expression) for _, expression in queries()}
        silent = [each for each, found in answers.items() if not found and named(each) <= present]
        eventually(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "the rules")
        eventually(lambda: "EmailDeadLetters" in firing_alerts(prometheus), "the alert about dead letters")
        rules = {rule["name"]: rule for rule in prometheus.rules()}

    assert silent == []
    assert [name for name, rule in rules.items() if rule.get("lastError")] == []
    stop(run)
