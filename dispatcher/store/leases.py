"""Leases emails and records results, in batches: each method is one statement and one commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.domain.controls import Controls
from dispatcher.domain.outgoing import EMAIL_CHANNEL, ERASE_TAG, FilePart, OutgoingEmail, with_file_parts
from dispatcher.domain.retry import RetryLimits
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.values import dataclass
from dispatcher.errors import StatementRefused
from dispatcher.store.connections import Pool, session
from dispatcher.store.controls import LatestControls
from dispatcher.store.locked import LockedRows
from dispatcher.store.queries import ids_with, ids_within, query
from dispatcher.store.server import find_database_id
from dispatcher.store.statements import Row, Source, fetch, session_of
from dispatcher.store.suppressions import SuppressionReader
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

MAX_OCTETS: Final = 64 * 1024
"""`lease` returns the content of an email only if the content is at most this large and has no attachments. Nearly all
emails are far smaller."""
MOST_WAIT_SECONDS: Final = 3600.0
"""The longest wait of an email for a domain's ceiling. After this time, a worker checks the ceiling again, because the
ceiling may have changed."""
MOST_PACE: Final = 1_000_000.0
"""The highest `DomainWait.pace`; a higher pace counts as this pace."""
SLICE_OCTETS: Final = 4 * 1024 * 1024
_NUMBER: Final = attrgetter("email_id.int")
_NO_EMAIL: Final = (AttributeError, TypeError, ValueError)
"""The exceptions that are raised for a row that was edited by hand and is no longer a valid email."""
_NO_HEADERS: Final = MappingProxyType[str, str]({})
_NO_DATA: Final = MappingProxyType[str, object]({})
_NO_OUTCOMES: Final = MappingProxyType[int, str | None]({})


class Lease(NamedTuple):
    """Timed ownership of an email, with everything that the worker needs to send the email.

    A tuple, because thousands are created per second.
    """

    email_id: UUID
    email: OutgoingEmail | None  # the content; None if it was deleted, or must be read separately
    # PostgreSQL increments it with every lease of the email. Every write under this lease names it, so PostgreSQL
    # recognises a write under an earlier lease.
    token: int
    attempt_number: int  # of the first attempt under this lease; an email's first attempt has number 1
    on_uncertain: OnUncertain | None  # the email's own policy for an unknown outcome; None for the host's policy
    correlation_id: str | None
    # The number of attempts before the last replay, redelivery or partial delivery; only later attempts count towards
    # the maximum.
    attempt_base: int = 0
    traceparent: str | None = None  # W3C trace context of the enqueuing application
    # Size of the content, if the content is large or could not be read in a batch. The worker must then read the
    # content separately before it sends the email. 0 if `email` is complete; negative if the size is unknown.
    octets_apart: int = 0
    # when the email could first be sent: its send_at, or when it was enqueued; None if not read
    due_since: datetime | None = None
    pinned_to: str | None = None  # the only provider that may be tried (see `domain.outcome`); None for any
    pinned_seconds: float | None = None  # since the first attempt with an unknown outcome began; None if not pinned
    expires_in: float | None = None  # the seconds until the email expires: no attempt may begin later; None: never
    tenant_id: str = "default"  # the tenant's suppressions apply to the email
    limits: RetryLimits | None = None  # the email's own; None if there are none and redelivery is off
    # See `PartialDelivery.codes`; empty unless an earlier attempt delivered the email in part.
    recipient_outcomes: Mapping[int, str | None] = _NO_OUTCOMES

    @property
    def trace_id(self) -> str | None:
        """Of the traceparent (W3C Trace Context, section 3.2.2.3); None if there is no traceparent."""
        return self.traceparent[3:35] if self.traceparent else None


class DomainWait(NamedTuple):
    """What decides how long an email waits for the ceiling of a recipient domain."""

    domain: str
    lane: str
    tenant_id: str
    pace: float  # how many waiting emails of the domain may become due per second


@dataclass(frozen=True, slots=True)
class UnleasedEmail:
    """The current state of an email that could not be leased."""

    message_key: str
    status: Status
    our_token: int | None  # of the lease that this worker has on the email, or that recovery took from it; else None
    # Whether a provider's event proves that the email was sent, or the email has expired. No worker may lease such an
    # email, even if it is pending. The relay settles or cancels it.
    is_left_out: bool


class Result(NamedTuple):
    """The result of one attempt, to be recorded."""

    email_id: UUID
    lease_token: int
    status: Status  # the email's new status; `sending` extends the lease for one more attempt
    attempt_number: int
    started_at: datetime
    finished_at: datetime
    outcome: str  # the outcome's name (see `domain.outcome.outcome_name`)
    provider: str
    lease_seconds: float | None = None  # how long from now the extended lease lasts; None if the lease ends
    error_type: str | None = None  # the reason as a `Reason` value; None if the email was accepted
    error: str | None = None  # the provider's error text, scrubbed
    provider_code: str | None = None
    provider_message_id: str | None = None
    # When the lease expired. Set only if the relay records the result of a frozen worker. The email is changed only if
    # its lease still ends at this time.
    expired_at: datetime | None = None
    # Whether only this provider may be tried again, because it may have accepted the email under an idempotency key.
    is_pinned: bool = False
    # how long the email waits for its redelivery; None unless the status is `waiting`
    wait_seconds: float | None = None
    # See `PartialDelivery.codes`; None unless this attempt delivered the email in part.
    recipient_outcomes: Mapping[int, str | None] | None = None

    @property
    def is_acceptance(self) -> bool:
        """Whether the provider accepted the email, and `record_accepted` stores everything that the result says."""
        return self.outcome == "accepted" and not (
            self.error_type or self.provider_code or self.expired_at or self.recipient_outcomes
        )

    def without_provider_texts(self) -> Result:
        """The result without `error`, `provider_code` and `provider_message_id`. Used if PostgreSQL refuses the result,
        because one of these texts may be the cause."""
        return self._replace(error=None, provider_code=None, provider_message_id=None)


_COLUMNS: Final = (
    *("email_ids", "lease_tokens", "statuses", "attempt_numbers", "started_ats", "finished_ats", "outcomes"),
    *("providers", "lease_seconds", "error_types", "errors", "provider_codes", "provider_message_ids", "expired_ats"),
    *("are_pinned", "wait_seconds"),
)
"""The parameters of the statement `record`: one for each field of `Result` but the last, in order."""


class LeaseStore:
    """Leases emails for one worker, renews and releases the leases, reads contents, and records results.

    Every method raises StoreUnavailable if the same call might succeed later. After this error, it is unknown whether
    the statement was committed, and the caller must find out (`release_unanswered`, `is_recorded`). After StoreBusy (a
    subclass), nothing was committed, and `locked` finds the emails to leave out.
    """

    def __init__(self, pool: Pool, *, worker: str, slot: str, redeliver_seconds: float = 0.0) -> None:
        """`worker` is this process's name, different on every host and after every restart; stored in `locked_by`.
        `slot` is the worker slot's name, the same after a restart; part of the key of `email_hourly`.
        `redeliver_seconds` is the host's setting: the redelivery of an email ends this many seconds after the email
        could first be sent; 0 for no redelivery."""
        self._pool = pool
        self._worker = worker
        self._slot = slot
        self._redeliver_seconds = redeliver_seconds
        self.locked = LockedRows(pool)
        self.suppressions = SuppressionReader(pool)
        self._controls = LatestControls(pool)

    async def lease(
        self, keys_by_id: dict[UUID, str], lease_seconds: float, paused_tenants: Sequence[str] = ()
    ) -> list[Lease]:
        """Leases the given emails. Leaves out emails that are not pending, have a different message key, or belong to
        one of the paused tenants."""
        parameters = {
            **ids_with("message_keys", keys_by_id),
            "worker": self._worker,
            "lease_seconds": lease_seconds,
            "paused_tenants": list(paused_tenants),
            "most_octets": MAX_OCTETS,
            "redeliver_seconds": self._redeliver_seconds,
        }
        # An instant that Python cannot represent must not become the Date header.
        rows = await fetch(self._pool, "lease", parameters, is_exact=True)
        return await self._with_outcomes([_lease(row) for row in rows])

    async def _with_outcomes(self, leases: list[Lease]) -> list[Lease]:
        """Adds `recipient_outcomes`. A partial delivery increases `attempt_base`, so only few emails need a query."""
        repeated = [lease.email_id for lease in leases if lease.attempt_base]
        if not repeated:
            return leases
        rows = await fetch(self._pool, "find_recipient_outcomes", ids_within(repeated))
        try:
            found = {email_id: {int(at): code for at, code in codes.items()} for email_id, codes in rows}
        except _NO_EMAIL as error:
            raise StatementRefused("An email's recipient_outcomes in PostgreSQL are not valid.") from error
        return [lease._replace(recipient_outcomes=found.get(lease.email_id, _NO_OUTCOMES)) for lease in leases]

    async def lease_without_content(
        self, email_id: UUID, message_key: str, lease_seconds: float, paused_tenants: Sequence[str] = ()
    ) -> Lease | None:
        """As `lease`, for one email that `lease` could not read. The caller must read the content separately. Returns
        None if the email cannot be leased."""
        parameters = {
            "email_id": email_id,
            "message_key": message_key,
            "worker": self._worker,
            "lease_seconds": lease_seconds,
            "paused_tenants": list(paused_tenants),
            "redeliver_seconds": self._redeliver_seconds,
        }
        for token, attempt_number, on_uncertain, attempt_base, *others, limits in await fetch(
            self._pool, "lease_without_content", parameters
        ):
            policy = OnUncertain(on_uncertain) if on_uncertain else None
            lease = Lease(email_id, None, token, attempt_number, policy, None, attempt_base, octets_apart=1)
            names = ("pinned_to", "pinned_seconds", "expires_in", "tenant_id")
            lease = lease._replace(**dict(zip(names, others, strict=True)), limits=limits_in(limits))
            return (await self._with_outcomes([lease]))[0]
        return None

    async def find_content_octets(self, email_id: UUID) -> int:
        """The size of an email's content in octets; 0 if the content was deleted."""
        ((octets,),) = await fetch(self._pool, "find_content_octets", {"email_id": email_id})
        return int(octets or 0)

    async def read_content(self, email_id: UUID) -> OutgoingEmail | None:
        return await read_content(self._pool, email_id)

    async def find_database_id(self) -> UUID:
        return await find_database_id(self._pool)

    async def find_unleased(self, email_ids: Sequence[UUID]) -> dict[UUID, UnleasedEmail]:
        """The states of emails that could not be leased, by id. Does not contain ids that have no row."""
        rows = await fetch(self._pool, "find_unleased", {**ids_within(email_ids), "worker": self._worker})
        return {email_id: UnleasedEmail(key, Status(status), *rest) for email_id, key, status, *rest in rows}

    async def read_controls(self) -> Controls:
        return await self._controls.read()

    async def find_paused(self, email_ids: Collection[UUID], tenants: Sequence[str], lanes: Sequence[str]) -> set[UUID]:
        """The ids of the given emails that belong to one of the given tenants or lanes."""
        parameters = {**ids_within(email_ids), "tenants": list(tenants), "lanes": list(lanes)}
        return await self._ids("find_paused", parameters)

    async def put_back(self, email_ids: Collection[UUID], tenants: Sequence[str], away_seconds: float) -> set[UUID]:
        """Makes pending emails of paused tenants due again in `away_seconds`, so that the relay publishes their
        messages again later. Skips locked rows. Returns the ids of the emails that became due again."""
        named = {"tenants": list(tenants), "away_seconds": away_seconds}
        outcome = await self.locked.execute_unlocked(
            email_ids, lambda free: self._ids("put_back", {**ids_within(free), **named})
        )
        return set().union(*outcome.answers)

    async def renew(self, leases: dict[UUID, int], lease_seconds: float) -> set[UUID]:
        """Extends leases (tokens by email id). Returns the emails that this worker may still send: it has the lease,
        and no event proves that a provider accepted the email."""
        return await self._ids("renew", {**ids_with("lease_tokens", leases), "lease_seconds": lease_seconds})

    async def release(
        self, leases: dict[UUID, int], away_seconds: Mapping[UUID, float] = MappingProxyType({})
    ) -> set[UUID]:
        """Releases leases (tokens by email id), and makes their emails pending and due, after their `away_seconds` if
        given. Returns the ids of the emails for which this worker still had a lease.

        The caller must be certain that no provider has accepted or can still accept an email under one of these leases.
        If another host has already recovered an email, also reverts the recovery (see `revert_recovery`).
        """
        parameters = ids_with("lease_tokens", leases)
        waits = [away_seconds.get(email_id, 0.0) for email_id in parameters["email_ids"]]
        ours = await self._ids("release", {**parameters, "away_seconds": waits})
        if len(ours) < len(leases):
            await self.revert_recovery({email_id: token for email_id, token in leases.items() if email_id not in ours})
        return ours

    async def revert_recovery(self, leases: dict[UUID, int]) -> set[UUID]:
        """Reverts the recovery of lost leases (tokens by email id): emails that recovery made `held` become pending
        again. Leaves out emails that are not held, or have changed since the recovery. Returns the changed emails.

        The caller must be certain that no provider has accepted or can still accept an email under one of the leases.
        """
        rows = await fetch(self._pool, "revert_recovery", {**ids_with("lease_tokens", leases), "worker": self._worker})
        metrics.RECOVERED.add(len(rows), "host_returned")
        for email_id, correlation_id, _ in rows:
            get_log().warning("email.hold_reverted", email_id=str(email_id), correlation_id=correlation_id)
        return {row[0] for row in rows}

    async def release_unanswered(self, email_ids: Sequence[UUID]) -> None:
        """Releases the leases that a call of `lease` has taken, if PostgreSQL's answer to this call was lost.

        Pass only emails that are not in flight in this worker. The statement names the token of each lease. So even if
        PostgreSQL executes the statement late, it never releases a newer lease of this worker.
        """
        states = await self.find_unleased(email_ids)
        if ours := {i: found.our_token for i, found in states.items() if found.our_token is not None}:
            await self.release_unlocked(ours)

    async def release_unlocked(
        self, leases: dict[UUID, int], away_seconds: Mapping[UUID, float] = MappingProxyType({})
    ) -> set[UUID]:
        """As `release`, but skips locked rows. Returns the ids of the skipped emails: the caller must release these
        emails later. If PostgreSQL refuses to release an email, the email stays leased until its lease expires."""
        outcome = await self.locked.execute_unlocked(
            leases, lambda free: self.release({i: leases[i] for i in free}, away_seconds)
        )
        return outcome.locked

    async def wait_for_domains(self, waits: Mapping[UUID, tuple[int, DomainWait]]) -> set[UUID]:
        """Releases leases whose emails must wait for the ceiling of a recipient domain. The emails become `waiting`.
        Skips locked rows, and returns their ids: the caller must release these emails later. `waits`: the lease's token
        and the wait of each email, by email id."""
        outcome = await self.locked.execute_unlocked(waits, lambda free: self._make_free_wait(free, waits))
        return outcome.locked

    async def _make_free_wait(self, free: set[UUID], waits: Mapping[UUID, tuple[int, DomainWait]]) -> None:
        parameters = ids_with("lease_tokens", {email_id: waits[email_id][0] for email_id in free})
        asked = [waits[email_id][1] for email_id in parameters["email_ids"]]
        columns = {
            "domains": [wait.domain for wait in asked],
            "lanes": [wait.lane for wait in asked],
            "tenant_ids": [wait.tenant_id for wait in asked],
            "paces": [min(wait.pace, MOST_PACE) for wait in asked],
            "most_seconds": MOST_WAIT_SECONDS,
        }
        ours = await self._ids("wait_for_domains", {**parameters, **columns})
        if len(ours) < len(free):
            await self.revert_recovery({email_id: waits[email_id][0] for email_id in free - ours})

    async def record(self, results: Sequence[Result]) -> set[UUID]:
        """Records a batch of results. Returns the ids of the emails for which this worker still had a lease.

        The comment in `sql/queries/record.sql` says what happens to the results of all other emails.
        """
        names = {"worker": self._worker, "slot": self._slot}
        if _are_acceptances(results):
            rows = await fetch(self._pool, "record_accepted", {**_accepted_columns(results), **names})
            return {result.email_id for result in results} - {row[0] for row in rows}
        parameters = {**_columns(results), **names}
        partial = [result for result in results if result.recipient_outcomes]
        async with session(self._pool) as connection, connection.transaction() if partial else nullcontext():
            if partial:
                await connection.execute(query("record_recipients"), _recipient_columns(partial))
            cursor = await connection.execute(query("record"), parameters)
            if cursor.rowcount == len(results):  # the usual case: no need to parse a hundred ids
                return {result.email_id for result in results}
            return {row[0] for row in await cursor.fetchall()}

    async def is_recorded(self, result: Result) -> bool:
        """Whether `record` has committed the batch with this result. Call this if PostgreSQL's answer was lost."""
        parameters = {
            "email_id": result.email_id,
            "attempt_number": result.attempt_number,
            "started_at": result.started_at,
            "worker": self._worker,
        }
        return bool(await fetch(self._pool, "find_attempt", parameters))

    async def _ids(self, name: str, parameters: dict[str, Any]) -> set[UUID]:
        return {row[0] for row in await fetch(self._pool, name, parameters)}


