"""Attempts whose reports call what a test gives."""

from __future__ import annotations

from collections.abc import Callable

from dispatcher.providers.contract import Attempt


class FakeAttempt(Attempt):
    """Calls these functions where an adapter reports something.

    Attributes:
        admission: Returns the new deadline; None keeps the deadline.
    """

    def __init__(
        self,
        number: int,
        deadline: float,
        leaving: Callable[[], None],
        *,
        came_back: Callable[[], None] = lambda: None,
        admission: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(number, deadline)
        self._leaving = leaving
        self._came_back = came_back
        self.admission = admission

    def leaving(self) -> None:
        """See the contract."""
        self._leaving()

    def came_back(self) -> None:
        """See the contract."""
        self._came_back()

    def admitted(self) -> None:
        """See the contract."""
        if self.admission is not None:
            self.deadline = self.admission()
