"""Makes PostgreSQL fail to read rows, as after a disk error, or makes it refuse to change rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg
from psycopg import sql

_TOAST_TABLES = """
    select t.oid, t.relname
    from pg_partition_tree(%s::regclass) as p
    join pg_class as c on c.oid = p.relid
    join pg_class as t on t.oid = c.reltoastrelid
"""

_CONSTRAINTS = """
    select
        case when contypid = 0 then 'table' else 'domain' end,
        case when contypid = 0 then conrelid::regclass::text else contypid::regtype::text end,
        conname, pg_get_constraintdef(oid)
    from pg_constraint
    where contypid <> 0 and connamespace = 'dispatcher'::regnamespace
        or conrelid = 'dispatcher.email_log'::regclass and contype = 'c'
"""


@contextmanager
def damage(connection: psycopg.Connection, table: str) -> Iterator[None]:
    """Destroys the out-of-line (TOAST) values of the rows that the block writes to this table. Reading such a value
    then fails: XX001, "missing chunk number 0 for toast value …". Needs a superuser's connection in autocommit mode."""
    before = _last_chunk(connection, table)
    yield
    lost = 0
    for oid, name in connection.execute(_TOAST_TABLES.encode(), (table,)).fetchall():
        with connection.transaction():
            # PostgreSQL allows no writes to a TOAST table, so make it a normal table for now.
            connection.execute("update pg_class set relkind = 'r' where oid = %s", (oid,))
            delete = sql.SQL("delete from pg_toast.{} where chunk_id > %s").format(sql.Identifier(name))
            lost += connection.execute(delete, (before,)).rowcount
            connection.execute("update pg_class set relkind = 't' where oid = %s", (oid,))
        # Until this statement removes the values, a reader still finds them.
        connection.execute(sql.SQL("vacuum pg_toast.{}").format(sql.Identifier(name)))
    assert lost > 0, "nothing was stored out of line"


@contextmanager
def disk_full(connection: psycopg.Connection, row: str, error: str = "disk_full") -> Iterator[None]:
    """During the block, PostgreSQL reports a full disk, or another error, for `row`: `insert on t for each row`."""
    connection.execute(
        "create function refuse() returns trigger language plpgsql as "
        f"'begin raise exception using errcode = ''{error}'', message = ''refused''; end'".encode()
    )
    connection.execute(f"create trigger refuse before {row} execute function refuse()".encode())
    try:
        yield
    finally:
        connection.execute("drop function refuse cascade")


@contextmanager
def refused(connection: psycopg.Connection, email_id: UUID, change: str) -> Iterator[None]:
    """Makes PostgreSQL refuse this kind of change to the email's row during the block."""
    row = f"update on email_log for each row when (old.email_id = '{email_id}' and ({change}))"
    with disk_full(connection, row, "raise_exception"):
        yield


@contextmanager
def constraint(connection: psycopg.Connection, rule: str) -> Iterator[None]:
    """During the block, PostgreSQL refuses attempts that break the rule."""
    connection.execute(f"alter table email_attempt add constraint strict check ({rule})".encode())
    try:
        yield
    finally:
        connection.execute("alter table email_attempt drop constraint strict")


@contextmanager
def allow_damage(connection: psycopg.Connection) -> Iterator[None]:
    """Lets the block write values that the schema refuses, like a release that did not refuse them."""
    found = connection.execute(_CONSTRAINTS).fetchall()
    for kind, owner, name, _ in found:
        connection.execute(f"alter {kind} {owner} drop constraint {name}".encode())
    yield
    for kind, owner, name, definition in found:
        connection.execute(f"alter {kind} {owner} add constraint {name} {definition}".encode())


def noise(characters: int) -> str:
    """A random text, which hardly compresses."""
    return random.Random(1).randbytes(characters // 2).hex()


def _last_chunk(connection: psycopg.Connection, table: str) -> int:
    ids = [0]
    for _, name in connection.execute(_TOAST_TABLES.encode(), (table,)).fetchall():
        statement = sql.SQL("select max(chunk_id) from pg_toast.{}").format(sql.Identifier(name))
        row = connection.execute(statement).fetchone()
        ids.append(int(row[0]) if row and row[0] else 0)
    return max(ids)
