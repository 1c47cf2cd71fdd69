"""Leases and their results, in batches: each method is one statement and one commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from dispatcher.domain.outgoing import ERASE_TAG, OutgoingAttachment, OutgoingEmail
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.errors import StatementRefused
from dispatcher.store.connections import Pool, session
from dispatcher.store.locked import LockedRows
from dispatcher.store.queries import ids_with, ids_within, query
from dispatcher.store.server import find_database_id
from dispatcher.store.statements import Row, fetch
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

MOST_LETTER_REPLAYS: Final = 3
"""So often an email's dead letter may be put back by hand; more often, and it is a machine that moves it."""
MOST_OCTETS: Final = 64 * 1024
"""Content up to so much is read at the lease, where it has no attachments: far above nearly all emails."""
SLICE_OCTETS: Final = 4 * 1024 * 1024
_NUMBER: Final = attrgetter("email_id.int")
_NO_EMAIL: Final = (AttributeError, TypeError, ValueError)
"""What building an email raises where its row was altered by hand."""
_NO_HEADERS: Final = MappingProxyType[str, str]({})
_NO_DATA: Final = MappingProxyType[str, object]({})


class Lease(NamedTuple):
    """Timed ownership of an email, with all that sending it takes. A tuple: there are thousands a second.

    Attributes:
        email: What to send; None if its content was deleted since, or has to be read on its own.
        token: Fences every write under this lease.
        attempt_number: The number of the attempt that this lease is for, from 1.
        attempt_base: How many attempts there were when it was last replayed: they count anew from there.
        on_uncertain: The email's own policy; None for the host's.
        traceparent: W3C trace context of whoever enqueued it; None if there was none.
        octets_apart: How much content there is to be read on its own before the email can be sent, because it is large
            or could not be read together with others; 0 if there is none, negative if unknown.
        created_at: When it was enqueued; None if that was not read.
    """

    email_id: UUID
    email: OutgoingEmail | None
    token: int
    attempt_number: int
    on_uncertain: OnUncertain | None
    correlation_id: str | None
    attempt_base: int = 0
    traceparent: str | None = None
    octets_apart: int = 0
    created_at: datetime | None = None

    @property
    def trace_id(self) -> str | None:
        """The trace that it belongs to (W3C Trace Context, section 3.2.2.3)."""
        return self.traceparent[3:35] if self.traceparent else None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an email stands that could not be leased.

    Attributes:
        our_token: The lease that this worker has of it; None if it has none.
    """

    message_key: str
    status: Status
    our_token: int | None


class LetterVerdict(StrEnum):
    """What became of an email whose dead letter was put back on the send queue."""

    REPLAYED = "replayed"
    """It is pending and due."""
    REFUSED = "refused"
    """It may have arrived, has no content, or came back too often: a command has to decide."""
    STALE = "stale"
    """The letter tells of a failure that is over."""


class Result(NamedTuple):
    """What became of one attempt, to be recorded.

    Attributes:
        status: Where the email stands now; `sending` prolongs the lease for another attempt.
        lease_seconds: How long from now the prolonged lease lasts; None where the lease closes.
        outcome: The outcome's word (see `domain.outcome.outcome_name`).
        error_type: The reason in our vocabulary; None if it was accepted.
        error: The provider's words, scrubbed.
        expired_at: When the lease ended, where somebody else records for its living owner; the result counts only if
            the lease still has this end.
    """

    email_id: UUID
    lease_token: int
    status: Status
    attempt_number: int
    started_at: datetime
    finished_at: datetime
    outcome: str
    provider: str
    lease_seconds: float | None = None
    error_type: str | None = None
    error: str | None = None
    provider_code: str | None = None
    provider_message_id: str | None = None
    expired_at: datetime | None = None

    def bare(self) -> Result:
        """The result without the provider's words, for where PostgreSQL refuses these."""
        return self._replace(error=None, provider_code=None, provider_message_id=None)


_COLUMNS: Final = (
    *("email_ids", "lease_tokens", "statuses", "attempt_numbers", "started_ats", "finished_ats", "outcomes"),
    *("providers", "lease_seconds", "error_types", "errors", "provider_codes", "provider_message_ids", "expired_ats"),
)
"""The statement's name for each field of a result, in order."""


