"""The relay begins to poll in a round that finds nothing to do. Only the outbox and the queues are scripted."""

from __future__ import annotations

import math
from itertools import cycle
from types import SimpleNamespace
from typing import Any

from dispatcher.host.services import Periodic
from dispatcher.relay.notifications import BUSY_SAMPLES, Notifications
from dispatcher.relay.publish_loop import PublishLoop


class BusyOutbox:
    """A notification ends the wait of each idle round, and the commits of the database wait for each other."""

    commit_seconds = 0.0

    def __init__(self) -> None:
        self.polling: list[bool] = []
        self._counts = cycle((0, 1, 0))

    async def find_next_due(self) -> float:
        return math.inf

    async def wait(self, seconds: float) -> int:
        return next(self._counts) if seconds > 0 else 0

    async def is_notifying_delayed(self) -> bool:
        return True

    async def set_polling(self, *, is_on: bool) -> None:
        self.polling.append(is_on)


async def test_a_relay_that_begins_to_poll_in_an_idle_round_goes_on() -> None:
    outbox: Any = BusyOutbox()
    notifications = Notifications(outbox)
    service = Periodic(notifications)
    loop = PublishLoop.__new__(PublishLoop)
    pointers = SimpleNamespace(wait_seconds=math.inf, has_unconfirmed=False, has_backlog=False)

    async def publish_one(_: Any, *, is_last: bool) -> int:
        return 1  # RabbitMQ confirms it at once

    async def publish_none(_: Any, *, is_last: bool) -> bool:
        return False

    pointers.publish_due = publish_one
    vars(loop).update(
        _is_stopping=False,
        _is_notified=False,
        _is_idle=False,
        _look_at=0.0,
        _pointers=pointers,
        _dead_letters=SimpleNamespace(publish_due=publish_none),
        _publisher=SimpleNamespace(has_unanswered=False),
        _dlq=SimpleNamespace(is_open=True),
        _queues={},
        _process_slot=SimpleNamespace(confirm=SimpleNamespace(end=lambda: None)),
    )

    for number in range(6 * BUSY_SAMPLES):
        service._due_at = 0.0 if number % 3 == 1 else math.inf  # due in each idle round
        await loop._publish_round(outbox, [service], [], notifications)

    assert outbox.polling == [True]
