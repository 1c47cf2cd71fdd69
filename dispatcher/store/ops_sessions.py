"""Stores the sign-in sessions of the operators' page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch


@dataclass(frozen=True, slots=True)
class OpsSession:
    """The session of a browser that is signed in.

    Attributes:
        key_id: The API key with which the operator signed in; the rights are those of the key. None after a sign-in
            with OpenID Connect; in this case, `name`, `tenant_id` and `may_act` are the operator's name and rights.
        idle_seconds: Seconds since the session was last used.
        seconds_left: Seconds until the session expires if it is not used again.
    """

    token_hash: bytes
    key_id: str | None
    name: str
    tenant_id: str | None
    may_act: bool
    idle_seconds: float
    seconds_left: float


async def insert(
    session: AsyncSession,
    token_hash: bytes,
    *,
    key_id: str | None,
    name: str,
    tenant_id: str | None,
    may_act: bool,
    session_seconds: float,
) -> None:
    """Stores a new session, and deletes sessions older than `session_seconds`."""
    values = {
        "token_hash": token_hash,
        "key_id": key_id,
        "name": name,
        "tenant_id": tenant_id,
        "may_act": may_act,
        "session_seconds": session_seconds,
    }
    await fetch(session, "insert_ops_session", values)


async def find(
    session: AsyncSession, token_hashes: Iterable[bytes], *, session_seconds: float, idle_seconds: float
) -> list[OpsSession]:
    """The sessions with these token hashes that have not expired.

    Args:
        session_seconds: A session expires this long after its sign-in.
        idle_seconds: A session also expires this long after its last use.
    """
    values = {"token_hashes": list(token_hashes), "session_seconds": session_seconds, "idle_seconds": idle_seconds}
    return await fetch(session, "find_ops_sessions", values, into=OpsSession)


async def touch(session: AsyncSession, token_hash: bytes) -> None:
    """Records that a session was used now, so that its idle time begins again."""
    await fetch(session, "touch_ops_session", {"token_hash": token_hash})


async def delete(session: AsyncSession, token_hash: bytes) -> None:
    """Ends a session. Idempotent."""
    await fetch(session, "delete_ops_session", {"token_hash": token_hash})


async def use_sign_in(session: AsyncSession, state_hash: bytes) -> bool:
    """Records that a sign-in came back from the issuer. Returns False if it had come back before."""
    return bool(await fetch(session, "use_sign_in", {"state_hash": state_hash}))
