"""For operators: lists and revokes the keys of the HTTP API. A revocation is audited."""

from __future__ import annotations

from dispatcher.domain.api_key import shown
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store import api_keys as store
from dispatcher.store.api_keys import ApiKey
from dispatcher.store.connections import AsyncSession


class UnknownKey(DispatcherError):
    """There is no active key with this id."""


async def list_keys(session: AsyncSession) -> list[ApiKey]:
    """All keys, oldest first. Includes revoked keys."""
    return await store.list_keys(session)


async def revoke(session: AsyncSession, key_id: str, act: Act) -> str:
    """Revokes a key; returns its id. Every API process refuses the key within two seconds.

    Args:
        key_id: The id as `dispatcher keys list` shows it, or the whole key, which contains the id.

    Raises:
        UnknownKey: There is no such key, or it was revoked before.
    """
    bare = key_id.removeprefix("ed_").partition("_")[0]
    if not await store.revoke_key(session, bare, actor=act.actor, reason=act.reason):
        raise UnknownKey(
            f"There is no active key {shown(bare)}.", remedy="`dispatcher keys list` shows the active keys."
        )
    return shown(bare)
