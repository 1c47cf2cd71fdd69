"""Checks the PostgreSQL server: its version and settings, whether it accepts writes, and whether it keeps sessions."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final
from uuid import UUID

from dispatcher.domain.values import dataclass
from dispatcher.errors import ConfigurationError, StoreUnavailable
from dispatcher.store.connections import check_url, connect_async, connect_unconfigured
from dispatcher.store.statements import Source, statement

COMMIT_SECONDS: Final = 5.0
"""If a commit takes longer than this, the check fails."""


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL server and its settings."""

    version: str
    version_number: int
    synchronous_commit: str  # the server's default; the dispatcher's sessions set their own value
    fsync: str
    max_connections: int
    standby_count: int
    standby_names: str  # for which a commit waits (`synchronous_standby_names`)
    is_standby: bool
    is_read_only: bool

    def verify_writable(self) -> None:
        """Raises StoreUnavailable if the server is a standby, or read-only."""
        if self.is_standby:
            raise StoreUnavailable("PostgreSQL is a standby and takes no writes.", remedy=_STANDBY)
        if self.is_read_only:
            raise StoreUnavailable("PostgreSQL is read-only and takes no writes.", remedy=_READ_ONLY)


async def time_commit(database_url: str, *, name: str, within_seconds: float = COMMIT_SECONDS) -> float:
    """The seconds that it takes to connect and to commit a small write, which stores no row. Raises StoreUnavailable if
    the commit took longer than `within_seconds`, or PostgreSQL is read-only or unreachable."""
    began_at = time.monotonic()
    async with await connect_async(database_url, name=name) as session:
        server = await show_server(session)
        server.verify_writable()
        try:
            async with asyncio.timeout(within_seconds):
                await write_nothing(session)
        except TimeoutError:
            words = f"PostgreSQL did not commit a small write within {within_seconds:g} s."
            remedy = "Check PostgreSQL's log, its disk, and what its sessions wait for (pg_stat_activity)."
            if server.standby_names:
                remedy = (
                    f"A commit waits for a standby (synchronous_standby_names is '{server.standby_names}'). Restart "
                    "the missing standby, or remove it from that setting and reload PostgreSQL."
                )
            raise StoreUnavailable(words, remedy=remedy) from None
    return time.monotonic() - began_at


_STANDBY: Final = (
    "Set DISPATCHER_DATABASE_URL to the primary, or to all hosts with ?target_session_attrs=read-write, or promote the "
    "standby."
)
_READ_ONLY: Final = "Set default_transaction_read_only to off for the server, the database and the role."


async def verify_sessions(database_url: str, *, name: str) -> None:
    """Raises ConfigurationError if a connection does not keep its session from one transaction to the next.

    Behind a pooler in transaction mode, a connection does not keep its session. The connection then loses its session
    settings, LISTEN, prepared statements and advisory locks to other connections. To find out, this function opens two
    connections, marks their sessions, and reads the marks by turns. A pooler that shares sessions either gives both
    connections the same session, or gives one connection two different sessions.
    """
    check_url(database_url)
    async with (
        await connect_unconfigured(database_url, name=name) as one,
        await connect_unconfigured(database_url, name=name) as other,
    ):
        marks = {one: secrets.token_hex(8), other: secrets.token_hex(8)}
        for session, mark in marks.items():
            await mark_session(session, mark)
        for session in (one, other, other, one):
            if await read_session_mark(session) != marks[session]:
                raise ConfigurationError([_SHARED])


_SHARED: Final = (
    "DISPATCHER_DATABASE_URL points to a pooler that shares sessions between connections, such as PgBouncer in "
    "transaction mode. Session settings, LISTEN and advisory locks do not work there. Use session mode "
    "(pool_mode = session), or connect to PostgreSQL directly."
)


@statement
async def show_server(source: Source) -> Server: ...
@statement
async def write_nothing(source: Source) -> None: ...
@statement
async def mark_session(source: Source, mark: str) -> None: ...
@statement
async def read_session_mark(source: Source) -> str | None: ...
@statement
async def find_database_id(source: Source) -> UUID: ...
@statement
async def find_filled_defaults(source: Source) -> list[str]: ...
@statement
async def find_other_recipients(source: Source, recipients: str) -> list[str]: ...
@statement
async def find_hash_readers(source: Source) -> list[str]: ...
