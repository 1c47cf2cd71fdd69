"""Begins and ends operators' pauses directly in the table."""

from __future__ import annotations

import psycopg


def pause(connection: psycopg.Connection, scope: str, name: str = "", *, seconds: float | None = None) -> None:
    """Begins a pause by `ann@ops-1`, which ends by itself after `seconds`."""
    connection.execute(
        "insert into pause (scope, name, until_at, reason, actor)"
        " values (%s, %s, clock_timestamp() + %s * interval '1 second', 'maintenance', 'ann@ops-1')",
        [scope, name, seconds],
    )


def resume(connection: psycopg.Connection) -> None:
    connection.execute("delete from pause")
