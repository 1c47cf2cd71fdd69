"""Values of a large body are counted without parsing it."""

from __future__ import annotations

import pytest

from dispatcher.api.large_json import MAX_VALUES, count_values

LONG = b'["' + b',\\\\\\"' * MAX_VALUES
"""More than one step, with commas and escapes inside a string."""


@pytest.mark.parametrize("shift", range(8))
def test_only_values_outside_strings_count(shift: int) -> None:
    assert count_values(b" " * shift + LONG + b'",{"a":"b\\\\"},"\\\\",1]') == 6


def test_a_count_that_need_not_be_exact_stops_early() -> None:
    assert count_values(LONG, exact=False) == MAX_VALUES + 1


@pytest.mark.parametrize("text", [b'"' + b'\\"' * MAX_VALUES, b'"' + b"\\" * 2 * MAX_VALUES], ids=["quotes", "slashes"])
def test_values_around_an_unterminated_string_are_counted_in_one_pass(text: bytes) -> None:
    assert count_values(b"[" * MAX_VALUES + b"," + text) == MAX_VALUES + 1
    assert count_values(text + b"," * 2 * MAX_VALUES) == 0


@pytest.mark.parametrize(
    ("start", "part"),
    [(b'["a', b'","'), (b"[1", b",1"), (b'["' + b"," * MAX_VALUES + b'"', b'""')],
    ids=["texts", "numbers", "texts without commas"],
)
def test_a_body_larger_than_any_email_has_too_many_values(start: bytes, part: bytes) -> None:
    assert count_values(start + part * (MAX_VALUES + 1)) == MAX_VALUES + 1
