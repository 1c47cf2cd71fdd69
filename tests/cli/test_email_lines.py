"""Tests the reader of JSON Lines files with emails."""

from __future__ import annotations

from io import BytesIO

import orjson
import pytest

from dispatcher.cli import email_file
from dispatcher.cli.email_file import FileEntry, Refusal, read_entries
from dispatcher.domain.email import Email

EMAIL = {"message_key": "k", "from": "a@example.com", "to": "b@example.org", "subject": "s", "text": "t"}
LINE = orjson.dumps(EMAIL)


def _read(content: bytes) -> list[FileEntry]:
    return list(read_entries(BytesIO(content)))


@pytest.mark.parametrize(
    "content", [LINE, LINE + b"\n", LINE + b"\r\n", b"\xef\xbb\xbf" + LINE, b"  " + LINE + b"  \n"]
)
def test_spaces_line_ends_and_a_byte_order_mark_around_an_email_are_ignored(content: bytes) -> None:
    (entry,) = _read(content)

    assert entry.content == Email.from_json(EMAIL)
    assert (entry.number, entry.end) == (1, len(content))


def test_blank_lines_are_skipped_and_count_in_line_numbers() -> None:
    assert [entry.number for entry in _read(b"\n" + LINE + b"\n \t\n\r\n" + LINE)] == [2, 5]


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (b'{"a" 1}', "line", "is not JSON (unexpected character, expected ':' after key, character 6)"),
        (b"hello", "line", "is not JSON"),
        (b"\xff\xfe{}", "line", "is UTF-16, not UTF-8; save the file as UTF-8"),
        ('{"message_key": "k"}'.encode("utf-16-be"), "line", "is UTF-16"),
        ('{"message_key": "kü"}'.encode("latin-1"), "line", "is not UTF-8"),
        (b"message_key;from;to", "line", "looks like a table separated by semicolons; each line must be a JSON object"),
        (b"message_key,from,to", "line", "looks like a table separated by commas"),
        (b"k\tshop@example.com\tann@example.org; bob@example.org", "line", "looks like a table separated by tabs"),
        (b"[" * 5000, "line", "is only a part of a JSON document; write each email as one line"),
        (b'{"message_key": "k"},', "line", "is only a part of a JSON document"),
        (b"[]", "email", "must be a JSON object"),
        (LINE.replace(b"{", b'{"message_key": "j", ', 1), "line", "has the same name twice"),
        (orjson.dumps(EMAIL | {"to": ["b@example.org", "nobody"]}), "to[1]", "@"),
        (orjson.dumps(EMAIL | {"colour": "red"}), "colour", "is not a field of an email; check the spelling"),
        (orjson.dumps({**EMAIL, "subject": None}), "subject", "is required unless template_id is set"),
    ],
)
def test_the_refusal_of_an_invalid_line_has_number_field_and_reason(line: bytes, field: str, words: str) -> None:
    good, bad = _read(LINE + b"\n" + line + b"\n")

    assert isinstance(good.content, Email)
    assert isinstance(bad.content, Refusal)
    assert (bad.content.line, bad.content.field) == (2, field)
    assert words in bad.content.reason


def test_a_line_that_is_too_long_is_refused_and_the_next_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(email_file, "MAX_LINE_OCTETS", len(LINE) + 1)

    before, long, after = _read(LINE + b"\n" + b"x" * 10 * len(LINE) + b"\n" + LINE)

    assert isinstance(before.content, Email)
    assert long.content == Refusal(2, "line", f"has more than {len(LINE) + 1} bytes")
    assert (after.number, after.content) == (3, before.content)


def test_a_refusal_as_text_names_line_field_and_reason() -> None:
    assert str(Refusal(7, "to[0]", "has no @")) == "line 7: to[0]: has no @"
    assert str(Refusal(7, "line", "is not JSON")) == "line 7: is not JSON"
