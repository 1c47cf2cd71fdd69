"""When an email may be sent, and in which lane: the fields of `Email`, and their JSON."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dispatcher import Email, InvalidEmail
from tests.store.books import email

NOW = datetime.now(UTC)
LATER = NOW + timedelta(days=3)
PLAIN: dict[str, Any] = {"message_key": "k", "from": "a@example.com", "to": "b@example.org", "subject": "", "text": "t"}


def test_times_are_kept_in_utc() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))

    made = email(send_at=LATER.astimezone(zone), expires_at=LATER + timedelta(hours=1))

    assert made.send_at == LATER
    assert made.send_at is not None
    assert made.send_at.tzinfo is UTC
    assert made == email(send_at=LATER, expires_at=LATER + timedelta(hours=1))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"send_at": LATER.replace(tzinfo=None)}, "send_at"),
        ({"expires_at": LATER.replace(tzinfo=None)}, "expires_at"),
        ({"send_at": "2026-12-24T18:00:00Z"}, "send_at"),
        ({"send_at": NOW + timedelta(days=367)}, "send_at"),
        ({"expires_at": NOW + timedelta(days=367)}, "expires_at"),
        ({"send_at": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))}, "send_at"),
        ({"send_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))}, "send_at"),
        ({"send_at": LATER, "expires_at": LATER}, "expires_at"),
        ({"lane": ""}, "lane"),
        ({"lane": "Urgent"}, "lane"),
        ({"lane": 1}, "lane"),
    ],
)
def test_an_invalid_time_or_lane_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        email(**fields)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("zone", "local", "fold", "taken"),
    [
        ("Europe/Berlin", "2026-03-29 02:30", 0, "03:30"),
        ("Europe/Berlin", "2026-03-29 02:30", 1, "01:30"),
        ("America/New_York", "2026-03-08 02:00", 0, "03:00"),
        ("Australia/Lord_Howe", "2026-10-04 02:15", 0, "02:45"),
        ("Europe/Berlin", "2026-03-29 01:59", 0, None),
        ("Europe/Berlin", "2026-03-29 03:00", 0, None),
        ("Europe/Berlin", "2026-10-25 02:30", 0, None),  # occurs twice
        ("Europe/Berlin", "2026-10-25 02:30", 1, None),
        ("UTC", "2026-03-29 02:30", 0, None),
    ],
)
def test_a_time_that_its_zone_skips_is_reported_with_the_time_that_is_used(
    zone: str, local: str, fold: int, taken: str | None
) -> None:
    at = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone), fold=fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = email(send_at=at)

    assert made.send_at is not None
    expected = f"send_at: {local} does not exist in {zone}; {taken} is used instead."
    assert [str(each.message) for each in caught] == ([expected] if taken else [])
    assert f"{made.send_at.astimezone(ZoneInfo(zone)):%H:%M}" == (taken or local[-5:])


def test_a_time_in_the_past_is_no_mistake_of_the_email_because_a_call_may_be_repeated() -> None:
    past = NOW - timedelta(days=3)

    assert email(send_at=past, expires_at=past + timedelta(hours=1)).send_at == past


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-12-24T18:00:00+01:00", datetime(2026, 12, 24, 17, tzinfo=UTC)),
        ("2026-12-24t17:00:00.5z", datetime(2026, 12, 24, 17, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_json_has_times_as_rfc_3339(text: str, instant: datetime) -> None:
    made = Email.from_json(PLAIN | {"send_at": text})

    assert made.send_at == instant
    assert Email.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "text", ["2026-12-24T18:00:00", "2026-12-24", "soon", "", 1_800_000_000, "2026-13-01T00:00:00Z", "20261224T180000Z"]
)
def test_a_time_without_a_zone_or_in_another_form_is_refused(text: object) -> None:
    with pytest.raises(InvalidEmail, match="zone") as caught:
        Email.from_json(PLAIN | {"expires_at": text})

    assert caught.value.field == "expires_at"


def test_the_payload_hash_has_times_and_lane_only_where_they_are_used() -> None:
    later = LATER + timedelta(hours=1)
    both = {"send_at": LATER, "expires_at": later}
    variants: list[dict[str, Any]] = [{}, {"send_at": LATER}, {"expires_at": LATER}, both, {"lane": "bulk"}]
    hashes = {email(**fields).payload_hash() for fields in variants}

    assert len(hashes) == len(variants)
    assert email().payload_hash().hex() == UNCHANGED, "emails of earlier releases keep their hashes"


UNCHANGED = "51ae9e405b5fb5a4038f7cdd9201be78960e79d09cd45ac00f0b0084ff143629"
