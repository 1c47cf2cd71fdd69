"""The folder and the servers of a demo. No other process uses them.

In the folder:
    demo.lock     locked while a demo runs; without this file, a demo refuses a folder that is not empty
    log/          one log per process
    run/          the run directory of `dispatcher run`, with the in-flight ledgers
    smtp/         the SMTP server's list of accepted emails, and `mail/` with one .eml file for each accepted email
    servers/      the private servers, while the demo runs

The demo must count only its own emails. If environment variables such as DISPATCHER_DATABASE_URL name existing servers,
the demo creates its own database and queues on these servers, and deletes them at the end.
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
"""The name of the demo's database, which `sql/queries/demo.sql` repeats."""
_NAMES: Final = {
    "DISPATCHER_EXCHANGE": "email.dispatcher.demo.{}",
    "DISPATCHER_QUEUE": "email.dispatcher.demo.{}.send",
    "DISPATCHER_DLQ": "email.dispatcher.demo.{}.dlq",
}
_LOCK: Final = "demo.lock"
_REMEDY: Final = "Set a different folder with --folder."


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Locks and empties a folder for the demo. Afterwards, removes the servers' data and keeps the logs. Raises
    DispatcherError if another demo uses the folder, or the folder has files that are not from a demo."""
    if folder.exists() and not (folder / _LOCK).exists() and any(folder.iterdir()):
        raise DispatcherError(f"{folder} has files that are not from a demo.", remedy=_REMEDY)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DispatcherError(f"Another demo is running in {folder}.", remedy=_REMEDY) from error
        _clear(folder)
        try:
            yield
        finally:
            _keep_logs(folder)


def _clear(folder: Path) -> None:
    """Removes the files of an earlier demo. If the earlier demo was killed, first stops its processes."""
    Processes(folder).stop()
    private.stop(folder / "servers")
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _keep_logs(folder: Path) -> None:
    """Moves the private servers' logs to `log/`, and removes the servers' data."""
    (folder / "log").mkdir(exist_ok=True)
    for name in ("postgres.log", "rabbitmq.log"):
        if (log := folder / "servers" / "log" / name).exists():
            log.replace(folder / "log" / name)
    for leftover in ("servers", "plan"):
        shutil.rmtree(folder / leftover, ignore_errors=True)


@contextmanager
def demo_servers(folder: Path, progress: Progress) -> Iterator[dict[str, str]]:
    """Settings for servers, a database and queues that only the demo uses. Afterwards, stops the private servers, and
    deletes the database and the queues. Private servers also stop if this process dies."""
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
    """Creates a temporary database on the server of DISPATCHER_DATABASE_URL, yields its URL, and drops the database."""
    with connected(database_url, name="dispatcher demo") as connection:
        locked = connection.execute(query("try_demo_lock")).fetchone()
        if not (locked and locked[0]):
            raise DispatcherError(
                f"Another demo is using the server of {DATABASE_URL}.", remedy="Try again when that demo has ended."
            )
        try:
            with translated():
                connection.execute(query("drop_demo_database"))
                connection.execute(query("create_demo_database"))
        except DispatcherError as error:
            raise DispatcherError(
                f"The demo could not create its database on the server of {DATABASE_URL}.",
                remedy=f"Use a role that may create databases. Or unset {DATABASE_URL}: the demo starts a server.",
            ) from error
        try:
            yield _demo_url(database_url)
        finally:
            connection.execute(query("drop_demo_database"))


def _demo_url(database_url: str) -> str:
    """The URL of the demo's database on the same server."""
    if "://" not in database_url:
        return f"{database_url} dbname={_DATABASE}"  # if dbname occurs several times, libpq uses the last one
    return urlunsplit(urlsplit(database_url)._replace(path=f"/{_DATABASE}"))


@contextmanager
def _own_queues(amqp_url: str, ca_file: Path | None) -> Iterator[Mapping[str, str]]:
    """Settings with unique names for the exchange and the queues, which `dispatcher init` creates, and the end of the
    block deletes."""
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
