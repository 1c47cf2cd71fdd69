"""Attacks a real API process, with real PostgreSQL and RabbitMQ, by hostile clients: `./run test -m abuse -s`.

Every case must be refused or harmless. During each case, the test measures the API process's memory, its /healthz
latency, and another tenant's throughput. A busy machine is slow even without an attack. So a case fails only after
three failed tries, each compared with a new measurement without an attack.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import orjson
import pytest

from tests.abuse import framings
from tests.abuse.attack import parse_target
from tests.abuse.corpus import CORPUS
from tests.abuse.measure import AttackedApi, CaseResult, attacked_api, start_api
from tests.acceptance.harness import Host

MAX_REMAINING_MB: Final = 64.0
MAX_MEMORY_MB: Final = 192.0
"""The default of DISPATCHER_API_MEMORY_BYTES, plus the objects of one body during its parsing."""
MAX_HEALTH_MS: Final = 100.0
MIN_SENDS_SHARE: Final = 0.9
ATTEMPTS: Final = 3


async def test_odd_framings_are_refused_or_harmless(host: Host) -> None:
    _, known = await asyncio.to_thread(start_api, host)
    target = parse_target(known)

    for case in framings.CASES:
        assert set(await case.attack(target)) <= case.allowed, case.id


@pytest.mark.abuse
def test_all_attacks_are_refused_or_harmless_and_do_not_disturb_other_clients(host: Host) -> None:
    """ABUSE_CASES is a regular expression that selects cases; ABUSE_JSON is the path of a file for the results."""
    chosen = re.compile(os.environ.get("ABUSE_CASES", ""))
    with attacked_api(host) as attacked:
        attacked.rest()
        titles = ("MB", "health ms", "raw ms", "sends %")
        sys.stdout.write(f"\n{'case':52}" + "".join(f"{title:>10}" for title in titles) + "  got\n")
        before = attacked.resident_bytes()
        results = [_measure(attacked, name) for name in CORPUS if chosen.search(name)]
        attacked.rest()
        remaining_mb = (attacked.resident_bytes() - before) / 2**20

    sys.stdout.write(f"{len(results)} cases; {remaining_mb:.0f} MB of memory remain\n")
    if path := os.environ.get("ABUSE_JSON"):
        _write(Path(path), results, remaining_mb)
    assert not [result.case.id for result in results if _faults(result)]
    assert remaining_mb < MAX_REMAINING_MB


def _measure(attacked: AttackedApi, name: str) -> CaseResult:
    result = attacked.measure(CORPUS[name])
    for _ in range(ATTEMPTS - 1):
        if not _faults(result):
            break
        attacked.rest()
        result = attacked.measure(CORPUS[name])
    _print(result)
    return result


def _faults(result: CaseResult) -> list[str]:
    faults = [*result.faults, *result.surprises]
    if result.memory_mb > MAX_MEMORY_MB:
        faults.append("memory")
    if result.health_ms > MAX_HEALTH_MS:
        faults.append("health")
    if result.sends_share < MIN_SENDS_SHARE:
        faults.append("sends")
    return faults


def _print(result: CaseResult) -> None:
    got = ", ".join(f"{times} {what}" for what, times in result.got.most_common(3))
    figures = (result.memory_mb, result.health_ms, result.raw_health_ms, 100 * result.sends_share)
    faults = f"  FAULTS: {', '.join(_faults(result))}" if _faults(result) else ""
    sys.stdout.write(f"{result.case.id:52}" + "".join(f"{figure:10.0f}" for figure in figures) + f"  {got}{faults}\n")
    sys.stdout.flush()


def _write(path: Path, results: Iterable[CaseResult], remaining_mb: float) -> None:
    rows = [
        {
            "case": each.case.id,
            "got": each.got,
            "memory_mb": each.memory_mb,
            "health_ms": each.health_ms,
            "raw_health_ms": each.raw_health_ms,
            "sends_share": each.sends_share,
            "faults": _faults(each),
        }
        for each in results
    ]
    path.write_bytes(orjson.dumps({"remaining_mb": remaining_mb, "cases": rows}, option=orjson.OPT_INDENT_2))
