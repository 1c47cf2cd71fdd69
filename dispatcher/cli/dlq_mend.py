"""`dispatcher dlq discard` and `reconcile`: what leaves the DLQ without being sent, and whether it tells the truth."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from dispatcher.cli.acting import acting, opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import all_of, selecting

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.reconcile import Differences
    from dispatcher.store.failures import Selection

_NAMED: Final = 5


@click.command("discard")
@click.argument("names", metavar="[ID...|p-…]", nargs=-1)
@selecting
@acting
@click.option("--yes", is_flag=True, help="Do not ask.")
def discard(names: tuple[str, ...], selection: Selection, reason: str, actor: str | None, yes: bool) -> int:
    """Take dead letters off the DLQ for good, without sending anything.

    Of an email, by id or filter: it stays failed or held, its row, content and history stay, and `dlq show` still tells
    its story; it leaves the DLQ and `dlq list`. `dlq list --discarded` lists those, and `dlq replay ID` still sends one
    again. Of a poison message, p-…: its bytes are gone; `dlq show p-… --export FILE` keeps them.

    \b
    Examples:
      dispatcher dlq discard --error-type rejected_recipient --older-than 1w --reason "typos, customers told"
      dispatcher dlq discard p-3fa9c1d2e0b4 --reason "a test message"

    Exit codes: 0 done, 1 nothing to discard.
    """
    from dispatcher.ops.acts import Act

    act = Act.of(actor, reason)
    settings = load_settings("database_url", "amqp_url")
    poison = [name for name in names if name.startswith("p-")]
    try:
        email_ids = tuple(UUID(name) for name in names if name not in poison)
    except ValueError:
        raise click.UsageError("An email's id is a UUID; a poison message's name begins with p-.") from None
    if names and selection.filters:
        raise click.UsageError("Give ids or a filter, not both.")
    if not names and not selection.filters:
        raise click.UsageError("Which ones? Give ids, or a filter such as --error-type.")
    ids = [] if poison and not email_ids else asyncio.run(_find_ids(settings, all_of(selection, email_ids)))
    if not ids and not poison:
        say("No failed or held email matches.")
        return Exit.FAILED
    if not yes and not _agreed(ids, poison):
        return Exit.DONE if sys.stdin.isatty() else Exit.USAGE
    emails, letters, messages = asyncio.run(_discard(settings, ids, poison, act))
    say(f"Discarded: {emails:,} emails' dead letters ({letters:,} left the DLQ), {messages:,} poison messages.")
    return Exit.DONE


@click.command("reconcile")
@click.option("--mend", is_flag=True, help="Mend what can be mended; needs a --reason.")
@click.option("--reason", metavar="TEXT", help="Why, for the audit: a few words, no addresses.")
@click.option("--actor", metavar="NAME", help="Who decides; the system's user@host if not said.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON, every difference with its ids.")
def reconcile(mend: bool, reason: str | None, actor: str | None, as_json: bool) -> int:
    """Compare the DLQ with the failed and held emails, and mend the differences by --mend.

    The database is the truth: a dead letter that is missing is published again by the relay; one whose email was sent,
    replayed or discarded is removed, and so is a second one for the same failure. Messages without an email are told
    and left alone: see `dlq list --poison`.

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


COMMANDS: Final = (discard, reconcile)


def _agreed(ids: list[UUID], poison: list[str]) -> bool:
    some = ", ".join([*poison, *map(str, ids)][:_NAMED])
    say(f"{len(ids):,} emails' dead letters and {len(poison)} poison messages would be discarded, such as {some}.")
    if sys.stdin.isatty() and sys.stderr.isatty():
        return click.confirm("Discard them?", err=True)
    say("Nothing was changed. Without a terminal to ask on, --yes goes on.")
    return False


async def _find_ids(settings: Settings, selection: Selection) -> list[UUID]:
    from dispatcher.store.failures import find_dead_ids

    async with opened_session(settings, "dlq") as session:
        return await find_dead_ids(session, selection)


async def _discard(settings: Settings, ids: list[UUID], poison: list[str], act: Act) -> tuple[int, int, int]:
    from dispatcher.ops.letters import discard as discard_letters
    from dispatcher.ops.letters import sweep
    from dispatcher.ops.poison import discard_poison

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        discarded = await discard_letters(session, ids, act)
        letters = await sweep(session, dlq, frozenset(ids)) if ids else 0
        messages = [await discard_poison(session, dlq, name, act) for name in poison]
        return len(discarded), letters, sum(messages)


async def _reconcile(settings: Settings, act: Act | None) -> Differences:
    from dispatcher.ops.reconcile import reconcile as compare

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        return await compare(session, dlq, act)


def _tell(found: Differences) -> None:
    done = {"missing": "published again", "stale": "removed", "doubles": "removed"}
    say(f"{found.depth:,} messages on the DLQ: {found.letters:,} tell of how their email stands.")
    for name, ids in (("missing", found.missing), ("stale", found.stale), ("doubles", found.doubles)):
        if ids:
            some = ", ".join(map(str, ids[:_NAMED]))
            say(f"{len(ids):,} {name}{f', {done[name]}' if found.mended else ''}: {some}{'…' if ids[_NAMED:] else ''}")
    if found.poison:
        say(f"{len(found.poison):,} without an email: `dispatcher dlq list --poison` lists them.")
    if found.count and not found.mended:
        say('`dispatcher dlq reconcile --mend --reason "…"` mends what differs.')
