"""Where a demo plays: a folder and servers that nobody else uses, both cleared at its end.

In the folder:
    demo.lock     held while a demo runs; marks the folder as one that the next demo may clear
    log/          a log per process
    run/          the run directory of `dispatcher run`, with the in-flight ledgers
    smtp/         the SMTP server's ledger, and `mail/` with an .eml for each email that it accepted
    servers/      private servers, while the demo runs

A demo enqueues invented emails and counts every one of them. On servers that the environment names, it therefore works
in a database and on queues of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from dispatcher.broker.connection import open_connection
from dispatcher.dev import servers as private
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, Progress, private_servers
from dispatcher.errors import BrokerUnavailable, DispatcherError
from dispatcher.store.connections import connected, translated
from dispatcher.store.queries import query

CA_FILE: Final = "DISPATCHER_CA_FILE"
_DATABASE: Final = "email_dispatcher_demo"
"""As `sql/queries/demo.sql` names it."""
_NAMES: Final = {
    "DISPATCHER_EXCHANGE": "email.dispatcher.demo.{}",
    "DISPATCHER_QUEUE": "email.dispatcher.demo.{}.send",
    "DISPATCHER_DLQ": "email.dispatcher.demo.{}.dlq",
}
_LOCK: Final = "demo.lock"
_REMEDY: Final = "Name another folder with --folder."


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """A folder that is empty but for the lock; at the end, without what only the servers need.

    Raises:
        DispatcherError: another demo is there, or files that no demo made.
    """
    if folder.exists() and not (folder / _LOCK).exists() and any(folder.iterdir()):
        raise DispatcherError(f"{folder} holds files that no demo made.", remedy=_REMEDY)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DispatcherError(f"Another demo runs in {folder}.", remedy=_REMEDY) from error
        _clear(folder)
        try:
            yield
        finally:
            _keep_logs(folder)


def _clear(folder: Path) -> None:
    """Removes what an earlier demo left; its last processes too, should it have been killed a moment ago."""
    Processes(folder).stop()
    private.stop(folder / "servers")
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _keep_logs(folder: Path) -> None:
    """Moves the private servers' logs to the others, and removes their data."""
    (folder / "log").mkdir(exist_ok=True)
    for name in ("postgres.log", "rabbitmq.log"):
        if (log := folder / "servers" / "log" / name).exists():
            log.replace(folder / "log" / name)
    for leftover in ("servers", "plan"):
        shutil.rmtree(folder / leftover, ignore_errors=True)


@contextmanager
def demo_servers(folder: Path, progress: Progress) -> Iterator[dict[str, str]]:
    """The settings that point to servers where nobody but the demo is; gone with the block, or with this process.

    Raises:
        ServerUnavailable: they cannot be had.
        DispatcherError: a named server does not let us make a place of our own.
    """
    with private_servers(folder, progress=progress) as servers, ExitStack() as stack:
        names = servers.environment()
        if os.environ.get(CA_FILE):
            names[CA_FILE] = os.environ[CA_FILE]
        if servers.database_url == os.environ.get(DATABASE_URL):
            names[DATABASE_URL] = stack.enter_context(_own_database(servers.database_url))
        if servers.amqp_url == os.environ.get(AMQP_URL):
            names |= stack.enter_context(_own_queues(servers.amqp_url, _ca_file(names)))
        yield names


@contextmanager
def _own_database(database_url: str) -> Iterator[str]:
    """A database of ours on a server of others."""
    with connected(database_url, name="dispatcher demo") as connection:
        locked = connection.execute(query("try_demo_lock")).fetchone()
        if not (locked and locked[0]):
            raise DispatcherError(f"Another demo uses the server in {DATABASE_URL}.", remedy="Wait for its end.")
        try:
            with translated():
                connection.execute(query("drop_demo_database"))
                connection.execute(query("create_demo_database"))
        except DispatcherError as error:
            raise DispatcherError(
                f"The demo could not make a database of its own on the server in {DATABASE_URL}.",
                remedy="Name a user there who may create databases, or unset it: the demo then starts its own server.",
            ) from error
        try:
            yield _beside(database_url)
        finally:
            connection.execute(query("drop_demo_database"))


def _beside(database_url: str) -> str:
    """The URL of our database on the same server."""
    if "://" not in database_url:
        return f"{database_url} dbname={_DATABASE}"  # libpq takes the last word
    return urlunsplit(urlsplit(database_url)._replace(path=f"/{_DATABASE}"))


@contextmanager
def _own_queues(amqp_url: str, ca_file: Path | None) -> Iterator[Mapping[str, str]]:
    """Names for an exchange and queues of ours; `init` makes them."""
    unique = secrets.token_hex(4)
    names = {variable: name.format(unique) for variable, name in _NAMES.items()}
    try:
        yield names
    finally:
        with suppress(BrokerUnavailable):
            asyncio.run(_delete(amqp_url, names, ca_file))


async def _delete(amqp_url: str, names: Mapping[str, str], ca_file: Path | None) -> None:
    exchange, *queues = names.values()
    async with await open_connection(amqp_url, name="dispatcher demo", ca_file=ca_file) as connection:
        channel = await connection.open_channel()
        for queue in queues:
            await channel.call(channel.raw.queue_delete, queue=queue)
        await channel.call(channel.raw.exchange_delete, exchange=exchange)


def _ca_file(names: Mapping[str, str]) -> Path | None:
    return Path(names[CA_FILE]) if CA_FILE in names else None
