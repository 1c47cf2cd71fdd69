"""`dispatcher dlq discard` and `reconcile`: dead letters leave the DLQ, and no email changes."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from dispatcher.cli.acting import acting, at_dlq, confirm, in_session, json_option
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import check_choice, named, selecting
from dispatcher.domain.poison_id import is_poison_id

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.ops.acts import Act
    from dispatcher.ops.reconcile import Differences
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

_NAMED: Final = 5


@click.command("discard")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@selecting()
@acting()
@click.option("--yes", is_flag=True, help="Go on without asking; needed where there is no terminal.")
def discard(names: tuple[str, ...], selection: Selection, act: Act, yes: bool) -> int:
    """Take dead letters off the DLQ for good, without sending anything.

    Emails, by id, message key or filter: their dead letters leave the DLQ and `dlq list`. The emails stay failed or
    held, with their content and history. `dlq show` still shows them, `dlq list --discarded` lists them, and
    `dlq replay ID` still sends one again. Poison messages, p-…: their bytes are deleted. To keep them, first run
    `dlq show p-… --export FILE`.

    \b
    Examples:
      dispatcher dlq discard --error-type rejected_recipient --older-than 1w --reason "typos, customers told"
      dispatcher dlq discard p-3fa9c1d2e0b4 --reason "a test message"

    Exit codes: 0 done, 1 nothing to discard, 2 nobody could be asked.
    """
    from dispatcher.ops.letters import discard as discard_letters
    from dispatcher.ops.letters import sweep
    from dispatcher.ops.poison import discard_poison
    from dispatcher.store.failures import find_dead_ids

    async def find(session: AsyncSession) -> list[UUID]:
        return await find_dead_ids(session, await named(session, selection, email_names))

    async def discard_all(session: AsyncSession, dlq: DeadLetterQueue) -> tuple[int, int, int]:
        discarded = await discard_letters(session, ids, act)
        letters = await sweep(session, dlq, frozenset(ids)) if ids else 0
        messages = [await discard_poison(session, dlq, name, act) for name in poison]
        return len(discarded), letters, sum(messages)

    poison = [name for name in names if is_poison_id(name)]
    email_names = tuple(name for name in names if name not in poison)
    check_choice(names, selection, "ids or message keys, or a filter such as --error-type")
    settings = load_settings("database_url", "amqp_url")
    ids = [] if poison and not email_names else in_session("dlq", find, settings)
    if not ids and not poison:
        say("No failed or held email matches.")
        return Exit.FAILED
    if not yes:
        some = ", ".join([*poison, *map(str, ids)][:_NAMED])
        say(f"{len(ids):,} emails' dead letters and {len(poison)} poison messages would be discarded, such as {some}.")
    confirm("Discard them?", yes=yes)
    emails, letters, messages = at_dlq("dlq", discard_all, settings)
    if emails or not messages:
        say(f"Discarded: the dead letters of {emails:,} emails; {letters:,} left the DLQ.")
    if messages:
        say(f"Discarded: {messages:,} poison messages.")
    return Exit.DONE


@click.command("reconcile")
@click.option("--fix", is_flag=True, help="Mend what can be mended; needs a --reason.")
@acting(is_required=False, actor="Who decides; the system's user@host if not said.")
@json_option("One line of JSON, every difference with its ids.")
def reconcile(fix: bool, act: Act | None, as_json: bool) -> int:
    """Compare the DLQ with the failed and held emails, and mend the differences by --fix.

    The database is the truth: a dead letter that is missing is published again by the relay; one whose email was sent,
    replayed or discarded is removed, and so is a second one for the same failure, and one whose email is gone: pruned,
    or lost in a restore. Other messages without an email are told and left alone: see `dlq list --poison`.

    \b
    Examples:
      dispatcher dlq reconcile
      dispatcher dlq reconcile --fix --reason "RabbitMQ was rebuilt"

    Exit codes: 0 they agree, or do now; 3 they differ.
    """
    from dispatcher.ops.reconcile import reconcile as compare

    if fix and not act:
        raise click.UsageError("--fix needs a --reason: a few words for the audit.")
    found = at_dlq("dlq", partial(compare, act=act if fix else None))
    if as_json:
        print_json(asdict(found))
    _report(found)
    return Exit.DONE if found.fixed or not found.count else Exit.PARTLY


def _report(found: Differences) -> None:
    parts = {
        "missing": (found.missing, "published again"),
        "stale": (found.stale, "removed"),
        "duplicates": (found.duplicates, "removed"),
        "of emails that are gone": (found.orphans, "removed"),
    }
    say(f"{found.depth:,} messages on the DLQ: {found.dead_letters:,} tell of how their email stands.")
    for name, (ids, done) in parts.items():
        if ids:
            some = ", ".join(map(str, ids[:_NAMED]))
            say(f"{len(ids):,} {name}{f', {done}' if found.fixed else ''}: {some}{'…' if ids[_NAMED:] else ''}")
    if found.poison:
        say(f"{len(found.poison):,} without an email: `dispatcher dlq list --poison` lists them.")
    if not found.count:
        say("The DLQ and the database agree.")
    elif not found.fixed:
        say('`dispatcher dlq reconcile --fix --reason "…"` mends what differs.')
