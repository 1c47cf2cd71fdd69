"""Finds and groups failed and held emails, and confirms, releases or discards them, for operators.

Also finds the emails that must have a dead letter on the DLQ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.failures import DeadGroup, Forecast, Selection
from dispatcher.domain.status import Status
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.statements import Source, fetch, statement

MOST_GROUPED: Final = 20_000
"""The most emails that a page groups, newest first. If there are more, the page says so."""
MOST_GROUPS: Final = 50


@dataclass(frozen=True, slots=True)
class DeadLetterEmail:
    """The current state of the email that a dead letter is about.

    Attributes:
        attempt_count: Each time the email fails, this number is higher, so it shows which failure a dead letter is
            about.
        is_discarded: Whether an operator discarded the email's dead letter.
    """

    message_key: str
    status: Status
    attempt_count: int
    is_discarded: bool


async def group_dead(
    source: Source, selected: Selection, by: str, *, limit: int | None = None, groups: int | None = None
) -> list[DeadGroup]:
    """The largest groups, at most `groups`, of the newest selected emails, at most `limit`; see `GROUPINGS`."""
    parameters = {**selected.parameters, "by": by, "limit": limit, "groups": groups}
    return await fetch(source, "group_dead", parameters, into=DeadGroup)


async def preview_dead(source: Source, selected: Selection, *, include_held: bool, sample: int) -> list[Forecast]:
    """What a replay would do now."""
    parameters = {**selected.parameters, "include_held": include_held, "sample": sample}
    return await fetch(source, "preview_dead", parameters, into=Forecast)


async def find_dead_ids(source: Source, selected: Selection, *, most: int | None = None) -> list[UUID]:
    """The ids of the selected emails, oldest first."""
    return [row[0] for row in await fetch(source, "find_dead_ids", {**selected.parameters, "most": most})]


async def find_dead_letter_emails(source: Source, email_ids: Collection[UUID]) -> dict[UUID, DeadLetterEmail]:
    """The emails with these ids, such as those of dead letters, by id. Does not contain ids that have no email."""
    if not email_ids:
        return {}
    rows = await fetch(source, "find_dead_letter_emails", ids_within(set(email_ids)))
    return {row[0]: DeadLetterEmail(row[1], Status(row[2]), *row[3:]) for row in rows}


async def republish_dead_letters(source: Source, attempts: Mapping[UUID, int]) -> set[UUID]:
    """Makes dead letters due again, except of emails that now have another number of attempts than the given one."""
    if not attempts:
        return set()
    return {row[0] for row in await fetch(source, "republish_dead_letters", ids_with("attempt_counts", attempts))}


@statement
async def find_dead_lettered(source: Source) -> dict[UUID, int]: ...
@statement
async def count_dead_lettered(source: Source) -> int: ...


async def audit(
    source: Source,
    action: str,
    details: Mapping[UUID | None, Mapping[str, Any] | None],
    *,
    actor: str,
    reason: str | None,
) -> None:
    """Adds an audit record for each email, or one that is about no email. Only for actions that change no email:
    statements that change emails add their own."""
    written = [None if detail is None else orjson.dumps(detail).decode() for detail in details.values()]
    await fetch(
        source,
        "audit",
        {"actor": actor, "action": action, "reason": reason, "email_ids": list(details), "details": written},
    )