def _are_acceptances(results: Sequence[Result]) -> bool:
    """Whether the statement `record_accepted` can record these results."""
    provider = results[0].provider
    return all(result.is_acceptance and result.provider == provider for result in results)


def _accepted_columns(results: Sequence[Result]) -> dict[str, Any]:
    ordered = sorted(results, key=_NUMBER)
    errors = [result.error for result in ordered]
    return {
        "email_ids": [result.email_id for result in ordered],
        "lowest_id": ordered[0].email_id,
        "highest_id": ordered[-1].email_id,
        "attempt_numbers": [result.attempt_number for result in ordered],
        "started_ats": [result.started_at for result in ordered],
        "finished_ats": [result.finished_at for result in ordered],
        "provider": ordered[0].provider,
        "provider_message_ids": [result.provider_message_id for result in ordered],
        "errors": None if errors.count(None) == len(errors) else errors,
    }


def _columns(results: Sequence[Result]) -> dict[str, Any]:
    ordered = sorted(results, key=_NUMBER)
    # `_COLUMNS` comes first and is shorter than the fields of a result, so `zip` does not convert the last field.
    columns: dict[str, Any] = dict(zip(_COLUMNS, map(list, zip(*ordered, strict=True)), strict=False))
    columns["statuses"] = list(map(str, columns["statuses"]))
    columns["lowest_id"], columns["highest_id"] = ordered[0].email_id, ordered[-1].email_id
    return columns


