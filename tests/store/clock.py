"""PostgreSQL's clock, which a test sets forward and back: functions that stand before PostgreSQL's own in search_path.

    clock = DatabaseClock.install(database_url)     before or after `init`; sessions that begin later go by it
    clock.set(3600)                                 at once for all of them: an hour ahead
    clock.set(0)                                    as PostgreSQL's own again

The offset is a row of a table, so a step takes effect at each session's next statement, as on a real server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import psycopg

_INSTALL: Final = """
    create schema if not exists set_clock;
    create table if not exists set_clock.ahead (by interval not null);
    insert into set_clock.ahead select '0' where not exists (select from set_clock.ahead);
    create or replace function set_clock.now() returns timestamptz language sql stable
        return pg_catalog.now() + (select by from set_clock.ahead);
    create or replace function set_clock.clock_timestamp() returns timestamptz language sql volatile
        return pg_catalog.clock_timestamp() + (select by from set_clock.ahead);
    do $$ begin
        execute format('alter database %I set search_path = public, set_clock, pg_catalog', current_database());
    end $$;
"""


@dataclass(frozen=True, slots=True)
class DatabaseClock:
    """The clock of one database: what `now()` and `clock_timestamp()` return there."""

    database_url: str

    @classmethod
    def install(cls, database_url: str) -> Self:
        """Prepares the database; sessions that are open already keep PostgreSQL's own clock. Idempotent."""
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(_INSTALL)
        return cls(database_url)

    def set(self, seconds: float) -> None:
        """Sets the clock so far ahead of PostgreSQL's own, or behind it where that is negative."""
        with psycopg.connect(self.database_url, autocommit=True, connect_timeout=2) as connection:
            connection.execute("update set_clock.ahead set by = %s * interval '1 second'", [seconds])
