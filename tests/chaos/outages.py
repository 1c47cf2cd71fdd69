"""Causes server outages during a storm. Each outage ends at a planned time, while the storm continues."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tests.acceptance.outages import RABBITMQ, StoppableServers

USUAL_WATERMARK: Final = "0.4"


@dataclass(slots=True)
class _Absence:
    pid: int
    back_at: float
    is_launched: bool = False


class Outages:
    """The servers that are down, and when each server restarts. The storm may stop only the `stoppable` ones."""

    def __init__(self, ground: StoppableServers, stoppable: Collection[str]) -> None:
        self.stoppable = frozenset(stoppable)
        self._ground = ground
        self._absences: dict[str, _Absence] = {}
        self._alarm_until: float | None = None
        self._control: subprocess.Popen[bytes] | None = None

    def is_away(self, name: str) -> bool:
        return name in self._absences

    @property
    def is_alarmed(self) -> bool:
        return self._alarm_until is not None or self._control is not None

    @property
    def is_over(self) -> bool:
        return not self._absences and not self.is_alarmed

    def stop(self, name: str, number: signal.Signals, seconds: float) -> None:
        if name == RABBITMQ:
            self._alarm_until = None  # a restart clears the alarm
        self._absences[name] = _Absence(self._ground.send(name, number), time.monotonic() + seconds)

    def raise_alarm(self, seconds: float) -> None:
        self._alarm_until = time.monotonic() + seconds
        self._control = self._ground.set_watermark("0")

    def step(self) -> None:
        for name, absence in list(self._absences.items()):
            if absence.is_launched:
                if self._ground.answers(name):
                    del self._absences[name]
                else:
                    # A server may refuse to start while processes of the killed server still use the shared memory or
                    # the name.
                    self._launch(name)
            elif time.monotonic() >= absence.back_at:
                absence.is_launched = self._ground.is_replaced(name, absence.pid) or self._launch(name)
        self._end_alarm()

    def _launch(self, name: str) -> bool:
        if not self._ground.has_ended(name):
            return False
        self._ground.launch(name)
        return True

    def heal(self) -> None:
        for absence in self._absences.values():
            absence.back_at = 0.0
        if self._alarm_until is not None:
            self._alarm_until = 0.0

    def _end_alarm(self) -> None:
        if self._control is not None and (code := self._control.poll()) is not None:
            self._control = None
            if code and self._alarm_until is None:
                self._alarm_until = 0.0  # the alarm could not be cleared, so try again
        if self._control is None and self._alarm_until is not None and time.monotonic() >= self._alarm_until:
            self._alarm_until = None
            self._control = self._ground.set_watermark(USUAL_WATERMARK)
