"""What PostgreSQL is like as a server: for those who judge whether it suits us."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.store.connections import translated
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


def find_filled_defaults(connection: Connection[TupleRow]) -> list[str]:
    """The default partitions that hold rows: their weeks had no partition when they came."""
    with translated():
        return [name for (name,) in connection.execute(query("find_filled_defaults"))]
