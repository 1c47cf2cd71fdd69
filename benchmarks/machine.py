"""Describes the machine, the versions and the commit, without which no figure is complete."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

import psycopg

from dispatcher.dev.servers import Servers

WRITTEN: Final = ("benchmarks/results", "README.md", "docs/performance.md")
"""What the benchmarks write."""


@cache
def machine() -> dict[str, object]:
    """The machine, Python and the commit, with `+` after the commit if the working tree was modified. New results, and
    the pages that quote them, are no modification."""
    modified = _git("status", "--porcelain", "-uno", "--", ":/", *(f":(top,exclude){path}" for path in WRITTEN))
    return {
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if modified else ""),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions(servers: Servers) -> dict[str, object]:
    """The versions of PostgreSQL and RabbitMQ, and PostgreSQL's durability settings."""
    with psycopg.connect(servers.database_url) as connection:
        row = connection.execute(
            "select current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
        ).fetchone()
    assert row is not None
    return {
        "postgresql": row[0].split(" ")[0],
        "fsync": row[1],
        "synchronous_commit": row[2],
        "rabbitmq": _rabbitmq_version(servers.management_url),
    }


def described(facts: dict[str, object]) -> str:
    """One line for a table or a plot."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, PostgreSQL {facts.get('postgresql', '?')}, RabbitMQ {facts.get('rabbitmq', '?')}, "
        f"commit {facts['commit']}"
    )


def _rabbitmq_version(management_url: str) -> str:
    import base64
    import json
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(management_url)
    credentials = base64.b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode())
    port = f":{parts.port}" if parts.port else ""
    url = f"{parts.scheme}://{parts.hostname}{port}/api/overview"
    request = Request(url, headers={"Authorization": f"Basic {credentials.decode()}"})  # noqa: S310 - http by its URL
    try:
        with urlopen(request, timeout=5) as answer:  # noqa: S310
            return str(json.load(answer)["rabbitmq_version"])
    except (OSError, ValueError, LookupError):
        return "unknown"


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _git(*words: str) -> str:
    here = Path(__file__).resolve().parent
    answer = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=here)
    return answer.stdout.strip()
