"""The prefetch window: how many emails a worker may lease at the same time."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from dispatcher.host.clock import steady_clock
from dispatcher.routing.routes import Routes
from dispatcher.worker.in_flight_email import EmailState, InFlightEmail

SCARCE_SHARE: Final = 4
"""If less than a quarter (1 / SCARCE_SHARE) of the window is free, the record stage does not wait for a full batch, so
that emails leave the window sooner. But if a quarter of a large window waits to be sent, no further lease is urgent:
leases then wait until a quarter is free (at most LEASE_WAIT_SECONDS), and the record stage waits for full batches."""
LEASE_WAIT_SECONDS: Final = 0.2
"""With a slow server, a quarter of the window takes minutes to become free. Emails of other lanes must not wait so
long for their turn."""
LARGE_PREFETCH: Final = 64
"""In a smaller window, a quarter is too few emails to wait for."""
URGENT_SHARE: Final = 8
"""In addition to the window, the most urgent lane may use an eighth (1 / URGENT_SHARE) of the window's size. Other
lanes cannot fill this part."""


class Wakeable(Protocol):
    """A queue whose items wait until more emails may be leased."""

    def wake(self) -> None: ...


class Window:
    """The emails under lease in this worker, each from its lease until the commit that ends the lease. `is_held`: no
    email may be leased, because operators paused every lane, or the controls are not read yet."""

    def __init__(self, routes: Routes, prefetch: int, waiting: Wakeable) -> None:
        self.emails: dict[UUID, InFlightEmail] = {}
        self.is_held = False
        self.wake = waiting.wake
        self._routes = routes
        self._prefetch = prefetch
        self._lease_by = steady_clock() + LEASE_WAIT_SECONDS

    def room(self) -> int:
        """How many more emails may be leased: 1 for a probe; 0 while no provider may be tried, every lane is paused, or
        so many emails wait to be sent that a lease now would only make smaller batches.

        Emails that wait for a retry do not count, but the ledger has slots for only two windows.
        """
        if self.is_held:
            return 0
        room = self._routes.room
        ledger_room = 2 * self._prefetch - len(self.emails)
        if room is None:
            busy = len(self.emails) - self._count(EmailState.WAITING)
            free = min(self._prefetch - busy, ledger_room)
            now = steady_clock()
            if now < self._lease_by and free < self._prefetch // SCARCE_SHARE and self._has_backlog():
                return 0
            self._lease_by = now + LEASE_WAIT_SECONDS
            return free
        # Do not count emails on the wire. If the provider has failed, their answers may not arrive before the deadline,
        # and a probe need not wait so long.
        return max(0, min(room - self._count(EmailState.PREPARING) - self._count(EmailState.STOPPED), ledger_room))

    def urgent_room(self) -> int:
        """Like `room`, for the most urgent lane: more, except while a provider is probed."""
        if self.is_held or self._routes.room is not None:
            return self.room()
        busy = len(self.emails) - self._count(EmailState.WAITING)
        return min(self._prefetch + self._prefetch // URGENT_SHARE - busy, 2 * self._prefetch - len(self.emails))

    @property
    def may_wait(self) -> bool:
        """Whether one more email may wait for a retry. The ledger keeps slots for all other emails, so that thousands
        of deferred emails do not stop the worker."""
        return self._count(EmailState.WAITING) < self._prefetch - self._prefetch // URGENT_SHARE

    def is_probing(self) -> bool:
        """Whether the next email probes a provider that has failed."""
        return self._routes.is_probing

    def is_scarce(self) -> bool:
        """Whether less than a quarter of the window is free, so that results must be committed soon."""
        return not self._has_backlog() and self.room() < self._prefetch // SCARCE_SHARE

    def _has_backlog(self) -> bool:
        """Whether a quarter of a large window waits to be sent, mostly for a connection."""
        is_large = self._prefetch >= LARGE_PREFETCH
        return is_large and self._count(EmailState.PREPARING) >= self._prefetch // SCARCE_SHARE

    def _count(self, state: EmailState) -> int:
        return sum(email.state is state for email in self.emails.values())
