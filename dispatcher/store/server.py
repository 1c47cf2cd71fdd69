"""What PostgreSQL is like as a server: for those who judge whether it suits us."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.errors import ConfigurationError
from dispatcher.store.connections import connected, translated
from dispatcher.store.queries import query


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL server, as our session sees it.

    Attributes:
        version: As it is written, such as `15.4`.
        version_number: As it is compared: 150004.
        synchronous_commit: The setting for sessions that do not choose; ours do.
        fsync: Whether the server's writes reach the disk.
        max_connections: For everybody together.
    """

    version: str
    version_number: int
    synchronous_commit: str
    fsync: str
    max_connections: int


def describe_server(connection: Connection[TupleRow]) -> Server:
    """The server at the other end. Faults are ours (see `store.connections.translated`)."""
    with translated():
        row = connection.execute(query("show_server")).fetchone()
    assert row is not None
    return Server(*row)


def verify_sessions(database_url: str, *, name: str) -> None:
    """Asserts that a connection keeps its session from one transaction to the next.

    A pooler in transaction mode does not: session settings, LISTEN, prepared statements and the relay's advisory lock
    end up with another connection. Two connections mark their sessions and look for their marks in turn. A pooler that
    shares sessions either gives both the same one, or gives one of them two.

    Raises:
        ConfigurationError: a mark is gone or is the other connection's.
        StoreUnavailable: PostgreSQL is away.
    """
    with connected(database_url, name=name) as one, connected(database_url, name=name) as other, translated():
        marks = {one: secrets.token_hex(8), other: secrets.token_hex(8)}
        for connection, mark in marks.items():
            connection.execute(query("mark_session"), {"mark": mark})
        for connection in (one, other, other, one):
            if connection.execute(query("read_session_mark")).fetchone() != (marks[connection],):
                raise ConfigurationError([_SHARED])


_SHARED: Final = (
    "DISPATCHER_DATABASE_URL leads to a pooler that shares sessions between connections, such as PgBouncer in "
    "transaction mode. Session settings, LISTEN and advisory locks do not work there. Use session mode "
    "(pool_mode = session), or connect to PostgreSQL directly."
)


def find_database_id(connection: Connection[TupleRow]) -> UUID:
    """The identity that `init` gave the database."""
    with translated():
        row = connection.execute(query("find_database_id")).fetchone()
    assert row is not None
    return UUID(str(row[0]))


def find_filled_defaults(connection: Connection[TupleRow]) -> list[str]:
    """The default partitions that hold rows: their weeks had no partition when they came."""
    with translated():
        return [name for (name,) in connection.execute(query("find_filled_defaults"))]
