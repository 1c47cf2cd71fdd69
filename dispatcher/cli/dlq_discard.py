"""`dispatcher dlq discard`: removes dead letters from the DLQ; no email changes its status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.actions.failures import DeadFilter
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import filter_options, require_names_or_filter, select_by_names
from dispatcher.cli.options import audit_options, confirm
from dispatcher.cli.output import counted, say
from dispatcher.cli.sessions import run_with_dlq, run_with_session
from dispatcher.domain.poison_id import is_poison_id

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession

_EXAMPLES_SHOWN: Final = 5


@click.command("discard")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@filter_options(DeadFilter)
@audit_options()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
def discard(names: tuple[str, ...], asked: DeadFilter[Any], act: Act, yes: bool) -> int:
    """Remove dead letters from the DLQ for good. The command sends nothing.

    \b
    Examples:
      dispatcher dlq discard --error-type rejected_recipient --older-than 1w --reason "typos, customers informed"
      dispatcher dlq discard p-3fa9c1d2e0b4 --reason "a test message"

    Select emails by id, by message key, or by a filter. A monitor removes their dead letters from the DLQ, and
    `dlq list` no longer lists the emails. The emails stay failed or held and keep their content and history.
    `dispatcher show` still shows them, `dlq list --discarded` lists them, and `dlq replay ID` can still send an email
    again.

    A poison message (p-…) points to no email. If you discard a poison message, its bytes are deleted. To keep the
    bytes, first run `dispatcher show p-… --export FILE`.

    Exit codes: 0 done, 1 nothing to discard, 2 confirmation needs a terminal or --yes.
    """
    from dispatcher.ops.poison import discard_poison
    from dispatcher.store.failures import discard_dead, find_dead_ids

    async def find(session: AsyncSession) -> list[UUID]:
        return await find_dead_ids(session, await select_by_names(session, asked.selected(), email_names))

    async def discard_messages(session: AsyncSession, dlq: DeadLetterQueue) -> int:
        return sum([await discard_poison(session, dlq, name, act) for name in poison])

    poison = [name for name in names if is_poison_id(name)]
    email_names = tuple(name for name in names if name not in poison)
    ways = "ids or message keys, or a filter such as --error-type"
    require_names_or_filter(names, asked.selected().filters, ways)
    settings = load_settings("database_url", "amqp_url")
    ids = [] if poison and not email_names else run_with_session("dlq", find, settings)
    if not ids and not poison:
        say("No failed or held email matches.")
        return Exit.FAILED
    if not yes:
        examples = ", ".join([*poison, *map(str, ids)][:_EXAMPLES_SHOWN])
        selected = [f"the dead letters of {counted(len(ids), 'email')}"] if ids else []
        selected += [counted(len(poison), "poison message")] if poison else []
        say(f"This discards {' and '.join(selected)}, such as {examples}.")
    confirm("Discard them?", yes=yes)
    if ids:
        emails = run_with_session(
            "dlq", lambda session: discard_dead(session, ids, actor=act.actor, reason=act.reason), settings
        )
        say(f"Discarded the dead letters of {counted(len(emails), 'email')}. A monitor removes them from the DLQ.")
    if poison:
        say(f"Discarded {counted(run_with_dlq('dlq', discard_messages, settings), 'poison message')}.")
    return Exit.DONE