def _recipient_columns(results: Sequence[Result]) -> dict[str, Any]:
    by_id = {result.email_id: result for result in results}
    parameters = ids_within(by_id)
    ordered = [by_id[email_id] for email_id in parameters["email_ids"]]
    outcomes = [orjson.dumps(result.recipient_outcomes, option=orjson.OPT_NON_STR_KEYS).decode() for result in ordered]
    return {**parameters, "attempt_numbers": [result.attempt_number for result in ordered], "outcomes": outcomes}


def _lease(row: Row) -> Lease:
    email_id, token, attempt_number, on_uncertain, correlation_id, attempt_base, traceparent = row[:7]
    octets_apart, pinned_to, pinned_seconds, expires_in, tenant_id, limits, due_since = row[-7:]
    octets_apart = octets_apart or 0
    try:
        email = None if row[8] is None or octets_apart else outgoing_email(email_id, row[7:-7])
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
        due_since or row[7],
        pinned_to,
        pinned_seconds,
        expires_in,
        tenant_id,
        None if limits is None else limits_in(limits),
    )


def limits_in(column: Sequence[float | None] | None) -> RetryLimits | None:
    """Converts the last column of the statement `lease` (an array, or null) to retry limits."""
    if column is None:
        return None
    max_attempts, redeliver_seconds, redeliveries = column
    return RetryLimits(
        None if max_attempts is None else int(max_attempts), redeliver_seconds or 0.0, int(redeliveries or 0)
    )


