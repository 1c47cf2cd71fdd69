"""Settles emails whose acceptance an event proved while a worker had leased them."""

from __future__ import annotations

from typing import Final

from dispatcher.events.intake import report_settled
from dispatcher.store.outbox import Outbox

POLL_SECONDS: Final = 1.0
BATCH: Final = 500
"""The most emails per round. The number is limited, because the relay cannot publish during a round."""


class ProvenEmails:
    """Settles the emails that `EventIntake` could not settle. A service of the leading relay.

    `EventIntake` leaves an email to this service if a worker has leased the email, or if the process of `EventIntake`
    exits before the email is settled.
    """

    interval_seconds = POLL_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> None:
        """Settles a batch of emails whose acceptance an event has proven and that are no longer leased."""
        report_settled(await self._outbox.settle_proven(BATCH))
