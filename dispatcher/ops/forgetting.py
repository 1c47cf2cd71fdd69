"""Erases a recipient: content, events, providers' texts and, on request, suppressions. Keeps the emails' rows.

every email with content ─▶ its recipients ─┐
events with the address's hash ─────────────┴▶ sent, failed, held and cancelled emails: erased, a batch per commit
                                             └▶ pending, waiting and sending emails: reported, not changed

In this module, an email is *finished* if it is sent, failed, held or cancelled. Each batch is one commit, so the work
may be interrupted and repeated at any time. A repetition does not find emails that are already erased.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.ops.acts import Act
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import fetch

FORGOTTEN: Final = "(forgotten)"
"""The text that replaces the masked address of a suppression that is kept."""
_FIRST: Final = UUID(int=0)
_FIELDS: Final = ("to", "cc", "bcc", "reply_to")
_PLAIN_LOCAL: Final = re.compile(r"[a-z0-9._+-]+")


class _Erased(NamedTuple):
    """What was erased from one email; in a dry run, what would be erased."""

    email_id: UUID
    is_finished: bool
    is_locked: bool
    had_content: bool
    attachments: int
    events: int


@dataclass(slots=True)
class Forgotten:
    """What was erased about one recipient; in a dry run, what would be erased.

    Attributes:
        read: The number of emails whose recipients were read.
        read_until: The id of the last email whose recipients were read.
        emails: How many sent, failed, held and cancelled emails have the address in their recipients or events.
        contents: How many of these emails still had their content.
        unfinished: Pending, waiting and sending emails, which are not changed.
        locked: Emails that are not changed because other transactions have locked their rows.
        suppressions: How many suppression entries were removed, or kept without the text that shows the address.
    """

    read: int = 0
    read_until: UUID | None = None
    emails: int = 0
    contents: int = 0
    attachments: int = 0
    events: int = 0
    unfinished: list[UUID] = field(default_factory=list)
    locked: list[UUID] = field(default_factory=list)
    suppressions: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all emails of the recipient were erased: none was unfinished or locked."""
        return not (self.unfinished or self.locked)

    def count(self, erased: _Erased) -> None:
        """Adds what was erased from one email."""
        if not erased.is_finished:
            self.unfinished.append(erased.email_id)
        elif erased.is_locked:
            self.locked.append(erased.email_id)
        else:
            self.emails += 1
            self.contents += erased.had_content
            self.attachments += erased.attachments
            self.events += erased.events


@dataclass(slots=True, repr=False)
class Forgetting:
    """Erases the recipient with one address; see the module's docstring.

    Attributes:
        address: With or without a display name. It is normalised as in events and suppressions.
        act: Who erases, and why; None for a dry run, which only counts.
        on_progress: Called after every statement.
        page: The number of emails per statement that reads recipients.
        batch: The number of emails per commit. Small, because a commit locks its emails' rows.
    """

    session: AsyncSession
    address: str
    act: Act | None
    on_progress: Callable[[Forgotten], None] = lambda _: None
    page: int = 2_000
    batch: int = 200
    _done: Forgotten = field(default_factory=Forgotten, init=False)
    _hash: bytes = field(default=b"", init=False)

    async def run(self, *, removes_suppressions: bool = False) -> Forgotten:
        """Erases the recipient, and returns what was erased. Idempotent.

        Suppression entries are kept unless `removes_suppressions`, so that the address gets no email. After
        `StoreUnavailable`, committed batches stay erased: call again to continue.
        """
        self.address = normalised(self.address)
        self._hash = (await AddressHasher.open(self.session)).hash(self.address)
        of_address = {"address_hash": self._hash}
        await self._forget_contents()
        await self._forget_events()
        if self.act is None:
            ((self._done.suppressions,),) = await fetch(self.session, "count_suppressions_of", of_address)
        else:
            await fetch(self.session, "forget_outgoing_events", of_address)
            parameters = {**of_address, "removes": removes_suppressions, "masked": FORGOTTEN, **asdict(self.act)}
            ((self._done.suppressions,),) = await fetch(self.session, "forget_suppressions", parameters)
        self.on_progress(self._done)
        return self._done

    async def _forget_contents(self) -> None:
        """Finds the emails to the address that still have their content, and erases those that are finished."""
        local = self.address.rpartition("@")[0]
        # PostgreSQL preselects emails by the address's local part, but only if the local part is plain ASCII. With
        # other letters, PostgreSQL would miss emails: Python treats more forms of a letter as equal, and JSON escapes
        # some characters.
        part = local if _PLAIN_LOCAL.fullmatch(local) else ""
        after: UUID | None = _FIRST
        while after is not None:
            parameters = {"after": after, "limit": self.page, "part": part}
            ((after, count, candidates),) = await fetch(self.session, "find_recipients_page", parameters)
            await self._forget([UUID(i) for i, recipients in candidates if self._is_among(recipients)])
            self._done.read += count
            self._done.read_until = after or self._done.read_until
            self.on_progress(self._done)

    def _is_among(self, recipients: Mapping[str, Iterable[str]]) -> bool:
        texts = (text for name in _FIELDS for text in recipients.get(name, ()))
        return any(normalised(text) == self.address for text in texts)

    async def _forget_events(self) -> None:
        """Finds emails whose content is already deleted, by the address's hash in their events. Erases those that are
        finished."""
        after = _FIRST
        while True:
            parameters = {"address_hash": self._hash, "after": after, "limit": self.batch}
            ids = [row[0] for row in await fetch(self.session, "find_recipient_events", parameters)]
            if not ids:
                return
            known = {*self._done.unfinished, *self._done.locked}
            await self._forget([email_id for email_id in ids if email_id not in known], is_by_event=True)
            after = ids[-1]
            self.on_progress(self._done)

    async def _forget(self, email_ids: Sequence[UUID], *, is_by_event: bool = False) -> None:
        """Erases the emails that are finished, a batch per commit. A dry run only counts these emails."""
        for start in range(0, len(email_ids), self.batch):
            given = ids_within(email_ids[start : start + self.batch])
            parameters = {**given, "address_hash": self._hash, **({} if self.act is None else asdict(self.act))}
            is_dry = self.act is None
            rows = await fetch(
                self.session, "find_forgettable" if is_dry else "forget_emails", parameters, into=_Erased
            )
            for erased in rows:
                if is_dry and is_by_event and erased.had_content:
                    continue  # this dry run has already counted every email with content
                self._done.count(erased)
