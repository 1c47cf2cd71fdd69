"""Email ids contain their creation time, ascend within a process, and are unique."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.email_id import Ticks, lowest_id_at, new_email_id, time_of

MILLISECOND = timedelta(milliseconds=1)
SECOND_NS = 1_000_000_000


def test_an_id_is_a_uuid7_of_now() -> None:
    before = datetime.now(UTC)
    email_id = new_email_id()
    after = datetime.now(UTC)

    assert email_id.version == 7
    assert email_id.variant == "specified in RFC 4122"
    assert before - MILLISECOND <= time_of(email_id) <= after + MILLISECOND
    assert lowest_id_at(time_of(email_id)) <= email_id < lowest_id_at(time_of(email_id) + MILLISECOND)


def test_ids_of_one_process_ascend_and_differ() -> None:
    ids = [new_email_id() for _ in range(20_000)]

    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_forked_processes_never_create_the_same_id() -> None:
    program = """
import os
from dispatcher.domain.email_id import new_email_id
new_email_id()
child = os.fork()
for _ in range(2000):
    os.write(1, f"{new_email_id()}\\n".encode())
if child:
    os.waitpid(child, 0)
"""
    made = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()

    assert len(made) == len(set(made)) == 4000


def test_ticks_ascend_while_the_clock_stops_or_is_set_back_by_less_than_a_second() -> None:
    ticks = Ticks()

    given = [ticks.next(instant) for instant in (50 * SECOND_NS, 50 * SECOND_NS, 50 * SECOND_NS - 900_000_000)]

    assert given == [50_000 * 4096, 50_000 * 4096 + 1, 50_000 * 4096 + 2]


@pytest.mark.parametrize("seconds_back", [1, 10])
def test_ticks_follow_a_clock_that_is_set_back_by_a_second_or_more(seconds_back: int) -> None:
    ticks = Ticks()
    ticks.next(50 * SECOND_NS)

    assert ticks.next((50 - seconds_back) * SECOND_NS) == (50 - seconds_back) * 1000 * 4096


@given(st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-11)))))  # noqa: DTZ001
def test_the_lowest_id_of_an_instant_has_its_millisecond(instant: datetime) -> None:
    lowest = lowest_id_at(instant)

    assert time_of(lowest) == instant.replace(microsecond=instant.microsecond // 1000 * 1000)
    assert lowest.version == 7


@pytest.mark.parametrize("instant", [datetime(2026, 1, 1), datetime(1969, 12, 31, tzinfo=UTC)])  # noqa: DTZ001
def test_an_instant_without_zone_or_before_1970_has_no_id(instant: datetime) -> None:
    with pytest.raises(ValueError, match=r"has no time zone|is before 1970"):
        lowest_id_at(instant)


@pytest.mark.parametrize("foreign", [uuid4(), UUID("ffffffff-ffff-7fff-bfff-ffffffffffff"), UUID(int=0)])
def test_a_foreign_id_has_no_time(foreign: UUID) -> None:
    with pytest.raises(ValueError, match="is not an email id"):
        time_of(foreign)
