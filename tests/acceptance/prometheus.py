"""Runs a real Prometheus that scrapes one address on loopback. Debian's package is downloaded into the cache without
root."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dispatcher.dev import cache, debian, ports
from tests.supervisor.program import eventually
from tests.telemetry.grafana import RULES

REMEDY: Final = "Check the network, or install Prometheus (apt-get install prometheus)."
_CONFIGURATION: Final = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: email-dispatcher
    static_configs: [{{targets: ['{target}']}}]
"""


def programs() -> Path:
    """The folder of `prometheus` and `promtool`."""
    if installed := shutil.which("promtool"):
        return Path(installed).parent

    def build(folder: Path) -> None:
        fetched = folder / "all"
        fetched.mkdir()
        debian.fetch("prometheus", fetched, even_if_installed="prometheus", remedy=REMEDY, progress=print)
        for name in ("prometheus", "promtool"):
            shutil.move(fetched / "usr/bin" / name, folder / name)
        # Delete the rest of the package. Three quarters of it are the scripts of the web pages.
        shutil.rmtree(fetched)

    return cache.obtain("prometheus-debian", build)


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; return its result."""
    return subprocess.run([programs() / "promtool", *words], capture_output=True, text=True, check=False)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus server."""

    url: str

    @property
    def is_ready(self) -> bool:
        """Whether the server answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression returns now; raises HTTPError if the expression is invalid."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """All alert rules with health and state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **words: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=10) as reply:
            data: dict[str, Any] = json.load(reply)["data"]
        return data


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Runs a Prometheus with our rules during the block, which begins after the first scrape of the target."""
    folder.mkdir()
    configuration = folder / "prometheus.yml"
    configuration.write_text(_CONFIGURATION.format(rules=RULES, target=target))
    (port,) = ports.choose(1)
    command: list[str | Path] = [
        programs() / "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            eventually(lambda: server.is_ready, "Prometheus")
            eventually(lambda: _value(server.query("min(up)")) == 1, "a scrape")
            yield server
        finally:
            process.terminate()


def _value(found: list[dict[str, Any]]) -> float | None:
    return float(found[0]["value"][1]) if found else None
