"""Whatever a provider's text contains, the scrubbed text has one line, a limited length and no addresses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.scrub import MAX_CHARACTERS, scrub


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        ("<ann@example.com>: Recipient address rejected", "<address>: Recipient address rejected"),
        ("no such user: ann.lee+x@mail.example.co.uk.", "no such user: <address>"),
        ("see https://example.com/?who=ann%40example.com&x=1", "see https:<address>"),
        ("SRS0=abc=xy=example.org=ann@relay.example", "<address>"),
        ("users ann@example.com,bob@example.com", "users <address>,<address>"),
        ('"ann lee"@example.com is unknown', "<address> is unknown"),
        ("юзер@пример.рф нет", "<address> нет"),
        ("ann\uff20example.com", "<address>"),
        ("ann@[192.0.2.1] no", "<address> no"),
        ("one\r\ntwo\tthree\x00four", "one two three four"),
        ("the key SG.abc-1_x.def2 is revoked", "the key <credential> is revoked"),
        ("bad header Authorization: Bearer abc.123", "bad header Authorization: <credential>"),
        ("Basic dXNlcjpwYXNzd29yZA== was refused", "<credential> was refused"),
        ("AKIAIOSFODNN7EXAMPLE is not active", "<credential> is not active"),
        ("basic authentication is needed", "basic authentication is needed"),
        ("Subject: =?utf-8?b?WW91ciBjb2Rl?= is spam", "Subject: <encoded> is spam"),
        ("  2.0.0   Ok ", "2.0.0 Ok"),
        ("", ""),
    ],
)
def test_addresses_credentials_and_control_characters_are_removed(words: str, safe: str) -> None:
    assert scrub(words) == safe


local = st.text("abcdefghijklmnopqrstuvwxyzäöü0123456789.!#$%&'*+/=?^_`{|}~-", min_size=1, max_size=20)
domain = st.from_regex(r"[a-z0-9]{1,10}(\.[a-z]{2,5}){1,2}", fullmatch=True)


@given(st.text(max_size=40), local, domain, st.text(max_size=40))
def test_no_part_of_an_address_survives(before: str, local: str, domain: str, after: str) -> None:
    secret = f"qq{local}qq"

    safe = scrub(f"{before} {secret}@{domain}qq {after}")

    assert secret not in safe
    assert f"{domain}qq" not in safe
    assert "@" not in safe


@given(st.text())
def test_any_text_becomes_one_bounded_printable_line(words: str) -> None:
    safe = scrub(words)

    assert len(safe) <= MAX_CHARACTERS
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", safe)
    assert scrub(safe) == safe


def test_a_megabyte_is_cut() -> None:
    assert len(scrub("a@b " * 250_000)) == MAX_CHARACTERS
    assert len(scrub("x" * 1_000_000)) == MAX_CHARACTERS
