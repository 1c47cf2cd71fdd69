"""Templated emails that ask for a call at the same moment, and what becomes of each."""

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
    """One of many of the same template."""
    usual = {"to": (f"customer-{number}@example.com",), "template_id": "d-1", "template_data": {"order": f"A{number}"}}
    return an_email(**{"subject": "", "text": None, **usual, **changes})


@dataclass
class Traveller:
    """An email with an attempt, and the balance of what it was told.

    Attributes:
        left: How often it was said to leave.
        back: How often it was said to have come back.
        refusal: Raised when it is to leave.
    """

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
        assert not self.is_on_the_wire, "it leaves twice"
        self.left += 1

    def come_back(self) -> None:
        assert self.is_on_the_wire, "it comes back from nowhere"
        self.back += 1

    async def travel(self, provider: Provider, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        self.attempt = FakeAttempt(1, deadline, self.leave, came_back=self.come_back)
        try:
            self.outcome = await provider.send(self.email, self.attempt)
        except ProviderFault as fault:
            self.outcome = fault


async def travel(
    provider: Provider, emails: Iterable[OutgoingEmail], *, seconds: float = PATIENCE_SECONDS
) -> list[Traveller]:
    """Sends all of them at the same moment, and returns when each has its outcome."""
    travellers = [Traveller(email) for email in emails]
    await set_out(provider, travellers, seconds=seconds)
    return travellers


async def set_out(provider: Provider, travellers: list[Traveller], *, seconds: float = PATIENCE_SECONDS) -> None:
    """The same, of those that are there."""
    for each in travellers:
        each.task = asyncio.create_task(each.travel(provider, seconds))
    await asyncio.gather(*(each.task for each in travellers if each.task), return_exceptions=True)
