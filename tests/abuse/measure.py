"""Measures an API process under attack: its memory, its /healthz latency, and another tenant's throughput."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg

from dispatcher import Email, enqueue_many
from dispatcher.domain.api_key import Secret
from tests.abuse.case import Case
from tests.abuse.raw_connection import RESPONSE_SECONDS
from tests.acceptance.harness import Host
from tests.api.running_api import make_key
from tests.supervisor.program import CHECKOUT, Program
from tests.waiting import wait_until

CALM_SECONDS: Final = 2.0
AFTER_SECONDS: Final = 0.3
"""How long an attack may still have effects after its last response."""
HELD: Final = 500
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What was measured during one case.

    Attributes:
        got: How often the attackers got each result.
        memory_mb: The largest growth of the API process's memory since the process was last idle.
        health_ms: The slowest response of /healthz, minus the time during which the API or the bystander waited for a
            CPU.
        raw_health_ms: The slowest response of /healthz, including that time.
        sends_share: The emails per second that the other tenant enqueued, as a share of its rate without an attack.
        faults: Unexpected errors in the API's log.
    """

    case: Case
    got: Counter[str]
    memory_mb: float
    health_ms: float
    raw_health_ms: float
    sends_share: float
    faults: list[str]

    @property
    def surprises(self) -> list[str]:
        """The attackers' results that the case does not allow."""
        return sorted(self.got.keys() - self.case.allowed)


@dataclass(frozen=True, slots=True)
class _Note:
    at: float
    what: str
    seconds: float
    result: str


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    resident_bytes: int
    waited_seconds: float


