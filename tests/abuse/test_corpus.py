"""Attacks a real API process, with real PostgreSQL and RabbitMQ, by hostile clients: `./run test -m abuse -s`.

Every case must be refused or harmless, although no proxy is in front. During each case, the test measures the API
process's memory, its /healthz latency, and another tenant's throughput. A busy machine is slow even without an attack.
So a case fails only after three failed tries, each compared with a new measurement without an attack.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest

from tests.abuse.attack import CORPUS
from tests.abuse.measure import AttackedApi, CaseResult, attacked_api, make_held
from tests.acceptance.harness import Host
from tests.api.running_api import make_key

MAX_REMAINING_MB: Final = 64.0
HEAVY_USE: Final = "heavy use: batches of 1,000"
MAX_MEMORY_MB: Final = 320.0
"""The default of DISPATCHER_API_MEMORY_BYTES, plus a text of 39 MB with a character of four bytes."""
MIN_SENDS_SHARE: Final = 0.9
ATTEMPTS: Final = 3
SECONDS: Final = 180
HERE: Final = Path(__file__).parent
pytestmark = pytest.mark.abuse


async def test_all_attacks_are_refused_or_harmless_and_do_not_disturb_other_clients(host: Host) -> None:
    """ABUSE_CASES is a regular expression that selects cases."""
    chosen = re.compile(os.environ.get("ABUSE_CASES", ""))
    async with attacked_api(host) as attacked:
        await attacked.rest()
        await attacked.measure(CORPUS[HEAVY_USE])  # the allocator keeps what the largest permitted requests need
        await attacked.rest()
        sys.stdout.write(f"\n{'case':52}        MB health ms   sends %  got\n")
        before = attacked.resident_bytes()
        faulty = [name for name in CORPUS if chosen.search(name) and not await _passes(attacked, name)]
        await attacked.rest()
        remaining_mb = (attacked.resident_bytes() - before) / 2**20

    sys.stdout.write(f"{remaining_mb:.0f} MB of memory remain\n")
    assert not faulty
    assert remaining_mb < MAX_REMAINING_MB


async def _passes(attacked: AttackedApi, name: str) -> bool:
    for _ in range(ATTEMPTS):
        result = await attacked.measure(CORPUS[name])
        faults = _faults(result)
        got = ", ".join(f"{times} {what}" for what, times in result.got.most_common(3))
        figures = f"{result.memory_mb:10.0f}{result.health_ms:10.0f}{100 * result.sends_share:10.0f}"
        sys.stdout.write(f"{name:52}{figures}  {got}{'  FAULTS: ' if faults else ''}{', '.join(faults)}\n")
        sys.stdout.flush()
        if not faults:
            return True
        await attacked.rest()
    return False


def _faults(result: CaseResult) -> list[str]:
    faults = [*result.faults, *sorted(result.got.keys() - result.case.allowed)]
    if result.memory_mb > MAX_MEMORY_MB:
        faults.append("memory")
    if result.health_ms > result.case.max_health_ms:
        faults.append("health")
    if result.sends_share < MIN_SENDS_SHARE:
        faults.append("sends")
    return faults


def test_schemathesis_finds_nothing_with_keys_and_held_emails(host: Host, connection: psycopg.Connection) -> None:
    key = make_key(connection, tenant_id="attacker", scopes=["send", "read", "operate"])
    held = make_held(connection)
    api = host.command("api", API_ADDRESS="127.0.0.1:0", LOG_FORMAT="json", PROVIDERS="")
    port = int(api.await_events("api.started")["listener"].rpartition(":")[2])

    words = ["--config-file", str(HERE / "schemathesis.toml"), "run", f"http://127.0.0.1:{port}/openapi.json"]
    options = [f"--header=Authorization: Bearer {key}", "--continue-on-failure", f"--max-time={SECONDS}"]
    environment = {**os.environ, "HELD": ",".join(held), "SCHEMATHESIS_HOOKS": "tests.abuse.schemathesis_hooks"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "schemathesis"), *words, *options],
        cwd=host.folder,
        env=environment | {"PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    actions = connection.execute("select distinct action from operator_audit").fetchall()
    assert {("confirm",), ("release",), ("replay",)} <= set(actions)
    assert not api.events("error.unexpected")
