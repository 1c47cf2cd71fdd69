"""Limits the resources, such as memory, that all requests in progress use in total.

One caller gets at most half of each resource, or enough for one request of the largest size.
"""

from __future__ import annotations

from dispatcher.api.problems import Problem


class FairLimiter:
    """A counted resource that several callers share, such as request slots or bytes of memory.

    Attributes:
        max_per_caller: The most that one caller may have at the same time.
    """

    def __init__(self, max_total: int, *, max_request: int = 1) -> None:
        """
        Args:
            max_request: The most that a single request may need. A caller without other requests gets this amount even
                if it is more than half of the total.
        """
        self._max_total = max(max_total, max_request)
        self.max_per_caller = max(max_total // 2, max_request)
        self._total = 0
        self._acquired: dict[str, int] = {}

    def acquire(self, name: str, amount: int = 1) -> None:
        """Acquires an amount for the caller with this name.

        Raises:
            Problem: `overloaded`; nothing was acquired.
        """
        acquired = self._acquired.get(name, 0) + amount
        # Each `Problem` below closes the connection, because a part of the request's body may be unread.
        if acquired > self.max_per_caller:
            detail = (
                "This caller has too many requests or too much data in progress. Send fewer requests in parallel, or "
                "retry later."
            )
            raise Problem("overloaded", detail, retry_after=1, closes=True)
        if self._total + amount > self._max_total:
            raise Problem("overloaded", "Retry the request.", retry_after=1, closes=True)
        self._acquired[name] = acquired
        self._total += amount

    def release(self, name: str, amount: int = 1) -> None:
        """Releases an amount that `acquire` has acquired."""
        self._total -= amount
        remaining = self._acquired[name] - amount
        if remaining:
            self._acquired[name] = remaining
        else:
            del self._acquired[name]
