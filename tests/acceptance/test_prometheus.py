"""A real Prometheus scrapes a host, and accepts every rule and every query of the dashboard."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from dispatcher.dev import cache, debian, ports
from tests.acceptance.harness import Host, address_of, emails, stop
from tests.supervisor.program import eventually
from tests.telemetry.test_deploy import RULES, named, queries

REMEDY: Final = "Check the network, or install Prometheus (apt-get install prometheus)."
_CONFIGURATION: Final = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: email-dispatcher
    static_configs: [{{targets: ['{target}']}}]
"""


def program() -> str | Path:
    def build(folder: Path) -> None:
        fetched = folder / "all"
        fetched.mkdir()
        debian.fetch("prometheus", fetched, even_if_installed="prometheus", remedy=REMEDY, progress=print)
        shutil.move(fetched / "usr/bin/prometheus", folder / "prometheus")
        # Delete the rest of the package. Three quarters of it are the scripts of the web pages.
        shutil.rmtree(fetched)

    return shutil.which("prometheus") or cache.obtain("prometheus-debian", build) / "prometheus"


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Runs a Prometheus with our rules during the block, which begins after the first scrape of the target. Yields a
    function that returns what a path of the HTTP API answers; it raises HTTPError if a query is invalid."""
    folder.mkdir()
    configuration = folder / "prometheus.yml"
    configuration.write_text(_CONFIGURATION.format(rules=RULES, target=target))
    (port,) = ports.choose(1)
    words = (f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}")
    command = [program(), f"--config.file={configuration}", *words]

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as reply:
            return json.load(reply)["data"]

    def has_scraped() -> bool:
        with suppress(OSError):
            return [each["value"][1] for each in ask("query?query=min(up)")["result"]] == ["1"]
        return False

    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            eventually(has_scraped, "a scrape")
            yield ask
        finally:
            process.terminate()


def result(ask: Callable[[str], Any], expression: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
    return found


def rules(ask: Callable[[str], Any]) -> list[dict[str, Any]]:
    return [rule for group in ask("rules")["groups"] for rule in group["rules"]]


def enqueue_mixed(host: Host, name: str) -> set[UUID]:
    kinds = ("customer", "greylisted", "refused")
    return host.enqueue(emails(90, name=name, to=lambda number: f"{kinds[number % 3]}-{name}-{number}@example.org"))


def firing_alerts(ask: Callable[[str], Any]) -> set[str]:
    """Alerts whose condition is true, for however short a time."""
    return {rule["name"] for rule in rules(ask) if rule["state"] != "inactive"}


@pytest.mark.slow  # downloads Prometheus, and scrapes for a minute
def test_every_panel_and_rule_works_in_a_prometheus_that_scrapes_a_host(host: Host) -> None:
    host.sink()
    run = host.run(METRICS_ADDRESS="127.0.0.1:0")
    host.await_finished(enqueue_mixed(host, "before"))
    with scraping(address_of(run), host.folder / "prometheus") as ask:
        host.await_finished(enqueue_mixed(host, "scraped"))
        eventually(lambda: result(ask, "sum(rate(dispatcher_emails_total[1m])) > 0"), "a rate")

        present = {found["metric"]["__name__"] for found in result(ask, '{__name__=~"dispatcher_.+"}')}
        # An event that never happened, such as a throttle, has no series. The query for such an event must still be
        # valid.
        answers = {expression: result(ask, expression) for expression in queries()}
        silent = [each for each, found in answers.items() if not found and named(each) <= present]
        eventually(lambda: all(rule["health"] == "ok" for rule in rules(ask)), "the rules")
        eventually(lambda: "EmailDeadLetters" in firing_alerts(ask), "the alert about dead letters")
        faults = [rule["name"] for rule in rules(ask) if rule.get("lastError")]

    assert (silent, faults) == ([], [])
    stop(run)