class LeaseStore:
    """The worker's statements.

    Every method raises StoreUnavailable where the same call may succeed later; after that, nobody knows whether the
    statement was committed, and the next call has to find out (`release_unanswered`, `is_recorded`). StoreBusy tells
    more: nothing was committed, and `locked` can say what to leave out.

    Attributes:
        locked: The emails that somebody else's transaction holds.
    """

    def __init__(self, pool: Pool, *, worker: str, slot: str) -> None:
        """
        Args:
            worker: This process's identity, unique over hosts and restarts; stands in `locked_by`.
            slot: The worker slot's name, the same over restarts; keys `email_hourly`.
        """
        self._pool = pool
        self._worker = worker
        self._slot = slot
        self.locked = LockedRows(pool)

    async def lease(self, keys_by_id: dict[UUID, str], lease_seconds: float) -> list[Lease]:
        """Leases of those emails that may be leased, of the ids and message keys given; the rest is left out."""
        parameters = {
            **ids_with("message_keys", keys_by_id),
            "worker": self._worker,
            "lease_seconds": lease_seconds,
            "most_octets": MOST_OCTETS,
        }
        return [_lease(row) for row in await fetch(self._pool, "lease", parameters)]

    async def lease_unread(self, email_id: UUID, message_key: str, lease_seconds: float) -> Lease | None:
        """As `lease`, for one email that it could not read. Its content is still to be read."""
        parameters = {
            "email_id": email_id,
            "message_key": message_key,
            "worker": self._worker,
            "lease_seconds": lease_seconds,
        }
        for token, attempt_number, on_uncertain, attempt_base in await fetch(self._pool, "lease_unread", parameters):
            policy = OnUncertain(on_uncertain) if on_uncertain else None
            return Lease(email_id, None, token, attempt_number, policy, None, attempt_base, octets_apart=1)
        return None

    async def find_content_octets(self, email_id: UUID) -> int:
        """How much the content of an email holds; 0 if it was deleted."""
        ((octets,),) = await fetch(self._pool, "find_content_octets", {"email_id": email_id})
        return int(octets or 0)

    async def read_content(self, email_id: UUID) -> OutgoingEmail | None:
        """An email's content; None if it was deleted, attachments included.

        Raises:
            StatementRefused: PostgreSQL cannot read it, or it is no email.
        """
        rows = await fetch(self._pool, "find_content", {"email_id": email_id})
        attachments: list[OutgoingAttachment] = []
        found = await fetch(self._pool, "find_attachments", {"email_id": email_id})
        for position, filename, content_type, octets in found:
            content = await self._read_attachment(email_id, position, octets)
            if content is None:
                return None
            attachments.append(OutgoingAttachment(filename, content_type, content))
        try:
            return outgoing_email(email_id, rows[0], tuple(attachments)) if rows else None
        except _NO_EMAIL as error:
            raise StatementRefused("PostgreSQL holds a row that is no email.") from error

    async def _read_attachment(self, email_id: UUID, position: int, octets: int) -> bytes | None:
        """An attachment, in slices: a session keeps as much memory as its largest answer took. None if it is gone."""
        content = bytearray()
        where = {"email_id": email_id, "position": position, "octets": SLICE_OCTETS}
        while len(content) < octets:
            async with session(self._pool) as connection:
                cursor = connection.cursor(binary=True)
                await cursor.execute(query("find_attachment_slice"), {**where, "from": len(content) + 1})
                row = await cursor.fetchone()
            if row is None or not row[0]:
                return None
            content += row[0]
        return bytes(content)

    async def find_database_id(self) -> UUID:
        """The database's identity."""
        return await find_database_id(self._pool)

    async def find_standing(self, email_ids: Sequence[UUID]) -> dict[UUID, Standing]:
        """Where emails stand, by id; an id without a row is left out."""
        rows = await fetch(self._pool, "find_standing", {**ids_within(email_ids), "worker": self._worker})
        return {email_id: Standing(key, Status(status), token) for email_id, key, status, token in rows}

    async def replay_letters(self, attempts: Mapping[UUID, int]) -> dict[UUID, LetterVerdict]:
        """Replays emails whose dead letters were put back on the send queue; attempts as these count them, by id.

        One that is missing from the answer is locked by somebody: it has to be asked for again.
        """
        if not attempts:
            return {}
        parameters = {
            **ids_with("attempts", attempts),
            "most_times": MOST_LETTER_REPLAYS,
            "worker": self._worker,
        }
        rows = await fetch(self._pool, "replay_letters", parameters)
        return {email_id: LetterVerdict(verdict) for email_id, verdict, _ in rows}

    async def renew(self, leases: dict[UUID, int], lease_seconds: float) -> set[UUID]:
        """Prolongs leases, given as token by id; returns the ids that are still ours."""
        return await self._ids("renew", {**ids_with("lease_tokens", leases), "lease_seconds": lease_seconds})

    async def release(
        self, leases: dict[UUID, int], away_seconds: Mapping[UUID, float] = MappingProxyType({})
    ) -> set[UUID]:
        """Gives back leases under which nothing was accepted, nor will be; returns the ids that were still ours.

        What a rescue took away and held meanwhile is pending again, too (see `recover`).

        Args:
            away_seconds: How long from now an email becomes due; at once where it is missing.
        """
        parameters = ids_with("lease_tokens", leases)
        waits = [away_seconds.get(email_id, 0.0) for email_id in parameters["email_ids"]]
        ours = await self._ids("release", {**parameters, "away_seconds": waits})
        if len(ours) < len(leases):
            await self.recover({email_id: token for email_id, token in leases.items() if email_id not in ours})
        return ours

    async def recover(self, leases: dict[UUID, int]) -> set[UUID]:
        """Undoes the rescue of leases under which nothing was accepted, nor will be, as token by id.

        Returns:
            The emails that are pending again: those that the rescue held and that have not changed since.
        """
        rows = await fetch(self._pool, "recover_rescued", {**ids_with("lease_tokens", leases), "worker": self._worker})
        metrics.RECOVERED.add(len(rows), "host_returned")
        for email_id, correlation_id, _ in rows:
            get_log().warning("email.hold_reverted", email_id=str(email_id), correlation_id=correlation_id)
        return {row[0] for row in rows}

    async def release_unanswered(self, email_ids: Sequence[UUID]) -> None:
        """Gives back what a `lease` whose answer was lost may have leased to us; these ids must not be in our hands.

        By token, and not by what is ours: were this statement cut off in its turn and executed later, it would give
        back what a later lease of ours has taken, perhaps an email that is on the wire by then.
        """
        standing = await self.find_standing(email_ids)
        if ours := {i: found.our_token for i, found in standing.items() if found.our_token is not None}:
            await self.release_free(ours)

    async def release_free(
        self, leases: dict[UUID, int], away_seconds: Mapping[UUID, float] = MappingProxyType({})
    ) -> set[UUID]:
        """As `release`, without those that are locked; returns the ids of these, which have to be released later.

        What PostgreSQL refuses to release stays leased until the lease ends.
        """
        around = await self.locked.around(leases, lambda free: self.release({i: leases[i] for i in free}, away_seconds))
        return around.locked

    async def record(self, results: Sequence[Result]) -> set[UUID]:
        """Records a batch; returns the ids whose lease was still ours (see the statement for the others)."""
        parameters = {**_columns(results), "worker": self._worker, "slot": self._slot}
        async with session(self._pool) as connection:
            cursor = await connection.execute(query("record"), parameters)
            if cursor.rowcount == len(results):  # as nearly always: no answer of a hundred ids to be read
                return {result.email_id for result in results}
            return {row[0] for row in await cursor.fetchall()}

    async def is_recorded(self, result: Result) -> bool:
        """Whether the batch that held this result was committed although its answer was lost."""
        parameters = {
            "email_id": result.email_id,
            "attempt_number": result.attempt_number,
            "started_at": result.started_at,
            "worker": self._worker,
        }
        return bool(await fetch(self._pool, "find_attempt", parameters))

    async def _ids(self, name: str, parameters: dict[str, Any]) -> set[UUID]:
        return {row[0] for row in await fetch(self._pool, name, parameters)}


