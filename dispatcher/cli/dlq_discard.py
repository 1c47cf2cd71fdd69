"""`dispatcher dlq discard`: what leaves the DLQ without being sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.acting import acting, agreed, is_terminal, opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import say
from dispatcher.cli.selecting import named, refuse_both, selecting
from dispatcher.domain.poison_id import is_poison_id

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.store.failures import Selection

_NAMED: Final = 5


@click.command("discard")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@selecting
@acting
@click.option("--yes", is_flag=True, help="Go on without asking; needed where there is no terminal.")
def command(names: tuple[str, ...], selection: Selection, reason: str, actor: str | None, yes: bool) -> int:
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
    from dispatcher.ops.acts import Act

    act = Act.of(actor, reason)
    poison = [name for name in names if is_poison_id(name)]
    email_names = tuple(name for name in names if name not in poison)
    refuse_both(names, selection.filters)
    if not names and not selection.filters:
        raise click.UsageError("Which ones? Give ids or message keys, or a filter such as --error-type.")
    settings = load_settings("database_url", "amqp_url")
    ids = [] if poison and not email_names else asyncio.run(_find_ids(settings, selection, email_names))
    if not ids and not poison:
        say("No failed or held email matches.")
        return Exit.FAILED
    if not yes and not _agreed(ids, poison):
        return Exit.DONE if is_terminal() else Exit.USAGE
    emails, letters, messages = asyncio.run(_discard(settings, ids, poison, act))
    if emails or not messages:
        say(f"Discarded: the dead letters of {emails:,} emails; {letters:,} left the DLQ.")
    if messages:
        say(f"Discarded: {messages:,} poison messages.")
    return Exit.DONE


def _agreed(ids: list[UUID], poison: list[str]) -> bool:
    some = ", ".join([*poison, *map(str, ids)][:_NAMED])
    say(f"{len(ids):,} emails' dead letters and {len(poison)} poison messages would be discarded, such as {some}.")
    return agreed("Discard them?")


async def _find_ids(settings: Settings, selection: Selection, names: tuple[str, ...]) -> list[UUID]:
    from dispatcher.store.failures import find_dead_ids

    async with opened_session(settings, "dlq") as session:
        return await find_dead_ids(session, await named(session, selection, names))


async def _discard(settings: Settings, ids: list[UUID], poison: list[str], act: Act) -> tuple[int, int, int]:
    from dispatcher.ops.letters import discard as discard_letters
    from dispatcher.ops.letters import sweep
    from dispatcher.ops.poison import discard_poison

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        discarded = await discard_letters(session, ids, act)
        letters = await sweep(session, dlq, frozenset(ids)) if ids else 0
        messages = [await discard_poison(session, dlq, name, act) for name in poison]
        return len(discarded), letters, sum(messages)
