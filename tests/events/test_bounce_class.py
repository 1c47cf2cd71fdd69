"""Doubt never makes a bounce hard."""

from __future__ import annotations

from email.message import Message

import pytest

from dispatcher.domain.event import Bounce
from dispatcher.events.bounce_class import ENHANCED, classify
from dispatcher.events.bounce_text import field


@pytest.mark.parametrize(
    ("status", "words", "bounce"),
    [
        ("5.1.1", "", Bounce.HARD),
        ("5.1.10", "", Bounce.HARD),
        ("5.0.0", "550 User unknown", Bounce.HARD),
        (None, "550 No such user here", Bounce.HARD),
        ("5.0.0", "450 User unknown", Bounce.SOFT),
        ("4.1.1", "User unknown", Bounce.SOFT),
        ("5.1.1", "451 4.3.0 User unknown", Bounce.SOFT),
        ("5.1.1", "The mailbox of this user is full", Bounce.SOFT),
        ("5.1.1", "Temporary lookup failure", Bounce.SOFT),
        ("5.2.1", "The account is disabled", Bounce.SOFT),
        ("5.2.2", "", Bounce.SOFT),
        ("5.3.4", "", Bounce.SOFT),
        ("5.5.0", "550 no", Bounce.SOFT),
        ("5.9.9", "", Bounce.SOFT),
        (None, "", Bounce.SOFT),
        ("5.7.1", "550 5.1.1 User unknown", Bounce.BLOCKED),
        ("5.1.1", "550 Blocked by our policy", Bounce.BLOCKED),
        ("5.1.8", "Domain of sender address does not resolve", Bounce.BLOCKED),
        ("5.0.0", "550 Sender verify failed: no such user", Bounce.BLOCKED),
        ("5.1.1", "host relay.blocklist.example.org said: 550 5.1.1 User unknown", Bounce.HARD),
    ],
)
def test_the_class_follows_from_code_and_words(status: str | None, words: str, bounce: Bounce) -> None:
    assert classify(status, words) is bounce


def test_an_unknown_user_after_the_content_is_no_hard_bounce() -> None:
    assert classify("5.0.0", "550 User unknown", after_data=True) is Bounce.SOFT
    assert classify("5.1.1", "550 5.1.1 User unknown", after_data=True) is Bounce.HARD  # the code leaves no doubt


@pytest.mark.parametrize("words", ["5.1.1.7", "15.1.1", "host 192.5.1.1", "Exchange 5.1.2600", "8.12.3"])
def test_addresses_and_versions_are_no_status_codes(words: str) -> None:
    assert ENHANCED.findall(words) == []


def test_a_field_whose_encoding_is_damaged_keeps_its_text() -> None:
    message = Message()
    message["Subject"] = "=?utf-8?b?a?="

    assert field(message, "Subject") == "=?utf-8?b?a?="
