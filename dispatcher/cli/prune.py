"""`dispatcher prune`: deletes emails, message keys and audit entries that are older than the retention settings."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.store.connections import AsyncSession

WAIT_SECONDS: Final = 10.0
"""How long to wait for another prune to finish. Usually the other prune has little to delete, and ends soon."""


@click.command("prune")
@click.option("--dry-run", is_flag=True, help="Only list the partitions that would be dropped.")
@json_option("Print one line of JSON: dropped partitions, counts by kind, failures.")
def command(dry_run: bool, as_json: bool) -> int:
    """Delete old data: emails' content, whole emails, records of replays, message keys, the audit log and events.

    \b
    Examples:
      dispatcher prune --dry-run
      DISPATCHER_RETAIN_EMAILS_DAYS=90 dispatcher prune --json

    \b
    Settings, in days. 0 keeps the data for ever:
      DISPATCHER_RETAIN_CONTENT_DAYS   subject, bodies, addresses, attachments
      DISPATCHER_RETAIN_EMAILS_DAYS    all other data about an email, and the records of replays
      DISPATCHER_RETAIN_UNDECIDED_DAYS content and row of an undecided email
      DISPATCHER_RETAIN_KEYS_DAYS      message keys: a deleted key may be used again
      DISPATCHER_RETAIN_AUDIT_DAYS     the audit log: which operator did what, when, why
      DISPATCHER_RETAIN_EVENTS_DAYS    the events for webhooks and for applications that poll; must be at least 1

    Emails that are pending, waiting or sending are never pruned. An email is undecided if it is failed or held, and no
    operator has replayed, confirmed, released or discarded it.

    Rows are deleted one weekly partition at a time, so a row may be deleted up to seven days late. If a partition has
    an email that must be kept, the partition is not dropped: only the content of the other emails is deleted. The
    command also deletes the content of sent and cancelled emails with `erase_after_sending`.

    The monitor of every host prunes once an hour. You need this command only if no monitor runs, or if the dispatcher's
    PostgreSQL role does not own the tables. In the second case, run the command with the role that owns the tables.
    Needs DISPATCHER_DATABASE_URL.

    Exit codes: 0 all done, or nothing was old enough; 1 the command could not start, for example because a monitor was
    pruning; 3 some deletions failed, and stderr reports them.
    """
    settings = load_settings("database_url")
    document = run_with_session("prune", partial(_prune, settings, dry_run=dry_run), settings)
    if as_json:
        print_json(document)
    else:
        print_data("\n".join(_lines(document, dry_run=dry_run)))
    return Exit.PARTLY if document.get("failed") else Exit.DONE


async def _prune(settings: Settings, session: AsyncSession, *, dry_run: bool) -> dict[str, Any]:
    from dispatcher.store.named_locks import named_lock
    from dispatcher.store.retention import KINDS, LOCK_NAME, FailedStep, Pruner, Retention

    pruner = Pruner(session, Retention.of(settings))
    if dry_run:
        return {"partitions": await pruner.find_prunable_partitions()}
    names: list[str] = []
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    failed: dict[str, str] = {}
    async with named_lock(session, LOCK_NAME, within_seconds=WAIT_SECONDS) as is_ours:
        if not is_ours:
            raise DispatcherError("A monitor or another `dispatcher prune` is pruning now.", remedy="Try again later.")
        async for step in pruner.prune():
            if isinstance(step, FailedStep):
                failed[step.what] = str(step.fault)
                say(f"{step.what} was not pruned: {step.fault}")
            elif step.name:
                names.append(step.name)
                say(f"dropped {step.name}")
            else:
                counts[step.what] += step.count
    return {"partitions": names, **counts, "failed": failed}


def _lines(document: dict[str, Any], *, dry_run: bool) -> list[str]:
    if dry_run:
        return [f"would drop {name}" for name in document["partitions"]] or ["no partition is old enough"]
    return [
        f"partitions dropped: {len(document['partitions'])}",
        f"contents deleted: {document['content']}",
        f"contents erased after sending: {document['erased_after_sending']}",
        f"message keys deleted: {document['key']}",
        f"replays deleted: {document['replay']}, with their results for {counted(document['replayed'], 'email')}",
        f"audit log entries deleted: {document['act']}",
        f"events for applications deleted: {document['outgoing_event']}",
        f"statistics deleted: {document['stat']}",
    ]
