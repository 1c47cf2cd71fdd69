"""Measures an API process under attack: its memory, its /healthz latency, and another tenant's throughput."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg

from dispatcher import Email, enqueue_many
from dispatcher.domain.api_key import Secret
from tests.abuse.case import Case
from tests.abuse.raw_connection import RawConnection, get, post
from tests.acceptance.harness import Host
from tests.api.running_api import EMAIL, make_key
from tests.supervisor.program import CHECKOUT, Program

CALM_SECONDS: Final = 2.0
AFTER_SECONDS: Final = 0.3
"""How long an attack may still have effects after its last response."""
HELD: Final = 500
SENDERS: Final = 32
PER_SECOND: Final = 200.0
HEALTH_EVERY_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How often the attackers got each result; the largest growth of the API's memory since it was last idle; the
    slowest response of /healthz, minus the time during which the API or the bystander waited for a CPU; the other
    tenant's emails per second, as a share of its rate without an attack; and the unexpected errors in the API's log."""

    case: Case
    got: Counter[str]
    memory_mb: float
    health_ms: float
    sends_share: float
    faults: list[str]


@dataclass(slots=True)
class AttackedApi:
    """A running API, and a bystander in this process that enqueues emails of another tenant and requests /healthz."""

    api: Program
    port: int
    keys: dict[str, str]
    calm_sends_per_second: float = 0.0
    _sends: int = 0
    _health_ms: list[float] = field(default_factory=list)
    _resident_bytes: list[int] = field(default_factory=list)
    _read_faults: int = 0

    async def measure(self, case: Case) -> CaseResult:
        at_rest, self._sends, self._health_ms, self._resident_bytes = self.resident_bytes(), 0, [], []
        began_at = time.monotonic()
        target = orjson.dumps({"port": self.port, "keys": self.keys, "seconds": case.seconds}).decode()
        command = [sys.executable, "-m", "tests.abuse.attack", case.id, target]
        attack = await asyncio.create_subprocess_exec(*command, cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE)
        got, _ = await attack.communicate()
        assert attack.returncode == 0
        await asyncio.sleep(AFTER_SECONDS)
        per_second = self._sends / (time.monotonic() - began_at)
        await self.check_health()  # answered after the slowest check began
        faults = [str(event) for event in self.api.events("error.unexpected")]
        new_faults, self._read_faults = faults[self._read_faults :], len(faults)
        if self.api.exit_code is not None:
            new_faults.append(f"the API exited: {self.api.words[-1000:]}")
        return CaseResult(
            case,
            Counter(orjson.loads(got)),
            (max([at_rest, *self._resident_bytes]) - at_rest) / 2**20,
            max(self._health_ms),
            per_second / self.calm_sends_per_second,
            new_faults,
        )

    async def rest(self) -> None:
        """Measures the throughput without an attack."""
        self._sends = 0
        await asyncio.sleep(CALM_SECONDS)
        self.calm_sends_per_second = self._sends / CALM_SECONDS

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.api.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def send(self, number: int) -> None:
        """Enqueues emails on one connection, at this connection's share of the rate, until cancelled."""
        every = SENDERS / PER_SECOND
        due_at = time.monotonic() + number * every / SENDERS
        sent = 0
        while True:
            with suppress(OSError):
                async with await RawConnection.open(self.port) as connection:
                    result = "202"
                    while result == "202":
                        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                        due_at = max(due_at + every, time.monotonic() - 1.0)  # at most a second behind schedule
                        sent += 1
                        named = (f"Authorization: Bearer {self.keys['bystander']}", f"Idempotency-Key: {number}-{sent}")
                        await connection.send(post("/v1/emails", orjson.dumps(EMAIL), *named))
                        result = await connection.answer()
                        self._sends += result == "202"

    async def check_health(self) -> None:
        began_at, waited, result = time.monotonic(), self._waited_seconds(), "reset"
        with suppress(OSError):
            async with await RawConnection.open(self.port) as connection:
                await connection.send(get("/healthz"))
                result = await connection.answer()
        seconds = time.monotonic() - began_at - (self._waited_seconds() - waited) if result == "200" else 60.0
        self._health_ms.append(1000 * seconds)
        self._resident_bytes.append(self.resident_bytes())

    async def check_health_steadily(self) -> None:
        """Requests /healthz at a steady rate, even if responses are slow, until cancelled."""
        async with asyncio.TaskGroup() as checks:
            while True:
                await asyncio.sleep(HEALTH_EVERY_SECONDS)
                checks.create_task(self.check_health())

    def _waited_seconds(self) -> float:
        """The seconds that the threads of the API and the bystander were runnable but did not run (sched-stats.rst)."""
        waited = 0
        for task in (task for pid in (self.api.pid, os.getpid()) for task in Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):  # the thread has ended
                waited += int((task / "schedstat").read_text().split()[1])
        return waited / 1e9


def start_api(host: Host) -> tuple[Program, int, dict[str, str]]:
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        keys = {
            "send": make_key(connection, tenant_id="attacker", scopes=["send"]),
            "read": make_key(connection, tenant_id="attacker", scopes=["read"]),
            "bystander": make_key(connection, tenant_id="bystander"),
            "unknown": Secret.new().text(),
        }
        known, unknown = (Secret.parse(keys[kind]) for kind in ("read", "unknown"))
        assert known is not None
        assert unknown is not None
        keys["wrong"] = keys["unknown"].replace(unknown.key_id, known.key_id)
        make_held(connection)
    api = host.command("api", API_ADDRESS="127.0.0.1:0", LOG_FORMAT="json", PROVIDERS="")
    return api, int(api.await_events("api.started")["listener"].rpartition(":")[2]), keys


@asynccontextmanager
async def attacked_api(host: Host) -> AsyncIterator[AttackedApi]:
    attacked = AttackedApi(*await asyncio.to_thread(start_api, host))
    async with asyncio.TaskGroup() as group:
        works = [group.create_task(attacked.send(number)) for number in range(SENDERS)]
        works.append(group.create_task(attacked.check_health_steadily()))
        yield attacked
        for work in works:
            work.cancel()


def make_held(connection: psycopg.Connection) -> list[str]:
    fields: Any = {"sender": EMAIL["from"], "to": EMAIL["to"], "subject": "Held", "text": "Held."}
    emails = [Email(message_key=f"held-{number}", tenant_id="attacker", **fields) for number in range(HELD)]
    ids = [str(answer.email_id) for answer in enqueue_many(connection, emails)]
    connection.execute(
        "update email_log set status = 'held', publish_due_at = null, error_type = 'outcome_unknown', attempt_count = 1"
    )
    return ids
