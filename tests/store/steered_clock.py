"""A PostgreSQL clock that a test can set. Sessions that connect by the clock's URL use replacements for `now()` and
similar functions.

The functions are in a separate schema, which the URL puts before pg_catalog in search_path. They add an offset from a
table to the real time. So one committed update moves the clock, and every session sees the new time in its next
statement. Column defaults are bound to PostgreSQL's own functions when the table is created: `created_at` keeps the
real time.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg

SCHEMA: Final = "steered"
SEARCH_PATH: Final = f"dispatcher,{SCHEMA},pg_catalog"
"""PostgreSQL creates tables in the first schema, and uses a function from the first schema that has it."""

_INSTALL: Final = f"""
    drop schema if exists {SCHEMA} cascade;
    create schema {SCHEMA};
    create table {SCHEMA}.clock (ahead interval not null);
    insert into {SCHEMA}.clock values (interval '0');
    create function {SCHEMA}.now() returns timestamptz language sql stable
        as 'select pg_catalog.now() + ahead from {SCHEMA}.clock';
    create function {SCHEMA}.transaction_timestamp() returns timestamptz language sql stable
        as 'select pg_catalog.now() + ahead from {SCHEMA}.clock';
    create function {SCHEMA}.statement_timestamp() returns timestamptz language sql stable
        as 'select pg_catalog.statement_timestamp() + ahead from {SCHEMA}.clock';
    create function {SCHEMA}.clock_timestamp() returns timestamptz language sql volatile
        as 'select pg_catalog.clock_timestamp() + ahead from {SCHEMA}.clock';
"""  # noqa: S608 - our own names


class SteeredClock:
    """The clock of one database, for sessions that connect by `url`."""

    def __init__(self, database_url: str) -> None:
        """Installs the functions in a migrated database, or replaces them. The clock starts at the real time."""
        self._database_url = database_url
        parts = urlsplit(database_url)
        query = [*parse_qsl(parts.query), ("options", f"-csearch_path={SEARCH_PATH}")]
        # libpq does not decode a plus sign as a space.
        self.url = urlunsplit(parts._replace(query=urlencode(query).replace("+", "%20")))
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(_INSTALL.encode())

    def set(self, ahead_seconds: float) -> None:
        """Sets the clock ahead of the real time; a negative number sets the clock behind."""
        statement = f"update {SCHEMA}.clock set ahead = %s * interval '1 second'"  # noqa: S608
        with psycopg.connect(self._database_url, autocommit=True) as connection:
            connection.execute(statement.encode(), [ahead_seconds])
