"""How long a state has lasted, by a steady clock: every look since must have found it."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable


class Lasting:
    """Remembers since which look each state has been found. A look that does not find a state ends it."""

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: How long a state must last before it counts.
        """
        self._seconds = seconds
        self._began_at: float | None = None
        self._since: dict[Hashable, float] = {}

    def note(self, states: Collection[Hashable]) -> None:
        """Takes the states that a look found."""
        now = time.monotonic()
        if self._began_at is None:
            self._began_at = now
        self._since = {state: self._since.get(state, now) for state in states}

    def forget(self) -> None:
        """Forgets everything after a missed look: a state may have ended and begun again meanwhile."""
        self._began_at = None
        self._since = {}

    def seconds(self, state: Hashable) -> float:
        """How long a state is known to have lasted."""
        since = self._since.get(state)
        return 0.0 if since is None else time.monotonic() - since

    def has_lasted(self, states: Collection[Hashable]) -> bool | None:
        """Whether one of these states has lasted long enough; None if unknown, because the first look found it."""
        found = [state for state in states if state in self._since]
        if any(self.seconds(state) >= self._seconds for state in found):
            return True
        return None if any(self._since[state] == self._began_at for state in found) else False
