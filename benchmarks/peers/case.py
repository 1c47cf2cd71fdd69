"""Runs one measured case of a peer, with its own database and queue, environment and commands."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from benchmarks.double import read_acceptances
from benchmarks.doubles import Double, running_double
from benchmarks.peers.measuring import Load, Measured, counted, ledger_of, result_of, server_pids, watch
from benchmarks.peers.processes import running
from benchmarks.peers.roster import Knobs, Peer
from dispatcher.dev.servers import Servers

ROOT: Final = Path(__file__).resolve().parent.parent.parent
LEASE_SECONDS: Final = 60
LEASE_SECONDS_UNDER_KILLS: Final = 5
CALL_SECONDS: Final = 300.0


def measure(
    peer: Peer, python: Path, servers: Servers, folder: Path, load: Load, knobs: Knobs | None = None
) -> Measured:
    """Run one case of a peer.

    Args:
        knobs: Overrides the peer's best settings.

    Raises:
        RuntimeError: The peer did not start, or did not finish in time; the text ends with the peer's log.
    """
    knobs = peer.knobs if knobs is None else knobs
    folder.mkdir(parents=True)
    log = folder / "programs.log"
    with (
        _database(servers) as database_url,
        running_double("sendgrid", folder) as double,
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        environment = _environment(servers, database_url, folder, double, knobs, load)
        enqueue_seconds = _prepare(peer, python, connection, load, environment)
        ids = connection.execute("select email_id from email_idempotency").fetchall()
        commands = [[str(python), *command] for command in peer.commands(knobs)]
        with running(commands, environment, log) as programs:
            try:
                watched = watch(
                    programs,
                    server_pids(servers, double.pid),
                    ledger_of(folder),
                    counted(connection, peer.sent),
                    load,
                    peer.dies_whole,
                )
            except TimeoutError as error:
                raise RuntimeError(f"{peer.name} {error}; its log ends with\n{_tail(log)}") from error
    acceptances = read_acceptances(ledger_of(folder))
    enqueued = frozenset(str(email_id) for (email_id,) in ids)
    return result_of(peer.name, knobs, load, load.emails / enqueue_seconds, watched, enqueued, acceptances)


@contextmanager
def _database(servers: Servers) -> Iterator[str]:
    """Create an empty database, and drop it afterwards; yields its URL.

    Raises:
        RuntimeError: The server's commits are not durable.
    """
    name = f"peer_{secrets.token_hex(4)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        for setting in ("fsync", "synchronous_commit"):
            if administration.execute("select current_setting(%s)", [setting]).fetchone() != ("on",):
                raise RuntimeError(
                    f"PostgreSQL runs with {setting} off, but every case is measured with durable commits"
                )
        administration.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
        finally:
            administration.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _environment(
    servers: Servers, database_url: str, folder: Path, double: Double, knobs: Knobs, load: Load
) -> dict[str, str]:
    """The settings that the peers' code reads.

    TLS trusts only the double's authority. That favours peers that load all authorities for each connection: a usual
    system has 150 authorities.
    """
    ca_file = str(double.ca_file)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")},
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(folder),  # for django-post_office's lock file, which concurrent cases must not share
        "DJANGO_SETTINGS_MODULE": "benchmarks.peers.post_office.settings",
        "PEER_DATABASE_URL": database_url,
        "PEER_AMQP_URL": servers.amqp_url,
        "PEER_QUEUE": f"peer-{secrets.token_hex(4)}",
        "PEER_SENDGRID_HOST": double.environment["DISPATCHER_SENDGRID_HOST"],
        "PEER_CA_FILE": ca_file,
        "PEER_LEASE_SECONDS": str(LEASE_SECONDS_UNDER_KILLS if load.kill else LEASE_SECONDS),
        "SSL_CERT_FILE": ca_file,
        "REQUESTS_CA_BUNDLE": ca_file,
        **{f"PEER_{name.upper()}": str(value) for name, value in knobs.items()},
    }


def _prepare(
    peer: Peer,
    python: Path,
    connection: psycopg.Connection[tuple[object, ...]],
    load: Load,
    environment: Mapping[str, str],
) -> float:
    """Create the tables and enqueue; return how many seconds the enqueueing took."""
    connection.execute(peer.tables.encode())
    for command in peer.prepare:
        _call([str(python), "-m", *command.format(module=peer.module).split()], environment)
    words = ["-m", "benchmarks.peers.enqueue", peer.module, "--emails", str(load.emails)]
    answer: dict[str, float] = json.loads(_call([str(python), *words], environment))
    return answer["seconds"]


def _call(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=CALL_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:5])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "nothing"
