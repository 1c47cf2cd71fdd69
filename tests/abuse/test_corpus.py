"""The corpus of abuse against a real API process with real PostgreSQL and RabbitMQ: `./run test -m abuse -s`.

Each case is refused or harmless, while the memory of the process, its health, and another tenant's sends are measured.
A busy machine is as slow as one under attack: a case counts as failed if it fails three times, each time beside what
was usual just before.
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
from tests.abuse.attack import prey_of
from tests.abuse.corpus import CORPUS
from tests.abuse.siege import Siege, Verdict, besieged, start_api
from tests.acceptance.harness import Host

MOST_LASTING_MB: Final = 64.0
MOST_MEMORY_MB: Final = 192.0
"""The default of DISPATCHER_API_MEMORY_BYTES, and what the one body is becoming that is being parsed."""
MOST_HEALTH_MS: Final = 100.0
LEAST_SENDS_SHARE: Final = 0.9
TRIES: Final = 3


async def test_odd_framings_are_refused_or_harmless(host: Host) -> None:
    _, known = await asyncio.to_thread(start_api, host)
    prey = prey_of(known)

    for case in framings.CASES:
        assert set(await case.attack(prey)) <= case.allowed, case.id


@pytest.mark.abuse
def test_all_abuse_is_refused_or_harmless_and_does_not_disturb_other_clients(host: Host) -> None:
    """ABUSE_CASES names cases by a regular expression, ABUSE_JSON a file for the figures."""
    chosen = re.compile(os.environ.get("ABUSE_CASES", ""))
    with besieged(host) as siege:
        siege.rest()
        titles = ("MB", "health ms", "and waits", "sends %")
        sys.stdout.write(f"\n{'case':52}" + "".join(f"{title:>10}" for title in titles) + "  got\n")
        before = siege.resident_bytes()
        verdicts = [_judged(siege, name) for name in CORPUS if chosen.search(name)]
        siege.rest()
        lasting_mb = (siege.resident_bytes() - before) / 2**20

    sys.stdout.write(f"{len(verdicts)} cases; {lasting_mb:.0f} MB stayed\n")
    if path := os.environ.get("ABUSE_JSON"):
        _write(Path(path), verdicts, lasting_mb)
    assert not [verdict.case.id for verdict in verdicts if _faults(verdict)]
    assert lasting_mb < MOST_LASTING_MB


def _judged(siege: Siege, name: str) -> Verdict:
    verdict = siege.measure(CORPUS[name])
    for _ in range(TRIES - 1):
        if not _faults(verdict):
            break
        siege.rest()
        verdict = siege.measure(CORPUS[name])
    _tell(verdict)
    return verdict


def _faults(verdict: Verdict) -> list[str]:
    faults = [*verdict.faults, *verdict.surprises]
    if verdict.memory_mb > MOST_MEMORY_MB:
        faults.append("memory")
    if verdict.health_ms > MOST_HEALTH_MS:
        faults.append("health")
    if verdict.sends_share < LEAST_SENDS_SHARE:
        faults.append("sends")
    return faults


def _tell(verdict: Verdict) -> None:
    got = ", ".join(f"{times} {what}" for what, times in verdict.got.most_common(3))
    figures = (verdict.memory_mb, verdict.health_ms, verdict.raw_health_ms, 100 * verdict.sends_share)
    faults = f"  FAULTS: {', '.join(_faults(verdict))}" if _faults(verdict) else ""
    sys.stdout.write(f"{verdict.case.id:52}" + "".join(f"{figure:10.0f}" for figure in figures) + f"  {got}{faults}\n")
    sys.stdout.flush()


def _write(path: Path, verdicts: Iterable[Verdict], lasting_mb: float) -> None:
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
        for each in verdicts
    ]
    path.write_bytes(orjson.dumps({"lasting_mb": lasting_mb, "cases": rows}, option=orjson.OPT_INDENT_2))
