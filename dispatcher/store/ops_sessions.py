"""Stores the sign-in sessions of the operators' page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.store.statements import Source, statement


@dataclass(frozen=True, slots=True)
class OpsSession:
    """The session of a browser that is signed in."""

    token_hash: bytes
    # with its rights; None after a sign-in with OpenID Connect: then the following fields are the rights
    key_id: str | None
    name: str
    tenant_id: str | None
    may_act: bool
    idle_seconds: float
    seconds_left: float  # until the session expires if it is not used again


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
