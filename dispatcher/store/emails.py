"""Reads the rows, the attempts and the history of emails, and why an email waits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from uuid import UUID

from dispatcher.domain.controls import PauseScope
from dispatcher.domain.email_history import Attempt, AuditedAct, EmailRow, ProviderEvent, ReplayOfEmail
from dispatcher.domain.listed_email import Envelope, LastEvent
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.values import replace
from dispatcher.domain.waiting import MAX_AHEAD_COUNT, Facts, describe_holder, problems_with_pauses
from dispatcher.store.connections import BATCH_LOCK_SECONDS, Session
from dispatcher.store.controls import list_pauses
from dispatcher.store.named_locks import RELAY_BLOCKED, is_held_by_another
from dispatcher.store.providers import find_troubles, list_rates
from dispatcher.store.queries import ids_within
from dispatcher.store.recipients import addresses_by_field, fetch_readable, find_recipients, may_read_recipients
from dispatcher.store.statements import Record, Source, fetch, fetch_records, fetch_sync, from_rows, statement

SAMPLE: Final = 1_000
"""The most emails that `sample_pending` reads. This takes some milliseconds."""


async def find_facts(session: Source, email_id: UUID, *, most_ahead: int = MAX_AHEAD_COUNT) -> Facts | None:
    """The facts that show why an email waits. None if the email is not pending, waiting or sending. Counts at most
    `most_ahead` pending emails ahead of this email."""
    if not (rows := await fetch(session, "find_wait", {"email_id": email_id, "most_ahead": most_ahead})):
        return None
    ceilings = {each.provider: each.per_second for each in await list_rates(session) if each.was_used}
    is_blocked = await is_held_by_another(session, RELAY_BLOCKED)
    facts = from_rows(Facts, [(*rows[0], is_blocked, await find_troubles(session), ceilings)])[0]
    if not (pauses := await list_pauses(session, email_id=email_id)):
        return facts
    problems = problems_with_pauses(facts.troubles, pauses, now=facts.now, workers=facts.workers)
    stopping = [pause for pause in pauses if pause.scope is not PauseScope.PROVIDER]
    return replace(facts, troubles=problems, pauses=stopping)


async def find_holders(session: Source, email_id: UUID) -> list[str]:
    """Descriptions of the sessions that have probably locked the email's row for longer than BATCH_LOCK_SECONDS. Tries
    to lock the row; a role that may only read cannot do this, and gets an empty list."""
    if not await may_lock(session) or not await fetch(session, "find_locked", ids_within([email_id])):
        return []
    return await fetch(session, "find_holders", {"age_seconds": BATCH_LOCK_SECONDS}, into=describe_holder)


@statement
async def find_email(
    source: Source, email_id: UUID | None, *, tenant_id: str | None = None, message_key: str | None = None
) -> EmailRow | None: ...
@statement
async def find_ids_by_key(source: Source, tenant_id: str, message_keys: Collection[str]) -> dict[str, UUID]: ...
@statement
async def find_tenants_of_key(source: Source, message_key: str, *, most_tenants: int) -> dict[str, UUID]: ...
@statement
async def list_known_tenants(source: Source) -> list[str]: ...
@statement
async def list_attempts(source: Source, email_id: UUID) -> list[Attempt]: ...
@statement
async def list_acts(source: Source, email_id: UUID) -> list[AuditedAct]: ...
@statement
async def list_replays_of(source: Source, email_id: UUID) -> list[ReplayOfEmail]: ...
@statement
async def was_revealed(source: Source, email_id: UUID, *, actor: str, seconds: float) -> bool: ...
@statement
async def may_lock(source: Source) -> bool: ...


async def find_details(
    source: Source, email_ids: Collection[UUID]
) -> dict[UUID, tuple[list[str] | None, dict[str, str] | None, LastEvent | None]]:
    """The tags and the metadata of each email, or None if it has none or the content was deleted, and its newest
    believed event."""
    rows = await fetch_readable(source, "find_details", email_ids)
    return {row[0]: (row[1], row[2], None if row[3] is None else LastEvent(row[3], row[4])) for row in rows}


async def find_envelopes(source: Source, email_ids: Collection[UUID]) -> dict[UUID, Envelope]:
    """From whom and to whom each email is, and its subject. Leaves out emails whose content was deleted."""
    found = {}
    for email_id, sender, recipients, subject in await fetch_readable(source, "find_envelopes", email_ids):
        to, cc, bcc = addresses_by_field(recipients)
        found[email_id] = Envelope({"from": sender, "to": to, "cc": cc, "bcc": bcc, "subject": subject})
    return found


async def list_events(session: Source, email_id: UUID) -> list[ProviderEvent]:
    """What providers reported about the email, ordered by the providers' clocks.

    An event has the position of its recipient, not the address. None if the event concerns no recipient of the email,
    if the content was deleted, or if the role has no right to read addresses.
    """
    rows = await fetch(session, "list_events", {"email_id": email_id})
    positions = await _recipient_positions(session, email_id) if rows else {}
    placed = [(*row[:-1], None if row[-1] is None else positions.get(bytes(row[-1]))) for row in rows]
    return from_rows(ProviderEvent, placed)


async def _recipient_positions(session: Source, email_id: UUID) -> dict[bytes, int]:
    from dispatcher.store.address_hashes import AddressHasher

    found = await find_recipients(session, [email_id]) if await may_read_recipients(session) else {}
    addresses = found.get(email_id, [])
    hasher = await AddressHasher.open(session) if addresses else None
    return {} if hasher is None else {hasher.hash(each): at for at, each in reversed([*enumerate(addresses, 1)])}


async def reveal_content(session: Source, email_id: UUID) -> Record | None:
    """The email's private content and recipients, without the attachments' contents. None if the content was deleted.
    The caller must audit the call first."""
    rows = await fetch_records(session, "reveal_content", {"email_id": email_id})
    attachments = await fetch(session, "find_attachments", {"email_id": email_id})
    names = ("filename", "content_type", "length", "content_id", "part")
    named = [dict(zip(names, row[1:], strict=True)) for row in attachments]
    return {**rows[0], "attachments": named} if rows else None


def sample_pending(connection: Session) -> list[OutgoingEmail]:
    """The oldest pending emails, without bodies and attachments, to check whether a provider can send them."""
    from dispatcher.store.leases import outgoing_email  # imported here, because `dispatcher show` does not need it

    rows = fetch_sync(connection, "sample_pending", {"limit": SAMPLE})
    return [outgoing_email(row[0], row[1:]) for row in rows]
