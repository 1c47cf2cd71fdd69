"""The comparison with other systems counts the right emails, starts the right programs, and sends each email once."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import pytest

from benchmarks.peers import environments, ours
from benchmarks.peers.case import measure
from benchmarks.peers.measuring import Load, Watched, result_of
from benchmarks.peers.ours import OURS, Ours
from benchmarks.peers.roster import PEERS, PROMISES, Peer
from dispatcher.dev.servers import Servers


@pytest.mark.parametrize(
    ("sent", "repeated", "held", "counts"),
    [(8, [3], [], (1, 1, 1, 0)), (10, [], [8, 9], (0, 0, 0, 2))],
    ids=["one missing, one duplicate, one unrecorded", "held emails are neither missing nor unrecorded"],
)
def test_missing_duplicate_unrecorded_and_held_emails_are_counted(
    sent: int, repeated: list[int], held: list[int], counts: tuple[int, ...]
) -> None:
    ids = [str(uuid4()) for _ in range(10)]
    acceptances = {email_id: [100.0 + number] for number, email_id in enumerate(ids[:9])}
    for number in repeated:
        acceptances[ids[number]].append(111.0)
    watched = Watched(sent=sent, last_at=110.0, cpu_seconds=0.02, servers_cpu_seconds=0.03, processes=3)
    kept = frozenset(ids[number] for number in held)

    measured = result_of("celery", {}, Load(10, 60.0), 500.0, watched, frozenset(ids), acceptances, kept)

    assert (measured.missing, measured.duplicates, measured.unrecorded, measured.held) == counts
    assert measured.emails_per_second == pytest.approx(sent / 10)
    assert (measured.cpu_microseconds, measured.servers_cpu_microseconds) == pytest.approx((2000, 3000))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_can_be_installed_started_and_swept(peer: Peer) -> None:
    requirements = (environments.HERE / peer.environment / "requirements.txt").read_text()
    module = Path(*peer.module.split(".")).with_suffix(".py")

    assert peer.environment in environments.ENVIRONMENTS
    assert {peer.name, peer.environment} & PROMISES.keys()
    assert (environments.HERE.parent.parent / module).is_file()
    assert all("==" in line for line in requirements.splitlines() if re.match(r"[a-z]", line))
    assert "--hash=sha256:" in requirements
    assert not any(
        "{" in word for knobs in (peer.knobs, *peer.sweep) for command in peer.commands(knobs) for word in command
    )
    assert all(knobs.keys() == peer.knobs.keys() for knobs in peer.sweep)


@pytest.mark.slow  # installs and runs other systems
@pytest.mark.parametrize(
    "name",
    [
        "celery-stock",
        "dramatiq-tuned",
        "procrastinate-tuned",
        "graphile_worker-tuned",
        "post_office-tuned",
        "post_office-leasing",
    ],
)
def test_a_peer_sends_every_email_once(servers: Servers, tmp_path: Path, name: str) -> None:
    peer = next(peer for peer in PEERS if peer.name == name)
    python = environments.interpreter(peer.environment, print)

    measured = measure(peer, python, servers, tmp_path / "case", Load(100, 60.0))

    assert (measured.missing, measured.duplicates, measured.unrecorded) == (0, 0, 0)
    assert measured.emails_per_second > 0


@pytest.mark.slow  # runs the comparison's cases of ours
@pytest.mark.parametrize("case", OURS, ids=lambda case: case.name)
def test_ours_sends_every_email_once(servers: Servers, tmp_path: Path, case: Ours) -> None:
    measured = ours.measure_ours(case, servers, tmp_path / "case", Load(300, 60.0))

    assert (measured.missing, measured.duplicates, measured.unrecorded, measured.held) == (0, 0, 0, 0)
    assert measured.emails_per_second > 0
    assert measured.knobs == {"workers": 2, "bundle_emails": 16, "prefetch": 256, **case.knobs}