def _columns(results: Sequence[Result]) -> dict[str, Any]:
    ordered = sorted(results, key=_NUMBER)
    columns: dict[str, Any] = dict(zip(_COLUMNS, map(list, zip(*ordered, strict=True)), strict=True))
    columns["statuses"] = list(map(str, columns["statuses"]))
    columns["lowest_id"], columns["highest_id"] = ordered[0].email_id, ordered[-1].email_id
    return columns


def _lease(row: Row) -> Lease:
    email_id, token, attempt_number, on_uncertain, correlation_id, attempt_base, traceparent = row[:7]
    octets_apart = row[-1] or 0
    try:
        email = None if row[8] is None or octets_apart else outgoing_email(email_id, row[7:-1])
    except _NO_EMAIL:
        email, octets_apart = None, 1
    return Lease(
        email_id,
        email,
        token,
        attempt_number,
        OnUncertain(on_uncertain) if on_uncertain else None,
        correlation_id,
        attempt_base,
        traceparent,
        octets_apart,
        row[7],
    )


def outgoing_email(email_id: UUID, row: Row, attachments: tuple[OutgoingAttachment, ...] = ()) -> OutgoingEmail:
    """An email from the columns `created_at` to `tags` of its row and its content."""
    created_at, sender, recipients, subject, text, html, template_id, template_data, headers, tags = row
    return OutgoingEmail(
        email_id=email_id,
        created_at=created_at,
        sender=sender,
        to=tuple(recipients.get("to", ())),
        cc=tuple(recipients.get("cc", ())),
        bcc=tuple(recipients.get("bcc", ())),
        reply_to=tuple(recipients.get("reply_to", ())),
        subject=subject,
        text=text,
        html=html,
        template_id=template_id,
        template_data=template_data or _NO_DATA,
        headers=headers or _NO_HEADERS,
        attachments=attachments,
        tags=tuple([tag for tag in tags if tag != ERASE_TAG]) if tags else (),
    )
