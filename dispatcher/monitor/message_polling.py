"""Asks a provider what became of messages, because the events that the provider sends are easily lost.

Here, a message is a row of a channel other than email, such as an SMS, and not a message of RabbitMQ. The monitor asks
about a sent message when the message reaches certain ages, until an event has reported the message's final result. It
asks about a held message in the same way, because the provider's answer may be the evidence that settles the message.
Each round makes a limited number of requests, one after another. For each database, only one host asks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Final
from uuid import UUID

from dispatcher.domain.event import OpenMessage, ProviderEvent
from dispatcher.domain.retry import Backoff
from dispatcher.errors import DispatcherError, StoreBusy
from dispatcher.events.contract import EventSink
from dispatcher.host.services import Periodic
from dispatcher.providers.contract import PollableProvider, PollRefused
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.named_locks import acquire, release_named_lock
from dispatcher.store.polling import MAX_SEEN, PolledRow, find_held_message, find_polled
from dispatcher.telemetry.log import get_log

INTERVAL_SECONDS: Final = 60.0
NEXT_BATCH_SECONDS: Final = 1.0
"""The wait before the next round if the last round left out messages."""
AGES_SECONDS: Final = (600.0, 3600.0, 6 * 3600.0, 23 * 3600.0, 24 * 3600.0)
"""The monitor asks about a message when the message reaches each of these ages except the last. From the last age on,
the monitor no longer asks. A monitor that has just started, or replaces another host, asks once about each
message without a final result."""
MAX_REQUESTS: Final = 25
"""The most requests per round and age."""
MOST_WAIT_SECONDS: Final = 3600.0
IDLE_SECONDS: Final = 900.0
"""PostgreSQL ends a session that is idle for longer than this. Another host then asks the provider."""


class MessagePolling:
    """Asks one provider, at intervals, what became of sent and held messages. Of the monitors of one database that have
    this provider configured, only one asks."""

    interval_seconds = INTERVAL_SECONDS

    def __init__(self, database_url: str, provider: PollableProvider, sink: EventSink) -> None:
        self._database_url = database_url
        self._provider = provider
        self._sink = sink
        self._session: AsyncSession | None = None
        self._lock_name = f"polling {provider.name}"
        self._cursors: dict[float, datetime] = {}
        self._refused_id: UUID | None = None
        self._backoff = Backoff(base_seconds=INTERVAL_SECONDS, cap_seconds=MOST_WAIT_SECONDS)

    async def run(self) -> None:
        try:
            await Periodic(self).run()
        finally:
            await self.close()
            await self._provider.close()

    async def close(self) -> None:
        """Releases the lock and closes the database session, so that another host can ask the provider. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(DispatcherError):  # otherwise, the lock ends with the session
                await release_named_lock(session, self._lock_name)
            await session.close()

    async def run_once(self) -> float | None:
        """Asks about the messages whose age has reached one of AGES_SECONDS, unless another host does so. If PostgreSQL
        becomes unreachable, some events may not be stored: a later round asks about their messages again."""
        try:
            session = await self._leading()
            if session is None:
                return None
            has_more = [await self._ask_all(session, *ages) for ages in pairwise(AGES_SECONDS)]
        except PollRefused as error:
            # Log the first refusal of an outage, and let another host ask: its network may be better.
            is_first = not self._backoff.failures
            wait = self._backoff.next_wait(lambda: 0.5 + random.random() / 2)  # noqa: S311
            seconds = min(max(wait, error.retry_after or 0.0), MOST_WAIT_SECONDS)
            if is_first:
                fields = {"provider": self._provider.name, "reason": error.message, "retry_in_seconds": seconds}
                get_log().warning("events.source_unavailable", **fields)
            await self.close()
            return seconds
        except BaseException:
            await self.close()
            raise
        self._backoff.reset()
        return NEXT_BATCH_SECONDS if any(has_more) else None

    async def _leading(self) -> AsyncSession | None:
        """The session that holds the lock for asking this provider; None while another host holds the lock."""
        if self._session is None:
            name = f"dispatcher {self._lock_name}"
            session = await connect_async(self._database_url, name=name, idle_seconds=IDLE_SECONDS)
            try:
                if await acquire(session, self._lock_name):
                    self._session = session
            finally:
                if self._session is None:
                    await session.close()
        return self._session

    async def _ask_all(self, session: AsyncSession, age: float, next_age: float) -> bool:
        """Asks about messages between these ages in seconds. Returns whether the next round must ask about more of
        them."""
        name, after = self._provider.name, self._cursors.get(age)
        rows = await find_polled(session, name, after=after, youngest_seconds=age, oldest_seconds=next_age)
        requests = accumulate(row.is_open for row in rows)  # only a row that `is_open` needs one
        asked = [row for row, count in zip(rows, requests, strict=True) if count <= MAX_REQUESTS]
        events, last, refusal = await self._ask(session, asked)
        if events:
            # StoreBusy: another transaction has locked an email, so the event about this email was not stored. When the
            # message reaches the next age, the monitor asks the provider about the message again.
            with suppress(StoreBusy):
                await self._sink.store(events)
        if last is not None:
            self._cursors[age] = last
        if refusal is not None:
            raise refusal
        return len(asked) < len(rows) or len(rows) == MAX_SEEN

    async def _ask(
        self, session: AsyncSession, rows: Iterable[PolledRow]
    ) -> tuple[list[ProviderEvent], datetime | None, PollRefused | None]:
        """Asks until the provider refuses. Returns the events; the `since` of the row after which the next round
        continues (None for the same rows again); and the refusal."""
        events: list[ProviderEvent] = []
        last: datetime | None = None
        for row in rows:
            try:
                event = await self._event_of(session, row) if row.is_open else None
            except PollRefused as error:
                # If the provider refuses to answer about the same message twice in a row, skip the message, so that the
                # other messages need not wait.
                is_repeated = row.email_id == self._refused_id and not error.is_about_all
                self._refused_id = row.email_id
                return events, row.since if is_repeated else last, error
            if event is not None:
                events.append(event)
            last = row.since
        return events, last, None

    async def _event_of(self, session: AsyncSession, row: PolledRow) -> ProviderEvent | None:
        message_id = None if row.is_held else row.message_id
        traits = await find_held_message(session, row.email_id) if row.is_held else None
        if message_id is None and traits is None:
            return None
        return await self._provider.find_event(OpenMessage(row.email_id, message_id, traits))
