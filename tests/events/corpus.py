"""Messages that servers return to the envelope sender, each with the right events.

They are written for these tests, after what well-known mail servers send. A file in `bounces/` begins with what its
messages share. After each line `=== name: events` are the parts of one message, which replace `{0}`, `{1}` and so on.
A line `---` is between two parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.domain.bounce_address import BounceAddress

EMAIL_ID: Final = UUID("0193581f-6c00-7abc-8def-0123456789ab")
ADDRESS: Final = BounceAddress("bounces@example.com", [b"0123456789abcdef0123456789abcdef"])
BOB: Final = "bob@example.org"
HEAD: Final = """Return-Path: <>
Delivered-To: {to}
Date: Mon, 23 Nov 2026 10:00:00 +0000"""
EMAIL: Final = """Return-Path: <{to}>
From: shop@example.com
To: ann@example.org
Subject: Receipt
Date: Mon, 23 Nov 2026 09:59:00 +0000
Message-ID: <0193581f-6c00-7abc-8def-0123456789ab@example.com>

Thank you for your order."""


def _messages() -> Iterator[tuple[str, str, bytes]]:
    for path in sorted((Path(__file__).parent / "bounces").iterdir()):
        frame, *cases = path.read_text(encoding="utf-8").removesuffix("\n").split("\n=== ")
        for case in cases:
            title, _, parts = case.partition("\n")
            name, _, words = title.partition(": ")
            message = f"{frame}\n"
            for number, part in enumerate(parts.split("\n---\n")):
                message = message.replace(f"{{{number}}}", part)
            for shared, text in (("{head}", HEAD), ("{email}", EMAIL), ("{to}", ADDRESS.of(EMAIL_ID))):
                message = message.replace(shared, text)
            yield name, words, message.encode()


_MESSAGES: Final = list(_messages())
OCTETS: Final = {name: octets for name, _, octets in _MESSAGES}
EVENTS: Final = {name: words for name, words, _ in _MESSAGES}
"""`soft -`: the event names no recipient. The alias behind `postfix-forwarded` exists; `postfix-refused-content` says
`unknown user` after the server had accepted the user; the email was not sent to the recipient that `unknown-recipient`
names."""