async def read_content(source: Source, email_id: UUID) -> OutgoingEmail | None:
    """An email with its content and attachments; None if the content or an attachment was deleted. Raises
    StatementRefused if PostgreSQL cannot read the content, or the row is not a valid email."""
    rows = await fetch(source, "find_content", {"email_id": email_id}, is_exact=True)
    files: list[FilePart] = []
    found = await fetch(source, "find_attachments", {"email_id": email_id})
    for position, filename, content_type, octets, content_id, part in found:
        content = await _read_attachment(source, email_id, position, octets)
        if content is None:
            return None
        files.append(FilePart(filename, content_type, content, content_id, part))
    try:
        return with_file_parts(outgoing_email(email_id, rows[0]), files) if rows else None
    except _NO_EMAIL as error:
        raise StatementRefused(f"The content of email {email_id} in PostgreSQL is not a valid email.") from error


async def _read_attachment(source: Source, email_id: UUID, position: int, octets: int) -> bytes | None:
    """An attachment; None if it was deleted. Reads it in slices, because a session keeps as much memory as its largest
    answer needed."""
    content = bytearray()
    where = {"email_id": email_id, "position": position, "octets": SLICE_OCTETS}
    while len(content) < octets:
        async with session_of(source) as connection:
            cursor = connection.cursor(binary=True)
            await cursor.execute(query("find_attachment_slice"), {**where, "from": len(content) + 1})
            row = await cursor.fetchone()
        if row is None or not row[0]:
            return None
        content += row[0]
    return bytes(content)


def outgoing_email(email_id: UUID, row: Row) -> OutgoingEmail:
    """Converts a row of the statement `find_content`, or the same columns of another statement, to an email."""
    created_at, sender, recipients, subject, text, html, template_id, template_data, headers, tags, channel = row
    return OutgoingEmail(  # without keywords, which take three times as long
        email_id,
        created_at,
        sender,
        tuple(recipients.get("to", ())),
        subject,
        text,
        html,
        template_id,
        template_data or _NO_DATA,
        tuple(recipients.get("cc", ())),
        tuple(recipients.get("bcc", ())),
        tuple(recipients.get("reply_to", ())),
        headers or _NO_HEADERS,
        (),
        tuple([tag for tag in tags if tag != ERASE_TAG]) if tags else (),
        channel or EMAIL_CHANNEL,
    )
