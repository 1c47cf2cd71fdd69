"""What PostgreSQL is like as a server: for those who judge whether it suits us."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.errors import ConfigurationError, StoreUnavailable
from dispatcher.store.connections import AsyncSession, check_url, connect_async, connect_unconfigured, translated
from dispatcher.store.queries import query

COMMIT_SECONDS: Final = 5.0
"""A commit that takes longer is no better than none."""


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL server, as our session sees it.

    Attributes:
        version: As it is written, such as `15.4`.
        version_number: As it is compared: 150004.
        synchronous_commit: The setting for sessions that do not choose; ours do.
        fsync: Whether the server's writes reach the disk.
        max_connections: For everybody together.
        standby_count: Standbys that stream from it.
        has_synchronous_standby: Whether a commit waits for a standby.
    """

    version: str
    version_number: int
    synchronous_commit: str
    fsync: str
    max_connections: int
    standby_count: int
    has_synchronous_standby: bool


def describe_server(connection: Connection[TupleRow]) -> Server:
    """The server at the other end. Faults are ours (see `store.connections.translated`)."""
    with translated():
        row = connection.execute(query("show_server")).fetchone()
    assert row is not None
    return Server(*row)


def verify_writable(connection: Connection[TupleRow]) -> None:
    """Asserts that the server takes writes.

    Raises:
        StoreUnavailable: it is a standby, or read-only.
    """
    with translated():
        _assert_writable(connection.execute(query("describe_writes")).fetchone())


async def time_commit(database_url: str, *, name: str, within_seconds: float = COMMIT_SECONDS) -> float:
    """How many seconds it takes to connect and to commit a small write; it leaves no row.

    Raises:
        StoreUnavailable: it took longer than it may, or PostgreSQL takes no writes, or is away.
    """
    began_at = time.monotonic()
    async with await connect_async(database_url, name=name) as session:
        with translated():
            standbys = _assert_writable(await (await session.execute(query("describe_writes"))).fetchone())
            try:
                async with asyncio.timeout(within_seconds):
                    await session.execute(query("write_nothing"))
            except TimeoutError:
                words = f"PostgreSQL did not commit a small write within {within_seconds:g} s."
                raise StoreUnavailable(words, remedy=_hanging_remedy(standbys)) from None
    return time.monotonic() - began_at


def _assert_writable(row: TupleRow | None) -> str:
    """The standbys whose confirmation a commit waits for."""
    assert row is not None
    is_standby, is_read_only, standby_names = row
    if is_standby:
        raise StoreUnavailable("PostgreSQL is a standby and takes no writes.", remedy=_STANDBY)
    if is_read_only:
        raise StoreUnavailable("PostgreSQL is read-only and takes no writes.", remedy=_READ_ONLY)
    return str(standby_names)


def _hanging_remedy(standby_names: str) -> str:
    if not standby_names:
        return "Look at its log, its disk, and what its sessions wait for (pg_stat_activity)."
    return (
        f"A commit waits for a standby (synchronous_standby_names is '{standby_names}'): bring back the one that is "
        "away, or take it out of that setting and reload."
    )


_STANDBY: Final = (
    "Name the primary in DISPATCHER_DATABASE_URL, or all hosts with ?target_session_attrs=read-write, or promote the "
    "standby."
)
_READ_ONLY: Final = "Set default_transaction_read_only to off for the server, the database and the role."


async def verify_sessions(database_url: str, *, name: str) -> None:
    """Asserts that a connection keeps its session from one transaction to the next.

    A pooler in transaction mode does not: session settings, LISTEN, prepared statements and the relay's advisory lock
    end up with another connection. Two connections mark their sessions and look for their marks in turn. A pooler that
    shares sessions either gives both the same one, or gives one of them two.

    Raises:
        ConfigurationError: a mark is gone or is the other connection's.
        StoreUnavailable: PostgreSQL is away.
    """
    check_url(database_url)
    async with (
        await connect_unconfigured(database_url, name=name) as one,
        await connect_unconfigured(database_url, name=name) as other,
    ):
        with translated():
            marks = {one: secrets.token_hex(8), other: secrets.token_hex(8)}
            for session, mark in marks.items():
                await session.execute(query("mark_session"), {"mark": mark})
            for session in (one, other, other, one):
                found = await (await session.execute(query("read_session_mark"))).fetchone()
                if found != (marks[session],):
                    raise ConfigurationError([_SHARED])


_SHARED: Final = (
    "DISPATCHER_DATABASE_URL leads to a pooler that shares sessions between connections, such as PgBouncer in "
    "transaction mode. Session settings, LISTEN and advisory locks do not work there. Use session mode "
    "(pool_mode = session), or connect to PostgreSQL directly."
)


async def find_database_id(session: AsyncSession) -> UUID:
    """The identity that `init` gave the database."""
    with translated():
        row = await (await session.execute(query("find_database_id"))).fetchone()
    assert row is not None
    return UUID(str(row[0]))


def find_filled_defaults(connection: Connection[TupleRow]) -> list[str]:
    """The default partitions that hold rows: their weeks had no partition when they came."""
    with translated():
        return [name for (name,) in connection.execute(query("find_filled_defaults"))]
