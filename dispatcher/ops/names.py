"""Finds emails by what an operator enters: ids or message keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from dispatcher.errors import DispatcherError
from dispatcher.store.connections import AsyncSession
from dispatcher.store.emails import find_ids_by_key, find_tenants_of_key
from dispatcher.store.failures import find_dead_letter_emails

_NAMED: Final = 5
_TENANTS_NAMED: Final = 20
MOST_TENANTS: Final = 5_000
"""The most tenants in which `find_by_key` looks for a key. A search in all of them takes some tens of milliseconds."""


async def find_ids(session: AsyncSession, tenant_id: str, names: Sequence[str]) -> tuple[UUID, ...]:
    """The ids of the emails with these ids or message keys, in the order of `names`, each id once.

    If a name is the id of one email and the message key of a second email, the name counts as the id. An id is returned
    even if no email has this id: the operator's action then reports that the id is unknown.
    """
    ids = {name: email_id for name in names if (email_id := _id(name))}
    known = await find_dead_letter_emails(session, ids.values())
    by_key = await find_ids_by_key(session, tenant_id, [name for name in names if ids.get(name) not in known])
    if missing := [name for name in dict.fromkeys(names) if name not in ids and name not in by_key]:
        some = ", ".join(map(repr, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        raise DispatcherError(
            f"Tenant {tenant_id!r} has no email with the message key {some}.",
            remedy="Give the email's id, or its message key and its --tenant.",
        )
    return tuple(dict.fromkeys(by_key.get(name) or ids[name] for name in names))


async def find_id(session: AsyncSession, name: str, *, tenant_id: str | None) -> UUID:
    """The id of the email with this id or message key, as `find_ids`; without a tenant, looks for the key in all."""
    email_id = _id(name)
    if email_id and await find_dead_letter_emails(session, [email_id]):
        return email_id
    named = await find_by_key(session, name, tenant_id=tenant_id)
    if len(named) > 1:
        some = ", ".join(f"{each} ({found})" for each, found in list(named.items())[:_TENANTS_NAMED])
        raise DispatcherError(
            f"{len(named):,} tenants have an email with the message key {name!r}: {some}"
            f"{' …' if len(named) > _TENANTS_NAMED else ''}.",
            remedy="Add --tenant, or give the email's id.",
        )
    if found := next(iter(named.values()), email_id):
        return found
    whose = "No tenant" if tenant_id is None else f"Tenant {tenant_id!r}"
    raise DispatcherError(
        f"{whose} has {'an' if tenant_id is None else 'no'} email with the message key {name!r}.",
        remedy="`dispatcher find` searches by recipient, tag, status and time.",
    )


async def find_by_key(session: AsyncSession, message_key: str, *, tenant_id: str | None) -> dict[str, UUID]:
    """The ids of the emails with this message key, by tenant: of one tenant, or of the first `MOST_TENANTS` by id."""
    if tenant_id is None:
        return await find_tenants_of_key(session, message_key, most_tenants=MOST_TENANTS)
    found = await find_ids_by_key(session, tenant_id, [message_key])
    return {tenant_id: found[message_key]} if found else {}


def _id(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None
