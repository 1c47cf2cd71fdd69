"""Operators pause and resume: everything, a lane, a tenant or a provider. For the command line and the HTTP API.

All hosts follow within two seconds. Applications may enqueue meanwhile. Emails that are on the wire end as usual.
"""

from __future__ import annotations

from typing import Final

from dispatcher.domain.controls import Pause, PauseScope, subject_of
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store import controls
from dispatcher.store.connections import AsyncSession

MAX_SECONDS: Final = 366 * 86_400
"""The longest time after which a pause ends by itself."""


class NotPaused(DispatcherError):
    """There is no such pause."""


async def pause(session: AsyncSession, scope: PauseScope, name: str, act: Act, *, seconds: float | None) -> Pause:
    """Begins a pause. If it is in force already, it gets this end, reason and actor.

    Args:
        name: The lane, tenant or provider; empty for `PauseScope.ALL`.
        seconds: How long the pause lasts from now; None: until `resume`.
    """
    return await controls.begin_pause(session, scope, name, seconds=seconds, actor=act.actor, reason=act.reason)


async def resume(session: AsyncSession, scope: PauseScope, name: str, act: Act) -> Pause:
    """Ends a pause, and returns it.

    Raises:
        NotPaused: The pause has ended, or never began.
    """
    ended = await controls.end_pause(session, scope, name, actor=act.actor, reason=act.reason)
    if ended is None:
        raise NotPaused(
            f"No pause of {subject_of(scope, name)} is in force.",
            remedy="`dispatcher pause list` lists what is paused.",
        )
    return ended
