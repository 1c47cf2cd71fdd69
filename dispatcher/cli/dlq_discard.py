"""`dispatcher dlq discard`: what leaves the DLQ without being sent."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from dispatcher.cli.acting import acting, opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import say
from dispatcher.cli.selecting import all_of, selecting
from dispatcher.domain.poison_id import is_poison_id

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.store.failures import Selection

_NAMED: Final = 5


@click.command("discard")
@click.argument("names", metavar="[ID...|p-…]", nargs=-1)
@selecting
@acting
@click.option("--yes", is_flag=True, help="Go on without asking; needed where there is no terminal.")
def command(names: tuple[str, ...], selection: Selection, reason: str, actor: str | None, yes: bool) -> int:
    """Take dead letters off the DLQ for good, without sending anything.

    Of an email, by id or filter: it stays failed or held, its row, content and history stay, and `dlq show` still tells
    its story; it leaves the DLQ and `dlq list`. `dlq list --discarded` lists those, and `dlq replay ID` still sends one
    again. Of a poison message, p-…: its bytes are gone; `dlq show p-… --export FILE` keeps them.

    \b
    Examples:
      dispatcher dlq discard --error-type rejected_recipient --older-than 1w --reason "typos, customers told"
      dispatcher dlq discard p-3fa9c1d2e0b4 --reason "a test message"

    Exit codes: 0 done, 1 nothing to discard, 2 nobody could be asked.
    """
    from dispatcher.ops.acts import Act

    act = Act.of(actor, reason)
    settings = load_settings("database_url", "amqp_url")
    poison = [name for name in names if is_poison_id(name)]
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
    if emails or not messages:
        say(f"Discarded: the dead letters of {emails:,} emails; {letters:,} left the DLQ.")
    if messages:
        say(f"Discarded: {messages:,} poison messages.")
    return Exit.DONE


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
