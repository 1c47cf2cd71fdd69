"""Stores the sign-in sessions of the operators' page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.store.statement import statement
from dispatcher.store.statements import Source


@dataclass(frozen=True, slots=True)
class OpsSession:
    """The session of a browser that is signed in.

    Attributes:
        key_id: The API key with which the operator signed in; the rights are those of the key. None after a sign-in
            with OpenID Connect; in this case, `name`, `tenant_id` and `may_act` are the operator's name and rights.
        seconds_left: Seconds until the session expires if it is not used again.
    """

    token_hash: bytes
    key_id: str | None
    name: str
    tenant_id: str | None
    may_act: bool
    idle_seconds: float
    seconds_left: float


@statement
async def insert_ops_session(
    source: Source,
    token_hash: bytes,
    *,
    key_id: str | None,
    name: str,
    tenant_id: str | None,
    may_act: bool,
    session_seconds: float,
) -> None: ...
@statement
async def find_ops_sessions(
    source: Source, token_hashes: Sequence[bytes], *, session_seconds: float, idle_seconds: float
) -> list[OpsSession]: ...
@statement
async def touch_ops_session(source: Source, token_hash: bytes) -> None: ...
@statement
async def delete_ops_session(source: Source, token_hash: bytes) -> None: ...
@statement
async def use_sign_in(source: Source, state_hash: bytes) -> bool: ...
