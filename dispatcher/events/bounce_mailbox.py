"""Reads the mailbox to which servers return bounces, and stores the events that the bounces report."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from dispatcher.domain.bounce_address import BounceAddress
from dispatcher.domain.event import ProviderEvent
from dispatcher.events.bounce_parser import events_of
from dispatcher.events.contract import BOUNCE_PROVIDER
from dispatcher.events.intake import EmailsLocked, EventIntake
from dispatcher.events.maildir import Maildir, NewMessage
from dispatcher.store.connections import Pool
from dispatcher.store.recipients import find_recipients
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

INTERVAL_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 60.0
"""The wait before the next round if the Maildir cannot be read or changed."""
MAX_MESSAGES: Final = 50
"""The most messages per round. This and `maildir.MAX_OCTETS` limit the memory that a round needs."""
_END_OF_HEADER: Final = re.compile(rb"\r?\n\r?\n")


class BounceMailbox:
    """Stores the events of the bounces in this host's mailbox, and deletes the bounces. A service of each monitor.

    A bounce is deleted only after its events are committed. If the process exits after the commit and before the
    deletion, the bounce is read again, and its events are ignored as duplicates.
    """

    interval_seconds = INTERVAL_SECONDS

    def __init__(self, maildir: Maildir, address: BounceAddress, pool: Pool, intake: EventIntake) -> None:
        self._maildir = maildir
        self._address = address
        self._pool = pool
        self._intake = intake
        self._is_failing = False

    async def run_once(self) -> float | None:
        """Reads up to MAX_MESSAGES messages. Returns the seconds until the next round; None for the usual interval."""
        try:
            count, waiting = await self._round()
        except OSError as error:
            if not self._is_failing:
                get_log().warning(
                    "bounces.unavailable",
                    folder=str(self._maildir.folder),
                    reason=error.strerror,
                    retry_in_seconds=RETRY_SECONDS,
                )
            self._is_failing = True
            return RETRY_SECONDS
        self._is_failing = False
        return 0.0 if count == MAX_MESSAGES and waiting < count else None

    async def _round(self) -> tuple[int, int]:
        """Handles one batch of messages. Returns their number, and how many stay, because their rows are locked."""
        messages = await asyncio.to_thread(self._maildir.read_new, MAX_MESSAGES)
        if not messages:
            return 0, 0
        ids = await asyncio.to_thread(lambda: {each.name: self._email_id_in(each) for each in messages})
        ours = [each for each in messages if ids[each.name] and each.octets]
        recipients = await find_recipients(self._pool, {found for found in ids.values() if found}) if ours else {}
        reported = await asyncio.to_thread(_events_by_name, ours, ids, recipients)
        locked: Collection[UUID] = ()
        try:
            await self._intake.store([event for events in reported.values() for event in events])
        except EmailsLocked as error:
            locked = error.email_ids
        stored = [name for name, events in reported.items() if events and events[0].email_id not in locked]
        unreadable = [name for name, events in reported.items() if not events]
        unreadable += [each.name for each in messages if each.octets is None]
        forged = [each.name for each in messages if each.octets is not None and not ids[each.name]]
        await asyncio.to_thread(_each, self._maildir.put_away, stored)
        await asyncio.to_thread(_each, self._maildir.set_aside, [*forged, *unreadable])
        metrics.EVENTS.add(len(forged), BOUNCE_PROVIDER, "unknown", "forged", "unknown")
        metrics.EVENTS.add(len(unreadable), BOUNCE_PROVIDER, "unknown", "malformed", "unknown")
        waiting = len(messages) - len(stored) - len(forged) - len(unreadable)
        get_log().info(
            "bounces.read", stored=len(stored), waiting=waiting, forged=len(forged), unreadable=len(unreadable)
        )
        return len(messages), waiting

    def _email_id_in(self, message: NewMessage) -> UUID | None:
        """The email's id by the token in its envelope sender (see `BounceAddress`); None without a valid token."""
        # The token is usually in the message's header. In a feedback report, it is in a quoted part, so the whole
        # message is searched, too.
        octets = message.octets or b""
        header = _END_OF_HEADER.split(octets, maxsplit=1)[0]
        return self._address.find(header.decode("latin-1")) or self._address.find(octets.decode("latin-1"))


def _events_by_name(
    messages: Iterable[NewMessage], ids: Mapping[str, UUID | None], recipients: Mapping[UUID, Sequence[str]]
) -> dict[str, list[ProviderEvent]]:
    """The events of each message; no events if the message cannot be parsed."""
    reported = {}
    for message in messages:
        email_id = ids[message.name]
        assert email_id is not None
        known = recipients.get(email_id, ())
        try:
            reported[message.name] = events_of(message.octets or b"", email_id, known, message.received_at)
        except Exception:  # noqa: BLE001 - the standard library's parser may raise anything, and one message must not stop the others
            reported[message.name] = []
    return reported


def _each(dispose: Callable[[str], None], names: Iterable[str]) -> None:
    """Calls `dispose` with the name of each message, even if a call fails. Then raises the last error, if any."""
    failed: OSError | None = None
    for name in names:
        try:
            dispose(name)
        except OSError as error:
            failed = error
    if failed:
        raise failed
