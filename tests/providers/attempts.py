"""Provides an attempt that passes the adapter's reports to functions of a test."""

from __future__ import annotations

from collections.abc import Callable

from dispatcher.providers.contract import Attempt


class FakeAttempt(Attempt):
    """Calls a test's functions when the adapter reports its progress. `admission` returns the new deadline."""

    def __init__(
        self,
        number: int,
        deadline: float,
        mark_on_wire: Callable[[], object],
        *,
        mark_not_sent: Callable[[], object] = lambda: None,
        admission: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(number, deadline)
        self._mark_on_wire = mark_on_wire
        self._mark_not_sent = mark_not_sent
        self.admission = admission

    def mark_on_wire(self) -> None:
        self._mark_on_wire()

    def mark_not_sent(self) -> None:
        self._mark_not_sent()

    def connection_acquired(self) -> None:
        if self.admission is not None:
            self.deadline = self.admission()
