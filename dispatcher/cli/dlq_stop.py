"""`dispatcher dlq stop`: a replay goes no further."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from dispatcher.cli.acting import acting, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import say
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.store.replays import Replay


@click.command("stop")
@click.argument("replay_id", metavar="REPLAY", type=int)
@acting
def command(replay_id: int, reason: str, actor: str | None) -> int:
    """Let a replay go no further. What it replayed stays replayed; `dlq replay --resume` goes on later.

    \b
    Example:
      dispatcher dlq stop 7 --reason "the provider throttles us"
    """
    from dispatcher.ops.acts import Act

    found = asyncio.run(_stop(load_settings("database_url"), replay_id, Act.of(actor, reason)))
    if found is None:
        raise DispatcherError(f"There is no replay {replay_id}.", remedy="`dispatcher dlq replays` lists them.")
    say(f"Replay {replay_id} is {found.state}: {found.replayed:,} of {found.total:,} replayed, {found.waiting:,} left.")
    return Exit.DONE


async def _stop(settings: Settings, replay_id: int, act: Act) -> Replay | None:
    from dispatcher.ops.replays import stop

    async with opened_session(settings, "dlq") as session:
        return await stop(session, replay_id, act)
