"""Pauses and resumes the sending of everything, a lane, a tenant or a provider. For the command line and the HTTP API.

All hosts apply a pause within two seconds. During a pause, applications can still enqueue. Workers finish the emails
that are on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.controls import Pause, PauseScope
from dispatcher.domain.email_rules import tenant
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.ops.cached import Cached
from dispatcher.store import controls
from dispatcher.store.connections import AsyncSession

MAX_SECONDS: Final = 366 * 86_400
"""The longest time after which a pause ends by itself."""


CURRENT_SECONDS: Final = 1.0
"""How long all pages share one reading of the pauses."""


class NotPaused(DispatcherError):
    """The pause that an operator wants to end is not in force."""


async def pause(session: AsyncSession, scope: PauseScope, name: str, act: Act, *, seconds: float | None) -> Pause:
    """Begins a pause, and returns it. If the same pause is already in force, it gets the new end, reason and actor.

    Args:
        name: The lane, tenant or provider; empty for `PauseScope.ALL`.
        seconds: How long the pause lasts from now; None if it lasts until `resume`.
    """
    return await controls.begin_pause(session, scope, name, seconds=seconds, actor=act.actor, reason=act.reason)


async def resume(session: AsyncSession, scope: PauseScope, name: str, act: Act) -> Pause:
    """Ends a pause, and returns it. If the scope is a provider, workers that wait for the provider try it again.

    Raises:
        NotPaused: The pause has ended, or never began, and no worker waits for the provider.
    """
    ended = await controls.end_pause(session, scope, name, actor=act.actor, reason=act.reason)
    if ended is None:
        words = f"{scope} {name}".rstrip()
        also = ", and no worker waits for the provider" if scope is PauseScope.PROVIDER else ""
        raise NotPaused(
            f'No pause "{words}" is in force{also}.',
            remedy="`dispatcher pause list` lists what is paused.",
        )
    return ended


def check_target(scope: PauseScope, name: str, settings: Settings) -> str:
    """Checks that a lane, tenant or provider can be paused, and returns the name; empty for `PauseScope.ALL`.

    Raises:
        ValueError: There is no such lane or provider, or no tenant can have this name. The error's text is a sentence.
    """
    if scope is PauseScope.ALL:
        if name:
            raise ValueError("A pause of everything takes no name.")
        return ""
    if not name:
        raise ValueError(f"Give the name of the {scope}.")
    if scope is PauseScope.TENANT:
        try:
            return tenant(name)
        except InvalidEmail as error:
            raise ValueError(f"The tenant's name {error.reason}.") from None
    known = settings.lanes if scope is PauseScope.LANE else settings.providers
    if name not in known:
        setting = "DISPATCHER_LANES" if scope is PauseScope.LANE else "DISPATCHER_PROVIDERS"
        raise ValueError(f"There is no {scope} {name!r}. {setting} has: {', '.join(known)}.")
    return name


async def list_pauses(session: AsyncSession) -> list[Pause]:
    """The pauses in force, in the order in which they began."""
    return await controls.list_pauses(session)


def current_pauses() -> Cached[list[Pause]]:
    """The pauses in force, read at most a second ago. All pages share one reading, so a page needs no query of its
    own."""
    return Cached(list_pauses, CURRENT_SECONDS)


def seen_by(pauses: Sequence[Pause], tenant_id: str | None) -> list[Pause]:
    """The pauses that an operator may see. An operator of one tenant sees only this tenant's pause, and who began it
    without the host. If `tenant_id` is None, the operator sees everything."""
    if tenant_id is None:
        return list(pauses)
    own = (PauseScope.TENANT, tenant_id)
    return [replace(each, actor=each.login) for each in pauses if (each.scope, each.name) == own]
