"""PostgreSQL receives each list unchanged, whatever values the list contains."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.errors import ValueRefused
from dispatcher.store.arrays import BatchDumper
from dispatcher.store.connections import translated

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
AN_ID = uuid4()
AN_INSTANT = datetime(2026, 5, 4, 3, 2, 1, 987654, UTC)


@pytest.fixture
def connection(tables_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that uses `BatchDumper`."""
    with psycopg.connect(tables_url, autocommit=True) as opened:
        opened.adapters.register_dumper(list, BatchDumper)
        yield opened


def round_trip(connection: psycopg.Connection[Any], items: list[Any], kind: str) -> Any:
    """Sends a list to PostgreSQL; returns the list that PostgreSQL sends back."""
    (row,) = connection.execute(f"select %s::{kind}", [items]).fetchall()
    return row[0]


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([AN_ID, None, uuid4()], "uuid[]"),
        ([1, -(2**62), None], "bigint[]"),
        ([1.5, 1e-300, float("inf"), None, 0.1 + 0.2], "double precision[]"),
        ([AN_INSTANT, None], "timestamptz[]"),
        (["NULL", None, "", "{}", 'a"b', "a\\b", "a,b", " \n\t", "ä🎉"], "text[]"),
        ([None, None], "text[]"),
        ([], "text[]"),
        ([b"\x00\xff", None], "bytea[]"),
        ([True, False], "boolean[]"),
        ([["a", "b"], ["c", "d"]], "text[]"),
    ],
)
def test_every_kind_of_list_survives_a_round_trip(
    connection: psycopg.Connection[Any], items: list[Any], kind: str
) -> None:
    assert round_trip(connection, items, kind) == items


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.none() | TEXTS, max_size=8))
def test_every_text_survives_a_round_trip(connection: psycopg.Connection[Any], items: list[str | None]) -> None:
    assert round_trip(connection, items, "text[]") == items


def test_a_nul_is_refused_and_does_not_truncate_the_text(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(ValueRefused), translated():
        round_trip(connection, ["a\0b"], "text[]")


def test_psycopg_dumps_a_list_of_mixed_types(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.DataError, match="mixed"):
        round_trip(connection, ["a", 1], "text[]")
