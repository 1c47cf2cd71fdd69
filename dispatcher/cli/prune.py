"""`dispatcher prune`: forgets what is older than the settings keep it, now."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.acting import in_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.store.connections import AsyncSession

WAIT_SECONDS: Final = 10.0
"""For a monitor that is at it: usually it has nothing to do."""


@click.command("prune")
@click.option("--dry-run", is_flag=True, help="Only name the partitions that would be dropped.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: partitions, counts by kind, and what failed.")
def command(dry_run: bool, as_json: bool) -> int:
    """Forget old emails: their content, then the emails themselves, and their message keys and the record of acts last.

    The monitor of every host does so each hour; this is for a host without one, or for a user of PostgreSQL who owns
    the tables where the dispatcher's own does not. Emails leave by whole weeks, up to seven days after their time.
    Deletes the content of sent emails that have `erase_after_sending`. Needs DISPATCHER_DATABASE_URL.

    Pending, in-flight and undecided emails are kept. An undecided email is failed or held, and no operator has
    replayed, confirmed, released or discarded it. Its weekly partition is kept, too; the content of the other emails in
    that partition is deleted.

    \b
    Settings, in days; 0 keeps for ever:
      DISPATCHER_RETAIN_CONTENT_DAYS   subject, bodies, addresses, attachments
      DISPATCHER_RETAIN_EMAILS_DAYS    everything else about an email; replays
      DISPATCHER_RETAIN_UNDECIDED_DAYS content and row of an undecided email
      DISPATCHER_RETAIN_KEYS_DAYS      message keys: a forgotten key may be used again
      DISPATCHER_RETAIN_AUDIT_DAYS     operators' acts: who, when, why

    \b
    Examples:
      dispatcher prune --dry-run
      DISPATCHER_RETAIN_EMAILS_DAYS=90 dispatcher prune --json

    Exit codes: 0 all of it is done; 1 nothing could be; 3 a part failed and is named, the others are done.
    """
    settings = load_settings("database_url")
    told = in_session("prune", partial(_look if dry_run else _prune, settings), settings)
    if as_json:
        print_json(told)
    else:
        print_data("\n".join(_lines(told, dry_run=dry_run)))
    return Exit.PARTLY if told.get("failed") else Exit.DONE


async def _look(settings: Settings, session: AsyncSession) -> dict[str, Any]:
    from dispatcher.store.retention import Pruning, Retention

    return {"partitions": await Pruning(session, Retention.of(settings)).find_prunable_partitions()}


async def _prune(settings: Settings, session: AsyncSession) -> dict[str, Any]:
    from dispatcher.store.retention import KINDS, TURN, Failed, Pruning, Retention
    from dispatcher.store.turns import turn

    names: list[str] = []
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    failed: dict[str, str] = {}
    async with turn(session, TURN, within_seconds=WAIT_SECONDS) as is_ours:
        if not is_ours:
            raise DispatcherError("A monitor or another `dispatcher prune` is at it.", remedy="Try again later.")
        async for step in Pruning(session, Retention.of(settings)).prune():
            if isinstance(step, Failed):
                failed[step.what] = str(step.fault)
                say(f"{step.what} not pruned: {step.fault}")
            elif step.name:
                names.append(step.name)
                say(f"dropped {step.name}")
            else:
                counts[step.what] += step.count
    return {"partitions": names, **counts, "failed": failed}


def _lines(told: dict[str, Any], *, dry_run: bool) -> list[str]:
    if dry_run:
        return [f"would drop {name}" for name in told["partitions"]] or ["no partition is old enough"]
    return [
        f"partitions dropped: {len(told['partitions'])}",
        f"contents forgotten: {told['content']}",
        f"contents erased after sending: {told['erased_after_sending']}",
        f"message keys forgotten: {told['key']}",
        f"replays forgotten: {told['replay']}, with what they noted of {told['replayed']} emails",
        f"operators' acts forgotten: {told['act']}",
    ]
