"""Parsing a large body in small steps has the same result as parsing the body in one step."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from dispatcher.api.large_json import LARGE_BYTES, parse
from dispatcher.api.problems import Problem
from dispatcher.domain.email_rules import MAX_BODY_OCTETS

CHARACTERS = 'aé€📧\\"\n\x7f\u2028/'
LONG = CHARACTERS * (LARGE_BYTES // len(CHARACTERS.encode()))
PLAIN = b"a" * LARGE_BYTES


def large(content: bytes) -> bytearray:
    return bytearray(b'{"text":"' + content + b'"}')


@pytest.mark.parametrize("shift", range(12))
@pytest.mark.parametrize("is_escaped", [True, False])
def test_no_character_is_lost_at_the_end_of_a_step(shift: int, is_escaped: bool) -> None:
    value = {"text": "x" * shift + LONG, "tail": [1, "short", {"content": "y" * shift + LONG}], '\\name"': LONG[:9999]}
    body = json.dumps(value).encode() if is_escaped else orjson.dumps(value)

    assert parse(bytearray(body)) == value


@pytest.mark.parametrize("value", [LONG, [LONG, "", LONG], {"a": {"b": LONG}, LONG: LONG}, ["x" * 300] * 20_000])
def test_a_long_string_may_be_anywhere(value: Any) -> None:
    assert parse(bytearray(orjson.dumps(value, option=orjson.OPT_INDENT_2))) == value


def test_long_runs_of_spaces_are_skipped() -> None:
    spaces = b" \n\t\r" * LARGE_BYTES
    body = bytearray(b'{"a"%b:%b[1,%b"b",\n2.5]%b}' % (spaces, spaces, spaces, spaces))

    assert parse(body) == {"a": [1, "b", 2.5]}


@pytest.mark.parametrize(
    "body",
    [
        PLAIN,
        b'"' + PLAIN,
        b'"' + PLAIN + b"\\",
        b'"' + PLAIN + b'\\"',
        large(PLAIN)[:-1],
        large(PLAIN) + b"}",
        large(PLAIN + b"\n"),
        large(PLAIN + b"\xff"),
        large(PLAIN + b"\xe2\x82"),
        large(PLAIN + rb"\ud83d"),
        large(PLAIN + rb"\ud83dx"),
        large(PLAIN + rb"\udce7\ud83d"),
        large(PLAIN + rb"\u00zz"),
        large(PLAIN + rb"\x"),
        b'["' + PLAIN + b'""' + PLAIN + b'"]',
        b'["' + PLAIN + b'" "' + PLAIN + b'"]',
        b"[1 2," + b" " * LARGE_BYTES + b"3]",
        b"[" + b"1" * LARGE_BYTES + b"]",
        b" " * LARGE_BYTES,
        b'{"a":1,"\\u0061":"' + PLAIN + b'"}',
        b'{"a":"' + PLAIN + b'","a":"' + PLAIN + b'"}',
    ],
    ids=lambda body: bytes(body[:6] + b"..." + body[-12:]).decode("latin-1"),
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(Problem) as refused:
        parse(bytearray(body))

    assert refused.value.code == "malformed-json"


@pytest.mark.parametrize(
    ("document", "part", "count"),
    [(b'["%b"]', b'","', 2_000_000), (b"[%b]", b"1,", 10_000_000)],
    ids=["texts", "numbers"],
)
def test_a_body_larger_than_any_email_is_refused_before_parsing(document: bytes, part: bytes, count: int) -> None:
    with pytest.raises(Problem) as refused:
        parse(bytearray(document % (part * count)))

    assert refused.value.code == "body-too-large"


def test_a_string_that_is_too_long_is_truncated_but_stays_too_long() -> None:
    text = parse(large(b"a" * 3 * MAX_BODY_OCTETS))["text"]

    assert MAX_BODY_OCTETS < len(text) < 1.1 * MAX_BODY_OCTETS
