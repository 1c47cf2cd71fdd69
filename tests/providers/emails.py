"""Emails and attempts for tests."""

from __future__ import annotations

import asyncio
import email.message
import email.parser
import email.policy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt, Provider

PATIENCE_SECONDS = 20.0
"""A deadline that is not the test's subject."""
SOON_SECONDS = 0.3
"""A deadline that is."""


def an_email(**changes: Any) -> OutgoingEmail:
    """An email like most, with changes."""
    plain: dict[str, Any] = {
        "email_id": new_email_id(),
        "created_at": datetime(2026, 11, 21, 7, 30, tzinfo=UTC),
        "sender": "Shop <shop@example.org>",
        "to": ("ann@example.com",),
        "subject": "Your order",
        "text": "Thank you.\n",
    }
    return OutgoingEmail(**{**plain, **changes})


@dataclass
class Sending:
    """What came of one attempt.

    Attributes:
        left: How often the adapter said that the email leaves.
        outcome: What it returned.
    """

    left: int = 0
    outcome: Outcome | None = None
    left_at: list[float] = field(default_factory=list)

    def leaving(self) -> None:
        """To be given to the attempt."""
        self.left += 1


async def send(provider: Provider, outgoing: OutgoingEmail, *, seconds: float = PATIENCE_SECONDS) -> Sending:
    """One attempt, and that it ended in time."""
    loop = asyncio.get_running_loop()
    sending = Sending()
    deadline = loop.time() + seconds
    sending.outcome = await provider.send(outgoing, Attempt(1, deadline, sending.leaving))
    assert loop.time() < deadline + 1, "the adapter came back long after the deadline"
    assert sending.left <= 1, "the adapter told twice that the email leaves"
    return sending


def parsed(content: bytes) -> email.message.EmailMessage:
    """A second opinion on what we rendered."""
    message = email.parser.BytesParser(policy=email.policy.default).parsebytes(content)
    assert isinstance(message, email.message.EmailMessage)
    return message
