"""Replaces processes one after the other, without a dip.

    a worker         its successor is started in a slot of its own; once it is up, the predecessor drains; once that
                     has ended, the next one's turn has come. A successor that cannot boot is tried again and again,
                     and its predecessor works on.
    relay, monitor   end first, and are started again at once: there must never be two (the relay is elected, so that
                     the second could only wait; the monitor's address can be bound once). They come last.

Who is to be replaced needs no list: those that were forked before the last reload, and those that ask for it. Several
reloads at once are therefore one.
"""

from __future__ import annotations

from dispatcher.supervisor.crew import Crew
from dispatcher.supervisor.supervised import Ending, Process
from dispatcher.telemetry.log import get_log


class Replacing:
    """The replacement under way, if any."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._old: Process | None = None
        self._new: Process | None = None
        self._reason = Ending.RELOADED
        self._reloading = False
        self._log = get_log()

    @property
    def is_under_way(self) -> bool:
        """Whether somebody is being replaced; then `step` is to be called often."""
        return self._old is not None

    @property
    def surplus(self) -> int:
        """How many processes there are beyond those that should be."""
        return int(self._new is not None and self._old is not None and self._old.ending is None)

    def begin_reload(self) -> None:
        """The crew has adopted new roles: everybody who runs is of an older generation."""
        self._reloading = True

    def concerns(self, process: Process) -> bool:
        """Whether it is being replaced, or replaces somebody."""
        return process in (self._old, self._new)

    def step(self) -> None:
        """Does what can be done now."""
        if self._old is not None and self._is_replaced(self._old):
            self._old = self._new = None
        if self._old is None:
            self._begin_next()
        elif self._new is not None and self._new.process_slot.is_up and self._old.ending is None:
            self._crew.ask(self._old, self._reason)

    def _is_replaced(self, old: Process) -> bool:
        if self._new is not None:
            return old not in self._crew.processes
        # It has the same place: its end set it free to be started again.
        return old.ending is None

    def _begin_next(self) -> None:
        for process in sorted(self._crew.processes, key=lambda process: process.role.stops_last):
            if reason := self._reason_to_replace(process):
                self._begin(process, reason)
                return
        if self._reloading:
            self._reloading = False
            self._log.info("dispatcher.reloaded")

    def _begin(self, old: Process, reason: Ending) -> None:
        self._old, self._reason = old, reason
        if old.role.count is None:
            self._crew.ask(old, reason)
        else:
            self._new = self._crew.add(old.role.name)

    def _reason_to_replace(self, process: Process) -> Ending | None:
        if process.pid is None or process.ending is not None:
            # Who waits to be started will be of the new generation anyway.
            return None
        if process.generation < self._crew.generation:
            return Ending.RELOADED
        return Ending.RECYCLED if process.process_slot.wants_successor and process.role.count is not None else None
