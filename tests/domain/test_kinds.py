"""Kinds read text and JSON alike, and their words never repeat the value. Duplicate names in JSON are found."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.domain import kinds
from dispatcher.domain.json_data import has_duplicate_name
from dispatcher.domain.kinds import Kind, Wrong
from dispatcher.domain.status import Status

COUNT = kinds.whole(1, 5)
STATUS = kinds.one_of(Status, "sent", "held")
ID = "0190163d-8694-739b-aea5-966c26f8ad90"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (COUNT, "5", 5),
        (kinds.LIMIT, "0.5", 0.5),
        (kinds.AGE, "2h", 7200.0),
        (kinds.FLAG, "on", True),
        (kinds.FLAG, "false", False),
        (STATUS, "held", Status.HELD),
        (kinds.TENANT, "acme", "acme"),
        (kinds.INSTANT, "2026-11-21T10:00:00Z", datetime(2026, 11, 21, 10, tzinfo=UTC)),
        (kinds.SINCE, "2026-11-21T10:00Z", datetime(2026, 11, 21, 10, tzinfo=UTC)),
        (kinds.EMAIL_IDS, f"{ID}, {ID}", (UUID(ID), UUID(ID))),
    ],
)
def test_a_text_is_read(kind: Kind[Any], text: str, expected: object) -> None:
    assert kind.of_text(text) == expected


@pytest.mark.parametrize(
    ("kind", "value", "mistakes"),
    [
        (COUNT, 6, [("", "must be a whole number from 1 to 5")]),
        (COUNT, True, [("", "must be a whole number from 1 to 5")]),
        (COUNT, 1.5, [("", "must be a whole number from 1 to 5")]),
        (kinds.LIMIT, float("nan"), [("", "must be a number from 0.001 to 1,000,000, such as 2.5")]),
        (kinds.FLAG, "true", [("", "must be true or false")]),
        (STATUS, "failed", [("", "must be one of: sent, held")]),
        (STATUS, ["sent"], [("", "must be one of: sent, held")]),
        (kinds.INSTANT, 5, [("", kinds.INSTANT.rule)]),
        (kinds.SINCE, "tomorrow", [("", kinds.SINCE.rule)]),
        (kinds.CURSOR_TEXT, "W1 0=", [("", "must be 1 to 1,000 printable characters")]),
        (kinds.FILTER_TEXT, "a\nb", [("", "must be 1 to 255 printable characters")]),
        (kinds.EMAIL_IDS, [], [("", "must be a list of 1 to 1,000 email ids (UUIDs)")]),
        (kinds.EMAIL_IDS, [ID, "x", 7], [("1", kinds.EMAIL_ID.rule), ("2", kinds.EMAIL_ID.rule)]),
    ],
)
def test_every_mistake_is_told(kind: Kind[Any], value: object, mistakes: list[tuple[str, str]]) -> None:
    with pytest.raises(Wrong) as caught:
        kind.of_json(value)
    assert list(caught.value.mistakes) == mistakes


def test_a_whole_number_may_be_written_with_a_fraction_of_zero() -> None:
    assert repr(COUNT.of_json(5.0)) == "5"


def test_a_cursor_returns_the_values_of_its_columns() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    columns = (datetime, int, str, UUID)
    text = kinds.cursor_text((at, 7, "é", UUID(ID)))
    assert kinds.cursor_values(columns, text) == [at, 7, "é", UUID(ID)]
    assert kinds.cursor(columns).of_text(text) == text
    nested = urlsafe_b64encode(b"[" * 740).decode()
    for wrong in (text, "x", nested, nested * 10, kinds.cursor_text(["a"])):
        with pytest.raises(Wrong):
            kinds.cursor((int,)).of_text(wrong)


TEXTS = st.text('a":\\ \n', max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40)
@given(value=VALUES, indent=st.sampled_from([None, 2]))
@example(value={"a": ': "', "b": '":'}, indent=None)
def test_distinct_names_are_accepted(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()

    assert not has_duplicate_name(text, orjson.loads(text))


@settings(max_examples=40)
@given(value=st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), more=VALUES, spaces=st.text(" \t\n\r", max_size=2))
def test_a_duplicate_name_is_found(value: dict[str, Any], more: Any, spaces: str) -> None:
    name = json.dumps(next(iter(value)))
    escaped = '"' + "".join(f"\\u{ord(character):04x}" for character in json.loads(name)) + '"'
    for again in (name, escaped):
        text = f"[{json.dumps(value)[:-1]}, {again}{spaces}: {json.dumps(more)}}}]".encode()
        assert has_duplicate_name(text, orjson.loads(text)), text
