"""Bounds on what a process holds at once. One caller gets at most half, so that it cannot stop the others."""

from __future__ import annotations

from dispatcher.api.problems import Problem


class Shares:
    """A bounded supply, such as requests or octets.

    Attributes:
        most_each: What one caller may have at once.
    """

    def __init__(self, most: int, *, largest: int = 1) -> None:
        """
        Args:
            largest: What one request may need: a caller who has nothing yet gets it, even if it is more than half.
        """
        self._most = max(most, largest)
        self.most_each = max(most // 2, largest)
        self._together = 0
        self._taken: dict[str, int] = {}

    def take(self, name: str, amount: int = 1) -> None:
        """Takes so much for a caller of this name.

        Raises:
            Problem: `overloaded`; nothing was taken.
        """
        taken = self._taken.get(name, 0) + amount
        if taken > self.most_each:
            # A part of the body may be unread.
            raise Problem("overloaded", "This caller has too much under way.", retry_after=1, closes=True)
        if self._together + amount > self._most:
            raise Problem("overloaded", retry_after=1, closes=True)
        self._taken[name] = taken
        self._together += amount

    def give_back(self, name: str, amount: int = 1) -> None:
        """Returns what was taken."""
        self._together -= amount
        left = self._taken[name] - amount
        if left:
            self._taken[name] = left
        else:
            del self._taken[name]
