"""PostgreSQL's clock, set by a test: sessions that connect by its URL get `now()` and its kin from functions of ours.

The functions live in a schema of their own, which the URL names in search_path before pg_catalog. They add to the true
time what a table says, so a step is one committed update, and every steered session sees it in its next statement.
A column's default is bound to PostgreSQL's own function when its table is made: `created_at` keeps the true time.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg

SCHEMA: Final = "steered"
SEARCH_PATH: Final = f"dispatcher,{SCHEMA},pg_catalog"
"""New tables go to the first schema; a function is taken from the first schema that has it."""

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
    """The clock of one database, as sessions by `url` see it.

    Attributes:
        url: The database's URL; whoever connects by it goes by this clock.
    """

    def __init__(self, database_url: str) -> None:
        """Installs the functions in a migrated database, anew if they are there; the clock is right at first."""
        self._database_url = database_url
        self.url = steered(database_url)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(_INSTALL.encode())

    def set(self, ahead_seconds: float) -> None:
        """Sets it so far ahead of the true time; a negative number sets it behind."""
        statement = f"update {SCHEMA}.clock set ahead = %s * interval '1 second'"  # noqa: S608
        with psycopg.connect(self._database_url, autocommit=True) as connection:
            connection.execute(statement.encode(), [ahead_seconds])


def steered(database_url: str) -> str:
    """The URL of the same database for sessions that go by the steered clock."""
    parts = urlsplit(database_url)
    query = [*parse_qsl(parts.query), ("options", f"-csearch_path={SEARCH_PATH}")]
    # A plus sign is no space to libpq.
    return urlunsplit(parts._replace(query=urlencode(query).replace("+", "%20")))
