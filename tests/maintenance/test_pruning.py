"""Pruning as the monitor does it; what goes is in tests/store/test_retention.py."""

from __future__ import annotations

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.maintenance.pruning import BUSY_SECONDS, PRUNE_SECONDS, TURN_SECONDS, ForgetCodes, Prune
from dispatcher.store.connections import connect_async, make_pool
from dispatcher.store.retention import TURN, Retention
from dispatcher.store.turns import turn
from tests.store.books import Books

RETENTION = Retention(30, 60, 90, 90)


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """A database of this test's own, with a week that is old and an act that is, too."""
    connection.execute("select email_partitions_make(clock_timestamp() - interval '100 days', 0)")
    connection.execute(
        "insert into operator_audit (acted_at, actor, action) "
        "values (clock_timestamp() - interval '100 days', 'ann', 'stop')"
    )
    return Books(connection)


def old_partition(books: Books, table: str) -> str:
    (row,) = books.select(f"select min(partition) as name from email_partitions_ended('{table}', clock_timestamp())")  # noqa: S608
    return str(row["name"])


async def test_a_part_that_fails_is_told_and_tried_again_with_the_next_round_and_the_others_are_done(
    books: Books, database_url: str
) -> None:
    stuck = old_partition(books, "email_content")
    books.connection.execute(f"create view report as table {stuck}".encode())

    with capture_logs() as logs:
        seconds = await Prune(database_url, RETENTION).run_once()

    assert seconds == PRUNE_SECONDS
    (told,) = [line for line in logs if line["event"] == "emails.pruning_failed"]
    assert (told["what"], told["retry_in_seconds"]) == ("email_content", PRUNE_SECONDS)
    (done,) = [line for line in logs if line["event"] == "emails.pruned"]
    assert done["act_count"] == 1
    assert done["partitions"] == [old_partition_name(stuck, table) for table in ("email_attachment", "email_attempt")]


def old_partition_name(name: str, table: str) -> str:
    """The partition of another table for the same week."""
    return f"{table}_{name.rpartition('_')[2]}"


async def test_what_somebody_else_holds_is_asked_for_again_soon_and_the_others_are_done(
    books: Books, database_url: str
) -> None:
    with capture_logs() as logs, psycopg.connect(database_url) as reader:
        reader.execute("select from email_content")
        seconds = await Prune(database_url, RETENTION).run_once()

    assert seconds == BUSY_SECONDS
    assert [line["event"] for line in logs] == ["emails.pruning_postponed", "emails.pruned"]
    assert books.count("operator_audit") == 0


async def test_a_postgresql_that_is_away_is_asked_again_soon() -> None:
    with capture_logs() as logs:
        seconds = await Prune("postgresql://nobody@127.0.0.1:1/x", RETENTION).run_once()

    assert seconds == BUSY_SECONDS
    assert [line["event"] for line in logs] == ["store.connection_lost"]


async def test_codes_are_forgotten_while_somebody_prunes(books: Books, database_url: str) -> None:
    email_id = books.enqueue_one(tags=["one_time_code"])
    books.change(email_id, status="sent")
    pool = make_pool(database_url, name="monitor", size=1)
    await pool.open()
    async with await connect_async(database_url, name="other host") as other, turn(other, TURN) as is_its:
        assert is_its

        assert await Prune(database_url, RETENTION).run_once() == TURN_SECONDS
        await ForgetCodes(pool, RETENTION).run_once()

    await pool.close()
    assert books.count("email_content") == 0
