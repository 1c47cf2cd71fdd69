"""Sends templated emails at the same moment, and records the outcome and the adapter's reports for each email."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Provider
from tests.providers.attempts import FakeAttempt
from tests.providers.emails import PATIENCE_SECONDS, an_email


def templated(number: int, **changes: Any) -> OutgoingEmail:
    """An email to a separate recipient, with the template that all tests use."""
    usual = {"to": (f"customer-{number}@example.com",), "template_id": "d-1", "template_data": {"order": f"A{number}"}}
    return an_email(**{"subject": "", "text": None, **usual, **changes})


@dataclass
class BulkSend:
    """An email, its attempt, and how often the adapter marked it on the wire (`left`), and as not sent (`back`)."""

    email: OutgoingEmail
    left: int = 0
    back: int = 0
    refusal: Exception | None = None
    outcome: Outcome | ProviderFault | None = None
    attempt: FakeAttempt = field(init=False)
    task: asyncio.Task[None] | None = None

    @property
    def is_on_the_wire(self) -> bool:
        return self.left > self.back

    def leave(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert not self.is_on_the_wire, "`mark_on_wire` was called twice"
        self.left += 1

    def come_back(self) -> None:
        assert self.is_on_the_wire, "`mark_not_sent` was called before `mark_on_wire`"
        self.back += 1

    async def send(self, provider: Provider, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        self.attempt = FakeAttempt(1, deadline, self.leave, mark_not_sent=self.come_back)
        try:
            self.outcome = await provider.send(self.email, self.attempt)
        except ProviderFault as fault:
            self.outcome = fault


async def send_all(
    provider: Provider, emails: Iterable[OutgoingEmail], *, seconds: float = PATIENCE_SECONDS
) -> list[BulkSend]:
    """Sends all emails at the same moment; returns when each email has an outcome."""
    sends = [BulkSend(email) for email in emails]
    await start_all(provider, sends, seconds=seconds)
    return sends


async def start_all(provider: Provider, sends: list[BulkSend], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Like `send_all`, with prepared sends."""
    for each in sends:
        each.task = asyncio.create_task(each.send(provider, seconds))
    await asyncio.gather(*(each.task for each in sends if each.task), return_exceptions=True)
