"""Duplicate names in JSON objects are found, even if they are escaped differently."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.domain.json_data import has_duplicate_name

TEXTS = st.text('a":\\ \n', max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(value=VALUES, indent=st.sampled_from([None, 2]))
@example(value={"a": ': "', "b": '":'}, indent=None)
def test_distinct_names_are_accepted(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent).encode()

    assert not has_duplicate_name(text, orjson.loads(text))


@given(value=st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), more=VALUES, spaces=st.text(" \t\n\r", max_size=2))
def test_a_duplicate_name_is_found(value: dict[str, Any], more: Any, spaces: str) -> None:
    name = json.dumps(next(iter(value)))
    escaped = '"' + "".join(f"\\u{ord(character):04x}" for character in json.loads(name)) + '"'
    for again in (name, escaped):
        text = f"[{json.dumps(value)[:-1]}, {again}{spaces}: {json.dumps(more)}}}]".encode()
        assert has_duplicate_name(text, orjson.loads(text)), text