@dataclass(slots=True)
class AttackedApi:
    """A running API, and a bystander that enqueues emails of another tenant and requests /healthz."""

    api: Program
    bystander: int
    target: dict[str, Any]
    notes: Path
    calm_sends_per_second: float = 0.0
    calm_health_ms: float = 0.0
    _samples: list[_Sample] = field(default_factory=list)
    _notes: list[_Note] = field(default_factory=list)
    _read_to: int = 0
    _read_faults: int = 0

    def measure(self, case: Case) -> CaseResult:
        """Runs a case's attack, and returns the measurements."""
        at_rest = self.resident_bytes()
        result = attack(case, self.target | {"seconds": case.seconds})
        until = result["ended_at"] + AFTER_SECONDS
        wait_until(lambda: time.monotonic() > until)
        # Once this result is written, all earlier results are written, too.
        wait_until(lambda: self._has_result_since(until), 2 * RESPONSE_SECONDS)
        sends, health, raw = self._watched(result["began_at"], until)
        samples = [sample.resident_bytes for sample in self._samples if result["began_at"] <= sample.at <= until]
        faults = [str(event) for event in self.api.events("error.unexpected")]
        new_faults, self._read_faults = faults[self._read_faults :], len(faults)
        return CaseResult(
            case,
            Counter(result["got"]),
            (max([at_rest, *samples]) - at_rest) / 2**20,
            health,
            raw,
            sends / self.calm_sends_per_second,
            new_faults if self.api.exit_code is None else [*new_faults, f"the API exited: {self.api.words[-1000:]}"],
        )

    def rest(self) -> None:
        """Measures throughput and latency without an attack."""
        began_at = time.monotonic()
        wait_until(lambda: time.monotonic() > began_at + CALM_SECONDS)
        wait_until(lambda: self._has_result_since(began_at), 2 * RESPONSE_SECONDS)
        self.calm_sends_per_second, self.calm_health_ms, _ = self._watched(began_at, time.monotonic())

    def resident_bytes(self) -> int:
        """The API process's resident memory."""
        return int(Path(f"/proc/{self.api.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def _watched(self, began_at: float, ended_at: float) -> tuple[float, float, float]:
        """Accepted emails per second, and the slowest /healthz response in ms: first without, then with the time
        waiting for a CPU."""
        notes = [note for note in self.read_notes() if began_at <= note.at <= ended_at]
        sends = sum(note.what == "send" and note.result == "202" for note in notes)
        health = [note for note in notes if note.what == "health"]
        assert health, "no health check ran"
        seconds = [note.seconds if note.result == "200" else 60.0 for note in health]
        net = [each - self._waited(note.at, note.at + note.seconds) for each, note in zip(seconds, health, strict=True)]
        return sends / (ended_at - began_at), 1000 * max(net), 1000 * max(seconds)

    def _waited(self, began_at: float, ended_at: float) -> float:
        """The seconds that the API and the bystander waited for a CPU."""
        first = bisect(self._samples, began_at, key=lambda sample: sample.at) - 1
        last = bisect(self._samples, ended_at, key=lambda sample: sample.at)
        samples = self._samples[max(0, first) : last + 1]
        return samples[-1].waited_seconds - samples[0].waited_seconds

    def read_notes(self) -> list[_Note]:
        """All results that the bystander has written so far."""
        with self.notes.open() as notes:
            notes.seek(self._read_to)
            whole, found, _ = notes.read().rpartition("\n")
        self._read_to += len(whole) + len(found)
        for line in whole.splitlines():
            at, what, took, result = line.split(" ", 3)
            self._notes.append(_Note(float(at), what, float(took), result))
        return self._notes

    def _has_result_since(self, instant: float) -> bool:
        return any(note.what == "health" and note.at > instant for note in reversed(self.read_notes()))

    def sample(self, stop: threading.Event) -> None:
        """Samples memory and CPU waits until stopped."""
        while not stop.wait(_SAMPLE_SECONDS):
            with suppress(OSError, ValueError, IndexError):
                waited = _waited_seconds(self.api.pid) + _waited_seconds(self.bystander)
                self._samples.append(_Sample(time.monotonic(), self.resident_bytes(), waited))


def _waited_seconds(pid: int) -> float:
    """The seconds that a process's threads were runnable but did not run (see the kernel's sched-stats.rst)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9


def attack(case: Case, target: dict[str, Any]) -> dict[str, Any]:
    """Runs a case's attackers in a separate process; returns their results."""
    command = [sys.executable, "-m", "tests.abuse.attack", case.id, orjson.dumps(target).decode()]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = orjson.loads(done.stdout)
    return result


def start_api(host: Host) -> tuple[Program, dict[str, Any]]:
    """Starts an API process with API keys and held emails. Returns the process, and the target for attackers."""
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        keys = _make_keys(connection)
        held, foreign = make_held(connection)
        api = host.command("api", API_ADDRESS="127.0.0.1:0", LOG_FORMAT="json", PROVIDERS="")
        port = int(api.await_events("api.started")["listener"].rpartition(":")[2])
        target = {"port": port, "keys": keys, "held": held, "foreign": foreign}
        return api, target | {"foreign_replay": _make_replay(connection), "seconds": 0.0}


@contextmanager
def attacked_api(host: Host) -> Iterator[AttackedApi]:
    """Runs an API process and the bystander during the block."""
    api, target = start_api(host)
    notes = host.folder / "notes"
    words = [str(target["port"]), target["keys"].pop("bystander"), str(notes)]
    command = [sys.executable, "-m", "tests.abuse.bystander", *words]
    stop = threading.Event()
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE) as bystander:
        attacked = AttackedApi(api, bystander.pid, target, notes)
        sampling = threading.Thread(target=attacked.sample, args=[stop])
        sampling.start()
        try:
            wait_until(lambda: notes.exists() and any(note.what == "send" for note in attacked.read_notes()))
            yield attacked
        finally:
            stop.set()
            sampling.join()
            assert bystander.stdin is not None
            bystander.stdin.close()


def _make_keys(connection: psycopg.Connection) -> dict[str, str]:
    attacker = {"tenant_id": "attacker"}
    keys = {
        "send": make_key(connection, **attacker, scopes=["send"]),
        "read": make_key(connection, **attacker, scopes=["read"]),
        "operate": make_key(connection, **attacker, scopes=["operate"]),
        "bound": make_key(connection, **attacker, sender_domains=["example.net"]),
        "slow": make_key(connection, **attacker, requests_per_second=1),
        "poor": make_key(connection, **attacker, recipients_per_day=50),
        "revoked": make_key(connection, **attacker),
        "bystander": make_key(connection, tenant_id="bystander"),
        "unknown": Secret.new().text(),
    }
    connection.execute("update api_key set revoked_at = now() where key_id = %s", [_id(keys["revoked"])])
    keys["wrong"] = keys["unknown"].replace(_id(keys["unknown"]), _id(keys["read"]))
    return keys


def _id(key: str) -> str:
    secret = Secret.parse(key)
    assert secret is not None
    return secret.key_id


def make_held(connection: psycopg.Connection) -> tuple[list[str], str]:
    """Inserts held emails of the attacker's tenant, and one held email of another tenant. Returns their ids."""
    emails = [_email("attacker", number) for number in range(HELD)] + [_email("bystander", HELD)]
    ids = [str(answer.email_id) for answer in enqueue_many(connection, emails)]
    connection.execute(
        "update email_log set status = 'held', publish_due_at = null, error_type = 'outcome_unknown', attempt_count = 1"
    )
    return ids[:HELD], ids[HELD]


def _email(tenant_id: str, number: int) -> Email:
    sender, to = "shop@example.com", "ann@example.org"
    key = f"held-{number}"
    return Email(message_key=key, tenant_id=tenant_id, sender=sender, to=to, subject="Held", text="Held.")


def _make_replay(connection: psycopg.Connection) -> int:
    row = connection.execute(
        "insert into email_replay (source, selection, include_held, actor, reason)"
        """ values ('filter', '{"tenant_id": "bystander"}', false, 'test', 'test') returning replay_id"""
    ).fetchone()
    assert row is not None
    return int(row[0])
