"""The dispatcher's statements use the clock that a test sets."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from dispatcher import enqueue
from tests.store.books import Books, email
from tests.store.steered_clock import SteeredClock


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1)], ids=str)
def test_open_sessions_see_a_step_of_the_clock(tables_url: str, books: Books, ahead: timedelta) -> None:
    clock = SteeredClock(tables_url)
    with psycopg.connect(clock.url, autocommit=True) as connection:
        first = enqueue(connection, email("before"))
        clock.set(ahead.total_seconds())
        second = enqueue(connection, email("after"))

    due = [books.row(answer.email_id)["publish_due_at"] for answer in (first, second)]
    assert abs(due[1] - due[0] - ahead) < timedelta(minutes=1)
