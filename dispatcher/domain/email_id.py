"""Email ids: UUIDv7 (RFC 9562). An id contains its email's creation time, so a time range is an id range.

The 12 bits after the millisecond contain the fraction of the millisecond (RFC 9562, section 6.2, method 3). If a new id
would not be greater than the previous id, the time in the new id is increased. So the ids of one process ascend, unless
the clock is set back by a second or more. The last 62 bits are random. The kernel provides them at each call, so forked
processes never produce the same id.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from secrets import token_bytes
from typing import Final
from uuid import UUID

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_LATEST_MILLISECOND: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
_VERSION_AND_VARIANT: Final = 7 << 76 | 2 << 62
_TICKS_PER_MILLISECOND: Final = 4096
_NOISE: Final = (1 << 62) - 1
_FORGIVEN_TICKS: Final = 1000 * _TICKS_PER_MILLISECOND
"""One second. If the clock is set back by less, ids still ascend. If the clock is set back by more, new ids follow the
clock."""


class Ticks:
    """Counts time in ticks: 4096ths of a millisecond since 1970. `next` returns a tick twice only if the clock is
    set back, or if two threads call it at the same time. The random bits then make the two ids different."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest = 0

    def next(self, nanoseconds: int) -> int:
        """The tick of an instant, or the tick after the last returned tick, whichever is later. If the clock was set
        back by a second or more, always the tick of the instant."""
        now = nanoseconds * _TICKS_PER_MILLISECOND // 1_000_000
        if now <= self._latest < now + _FORGIVEN_TICKS:
            now = self._latest + 1
        self._latest = now
        return now


_ticks: Final = Ticks()


def new_email_id() -> UUID:
    """A new unique id, greater than all earlier ids of this process unless the clock is set back a second or more."""
    return new_email_ids(1)[0]


def new_email_ids(count: int) -> list[UUID]:
    """New unique ids, ascending. Reads random bytes for all ids from the kernel in one call."""
    now = time.time_ns()
    ids = []
    for noise in memoryview(token_bytes(8 * count)).cast("Q"):
        millisecond, fraction = divmod(_ticks.next(now), _TICKS_PER_MILLISECOND)
        ids.append(UUID(int=millisecond << 80 | fraction << 64 | _VERSION_AND_VARIANT | noise & _NOISE))
    return ids


def time_of(email_id: UUID) -> datetime:
    """The creation time of an id, in UTC, to the millisecond. Raises ValueError if the id is not a UUIDv7, or its time
    is after the year 9999."""
    millisecond = email_id.int >> 80
    if email_id.version != 7 or millisecond > _LATEST_MILLISECOND:
        raise ValueError("is not an email id")
    return _EPOCH + millisecond * _MILLISECOND


def lowest_id_at(instant: datetime) -> UUID:
    """The smallest id that contains the instant's millisecond. Such ids are the bounds of partitions and time ranges.
    Raises ValueError if the instant has no time zone, or is before 1970."""
    if instant.tzinfo is None:
        raise ValueError("the instant has no time zone")
    millisecond = (instant - _EPOCH) // _MILLISECOND
    if millisecond < 0:
        raise ValueError("the instant is before 1970")
    return UUID(int=millisecond << 80 | _VERSION_AND_VARIANT)
