"""`dispatcher dlq replays` and `stop`: how far replays are, and no further."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.acting import acting, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import plain_table, print_json, print_table, say
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.store.replays import Replay


@click.command("replays")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def replays(limit: int, as_json: bool) -> int:
    """List replays, the latest first: who, why, and how far they are.

    `interrupted` is one whose command ended half-way: `dispatcher dlq replay --resume REPLAY` goes on.

    \b
    Example:
      dispatcher dlq replays
    """
    found = asyncio.run(_list(load_settings("database_url"), limit))
    if as_json:
        print_json({"replays": [replay_json(each) for each in found]})
        return Exit.DONE
    table = plain_table("replay", "state", "emails", "replayed", "skipped", "waiting", "rate", "by", "reason", "what")
    from rich.text import Text

    for each in found:
        what = ", ".join(f"{name}={value}" for name, value in each.selection.items()) or "all"
        counts = (each.total, each.replayed, sum(each.skipped.values()), each.waiting)
        rate = f"{each.per_second:g}/s" if each.per_second else "-"
        words = map(Text, (rate, each.actor, each.reason, f"{each.source}: {what}"))
        table.add_row(str(each.replay_id), _state(each), *(f"{count:,}" for count in counts), *words)
    if found:
        print_table(table)
    say(f"{len(found)} replays.")
    return Exit.DONE


@click.command("stop")
@click.argument("replay_id", metavar="REPLAY", type=int)
@acting
def stop(replay_id: int, reason: str, actor: str | None) -> int:
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


COMMANDS: Final = (replays, stop)


def replay_json(found: Replay) -> dict[str, Any]:
    """A replay as scripts rely on it."""
    return {**asdict(found), "state": _state(found), "total": found.total, "replayed": found.replayed}


def _state(found: Replay) -> str:
    return "interrupted" if found.state.value == "running" and not found.is_attended else found.state.value


async def _list(settings: Settings, limit: int) -> list[Replay]:
    from dispatcher.store.replays import list_replays

    async with opened_session(settings, "dlq") as session:
        return await list_replays(session, limit=limit)


async def _stop(settings: Settings, replay_id: int, act: Act) -> Replay | None:
    from dispatcher.ops.replays import stop

    async with opened_session(settings, "dlq") as session:
        return await stop(session, replay_id, act)
