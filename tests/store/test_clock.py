"""The clock that tests set: the product's statements go by it."""

from __future__ import annotations

import psycopg

from tests.store.clock import DatabaseClock

HOUR = 3600.0
_AHEAD = """
    select extract(epoch from now() - pg_catalog.now()), extract(epoch from clock_timestamp() - transaction_timestamp())
"""


def test_sessions_go_by_the_clock_that_a_test_has_set(database_url: str) -> None:
    clock = DatabaseClock.install(database_url)
    with psycopg.connect(database_url, autocommit=True) as session:
        for seconds in (HOUR, -HOUR, 0.0):
            clock.set(seconds)
            row = session.execute(_AHEAD).fetchone()
            assert row is not None
            assert [round(float(each)) for each in row] == [seconds, seconds]
