"""What an email needs of a provider, up to the limit that the provider declares."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.capabilities import Capabilities, Need
from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment

THREE_IN_ALL = {"cc": "ben@example.org", "bcc": "cleo@example.org"}
FILES = {"attachments": [Attachment("a", "a/b", bytes(300)), Attachment("b", "a/b", bytes(30))], "html": "x" * 40}
"""440 octets of files in Base64, and 40 of HTML; the text has 2."""


def an_email(**fields: Any) -> Email:
    plain = {"message_key": "k", "sender": "s@example.com", "to": "ann@example.org", "subject": "Hi", "text": "Hi"}
    return Email(**{**plain, **fields})


@pytest.mark.parametrize(
    ("fields", "limits", "need"),
    [
        ({}, {}, None),
        ({"template_id": "d-1", "text": None}, {}, Need.TEMPLATES),
        ({"template_id": "d-1", "text": None}, {"templates": True}, None),
        (THREE_IN_ALL, {"max_recipients": 3}, None),
        (THREE_IN_ALL, {"max_recipients": 2}, Need.RECIPIENTS),
        (FILES, {"max_octets": 482}, None),
        (FILES, {"max_octets": 481}, Need.OCTETS),
        ({"reply_to": "zoë@example.org"}, {}, None),
        ({"reply_to": "zoë@example.org"}, {"smtputf8": False}, Need.SMTPUTF8),
        ({"to": "Zoë <zoe@exämple.org>"}, {"smtputf8": False}, None),
    ],
)
def test_a_provider_carries_an_email_up_to_its_limits(
    fields: dict[str, Any], limits: dict[str, Any], need: Need | None
) -> None:
    assert Capabilities(copies=1, **limits).lacks(an_email(**fields)) is need
