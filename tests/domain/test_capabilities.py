"""Tests whether a provider can send an email, within the limits that the provider declares."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.capabilities import Capabilities, Requirement
from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment

THREE_IN_ALL = {"cc": "ben@example.org", "bcc": "cleo@example.org"}
FILES = {"attachments": [Attachment("a", "a/b", bytes(300)), Attachment("b", "a/b", bytes(30))], "html": "x" * 40}
"""440 bytes of files in base64, and 40 bytes of HTML. The text of `an_email` adds 2 bytes."""


def an_email(**fields: Any) -> Email:
    plain = {"message_key": "k", "sender": "s@example.com", "to": "ann@example.org", "subject": "Hi", "text": "Hi"}
    return Email(**{**plain, **fields})


@pytest.mark.parametrize(
    ("fields", "limits", "need"),
    [
        ({}, {}, None),
        ({"template_id": "d-1", "text": None}, {}, Requirement.TEMPLATES),
        ({"template_id": "d-1", "text": None}, {"templates": True}, None),
        (THREE_IN_ALL, {"max_recipients": 3}, None),
        (THREE_IN_ALL, {"max_recipients": 2}, Requirement.RECIPIENTS),
        (FILES, {"max_octets": 482}, None),
        (FILES, {"max_octets": 481}, Requirement.OCTETS),
        ({"reply_to": "zoë@example.org"}, {}, None),
        ({"reply_to": "zoë@example.org"}, {"smtputf8": False}, Requirement.SMTPUTF8),
        ({"to": "Zoë <zoe@exämple.org>"}, {"smtputf8": False}, None),
    ],
)
def test_a_provider_can_send_an_email_within_its_limits(
    fields: dict[str, Any], limits: dict[str, Any], need: Requirement | None
) -> None:
    assert Capabilities(copies=1, **limits).unmet_requirement(an_email(**fields)) is need
