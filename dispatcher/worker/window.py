"""How much a worker may have in hand."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from dispatcher.routing.routes import Routes
from dispatcher.worker.in_flight_email import InFlightEmail, State

SCARCE_SHARE: Final = 4
"""Where less than one part of so many of the window is free, each record makes room that is about to be needed."""


class Waits(Protocol):
    """Something that waits for room."""

    def wake(self) -> None:
        """There may be room now."""


class Window:
    """The emails under lease in this worker.

    Attributes:
        emails: By id, from the lease until a commit has ended it, and we know that it has.
    """

    def __init__(self, routes: Routes, prefetch: int, waits: Waits) -> None:
        """
        Args:
            prefetch: How many emails may be under way at once.
            waits: Is woken when the window may have grown.
        """
        self.emails: dict[UUID, InFlightEmail] = {}
        self.wake = waits.wake
        self._routes = routes
        self._prefetch = prefetch

    def room(self) -> int:
        """How many more emails may be leased: none while no provider may be tried, one for a probe.

        Emails that wait for a retry take no room from others, up to as many again: the ledger has that many slots.
        """
        room = self._routes.room
        ledger_room = 2 * self._prefetch - len(self.emails)
        if room is None:
            busy = len(self.emails) - self._count(State.WAITING)
            return min(self._prefetch - busy, ledger_room)
        # What was on the wire when the provider failed may stay there until its deadline: no reason not to probe.
        return max(0, min(room - self._count(State.PREPARING) - self._count(State.STOPPED), ledger_room))

    def is_probing(self) -> bool:
        """Whether the next emails are probes of a provider that has failed."""
        return self._routes.is_probing

    def is_scarce(self) -> bool:
        """Whether emails wait for the room that a commit makes."""
        return self.room() < self._prefetch // SCARCE_SHARE

    def _count(self, state: State) -> int:
        return sum(email.state is state for email in self.emails.values())
