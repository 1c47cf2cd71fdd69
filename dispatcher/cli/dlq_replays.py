"""`dispatcher dlq replays`: how far they are."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dispatcher.cli.acting import opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.text_table import TextTable

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.store.replays import Replay


@click.command("replays")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def command(limit: int, as_json: bool) -> int:
    """List replays, the latest first: who, why, and how far they are.

    `interrupted` is one whose command ended half-way, be it because somebody's transaction holds the emails that are
    left: `dispatcher dlq replay --resume REPLAY` goes on.

    \b
    Example:
      dispatcher dlq replays
    """
    found = asyncio.run(_list(load_settings("database_url"), limit))
    if as_json:
        print_json({"replays": [replay_json(each) for each in found]})
        return Exit.DONE
    columns = ("replay", "state", "emails", "replayed", "skipped", "waiting", "rate", "by", "reason", "what")
    table = TextTable(*columns, right=[2, 3, 4, 5])
    for each in found:
        what = ", ".join(f"{name}={value}" for name, value in each.selection.items()) or "all"
        counts = (each.total, each.replayed, sum(each.skipped.values()), each.waiting)
        rate = f"{each.per_second:g}/s" if each.per_second else "-"
        words = (rate, each.actor, each.reason, f"{each.source}: {what}")
        table.add(each.replay_id, state_word(each), *(f"{count:,}" for count in counts), *words)
    if found:
        table.show()
    else:
        say("There was no replay yet.")
    return Exit.DONE


def replay_json(found: Replay) -> dict[str, Any]:
    """A replay as scripts rely on it."""
    return {**asdict(found), "state": state_word(found), "total": found.total, "replayed": found.replayed}


def state_word(found: Replay) -> str:
    """Its state; `interrupted` if it should go on and nobody is at it."""
    return "interrupted" if found.state.value == "running" and not found.is_attended else found.state.value


async def _list(settings: Settings, limit: int) -> list[Replay]:
    from dispatcher.store.replays import list_replays

    async with opened_session(settings, "dlq") as session:
        return await list_replays(session, limit=limit)
