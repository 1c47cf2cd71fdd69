"""`dispatcher dlq reconcile`: whether the DLQ tells the truth, and what mends it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.acting import opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.reconcile import Differences

_NAMED: Final = 5


@click.command("reconcile")
@click.option("--mend", is_flag=True, help="Mend what can be mended; needs a --reason.")
@click.option("--reason", metavar="TEXT", help="Why, for the audit: a few words, no addresses.")
@click.option("--actor", metavar="NAME", help="Who decides; the system's user@host if not said.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON, every difference with its ids.")
def command(mend: bool, reason: str | None, actor: str | None, as_json: bool) -> int:
    """Compare the DLQ with the failed and held emails, and mend the differences by --mend.

    The database is the truth: a dead letter that is missing is published again by the relay; one whose email was sent,
    replayed or discarded is removed, and so is a second one for the same failure, and one whose email is gone: pruned,
    or lost in a restore. Other messages without an email are told and left alone: see `dlq list --poison`.

    \b
    Examples:
      dispatcher dlq reconcile
      dispatcher dlq reconcile --mend --reason "RabbitMQ was rebuilt"

    Exit codes: 0 they agree, or do now; 3 they differ.
    """
    from dispatcher.ops.acts import Act

    if mend and not reason:
        raise click.UsageError("--mend needs a --reason: a few words for the audit.")
    act = Act.of(actor, reason or "") if mend else None
    found = asyncio.run(_reconcile(load_settings("database_url", "amqp_url"), act))
    if as_json:
        print_json(asdict(found))
    _tell(found)
    return Exit.DONE if found.mended or not found.count else Exit.PARTLY


async def _reconcile(settings: Settings, act: Act | None) -> Differences:
    from dispatcher.ops.reconcile import reconcile

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        return await reconcile(session, dlq, act)


def _tell(found: Differences) -> None:
    told = {
        "missing": (found.missing, "published again"),
        "stale": (found.stale, "removed"),
        "doubles": (found.doubles, "removed"),
        "of emails that are gone": (found.orphans, "removed"),
    }
    say(f"{found.depth:,} messages on the DLQ: {found.letters:,} tell of how their email stands.")
    for name, (ids, done) in told.items():
        if ids:
            some = ", ".join(map(str, ids[:_NAMED]))
            say(f"{len(ids):,} {name}{f', {done}' if found.mended else ''}: {some}{'…' if ids[_NAMED:] else ''}")
    if found.poison:
        say(f"{len(found.poison):,} without an email: `dispatcher dlq list --poison` lists them.")
    if not found.count:
        say("The DLQ and the database agree.")
    elif not found.mended:
        say('`dispatcher dlq reconcile --mend --reason "…"` mends what differs.')
