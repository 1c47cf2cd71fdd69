"""`dispatcher held`: emails of which nobody knows whether they arrived, and what a person decides about them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from dispatcher.cli.acting import acting, agreed, is_terminal, opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import named, refuse_both, selecting_held
from dispatcher.cli.text_table import TextTable
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.held import Verdict
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection
    from dispatcher.store.held import HeldEmail

    Decide = Callable[[AsyncSession, UUID, Act], Awaitable[Verdict]]

_WORDS: Final = {
    "confirmed": "confirmed: it is sent.",
    "released": "released: it is pending, and will be sent again.",
    "already_sent": "is sent already; nothing was changed.",
    "under_way": "is not held any more: it is on its way; nothing was changed.",
    "failed": "is not held but failed; nothing was changed. `dispatcher dlq replay` sends it again.",
    "content_pruned": "cannot be sent again: its content was deleted; nothing was changed.",
    "unknown": "is no email of this database.",
}
_NAMED: Final = 20
"""Decisions that are named one by one; more are counted by their result."""
_HARMLESS: Final = {
    "confirm": frozenset({"confirmed", "already_sent"}),
    "release": frozenset({"released", "already_sent", "under_way"}),
}
"""How a decision may end where what was wanted is so, or was so before."""


@click.group("held")
def command() -> None:
    """Emails whose outcome is unknown: they may have arrived. No machine touches them; you decide.

    Such an email went out and no answer came back. Look for its id at the provider: SendGrid's custom argument
    `email_id`, SES's tag `email_id`, SMTP's Message-ID.

    \b
    Examples:
      dispatcher held list
      dispatcher held confirm ID --reason "SendGrid shows it as delivered"
      dispatcher held release ID --reason "the provider never saw it"
    """


@command.command("list")
@selecting_held
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Emails per page.")
@click.option("--after", type=click.UUID, metavar="ID", help="The page after this email; each page names it.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def list_(selection: Selection, limit: int, after: UUID | None, as_json: bool) -> int:
    """List held emails, the oldest first.

    \b
    Examples:
      dispatcher held list --provider ses --older-than 1h
      dispatcher held list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "message_key": …, …}], "total": 1, "next_after": null}
    """
    settings = load_settings("database_url")
    emails, total = asyncio.run(_find(settings, selection, after, limit))
    next_after = emails[-1].email_id if total > len(emails) else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "total": total, "next_after": next_after})
    elif not emails:
        say("No held email matches." if after or _filters(selection) else "No email is held.")
    else:
        _show(emails)
        say(f"{len(emails)} of {total} held." + (f" Next page: --after {next_after}" if next_after else ""))
    return Exit.DONE


@command.command("confirm")
@click.argument("names", metavar="[ID|KEY...]", nargs=-1)
@selecting_held
@acting
@click.option("--yes", is_flag=True, help="With a filter: go on without asking; needed where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: what became of each email.")
def confirm(
    names: tuple[str, ...], selection: Selection, reason: str, actor: str | None, yes: bool, as_json: bool
) -> int:
    """It did arrive: make held emails `sent`. Their dead letters leave the DLQ.

    Name them by ids or message keys, or select them by a filter. A filter first says how many emails it selects and
    names some, then asks. Harmless to repeat. Cannot be undone: a sent email is never sent again.

    \b
    Examples:
      dispatcher held confirm 0198c2f4-… --reason "SendGrid's activity shows it as delivered"
      dispatcher held confirm order-17-receipt --tenant shop --reason "the customer has it"
      dispatcher held confirm --provider ses --older-than 1d --reason "SES shows all of them as delivered"

    Exit codes: 0 they are sent, now or before; 1 none is; 2 nobody could be asked; 3 some are, or RabbitMQ was away,
    and their dead letters are still on the DLQ.
    """
    from dispatcher.ops.held import confirm as decide

    return _decide("confirm", decide, names, selection, (actor, reason), yes=yes, as_json=as_json)


@command.command("release")
@click.argument("names", metavar="[ID|KEY...]", nargs=-1)
@selecting_held
@acting
@click.option("--yes", is_flag=True, help="With a filter: go on without asking; needed where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: what became of each email.")
def release(
    names: tuple[str, ...], selection: Selection, reason: str, actor: str | None, yes: bool, as_json: bool
) -> int:
    """Send held emails again, although they may have arrived. Their dead letters leave the DLQ.

    Name them by ids or message keys, or select them by a filter. A filter first says how many emails it selects and
    names some, then asks. All become due at once: `dispatcher dlq replay --status held --held` sends them at a pace.
    Harmless to repeat: emails that are pending, sending or sent are left alone, and the command says so.

    \b
    Examples:
      dispatcher held release 0198c2f4-… --reason "the provider never saw it"
      dispatcher held release login-code-4711 --tenant shop --reason "the customer asks for it"
      dispatcher held release --text "lease expired" --newer-than 1h --reason "the host was cut off"

    Exit codes: 0 they are on their way, or sent already; 1 none is; 2 nobody could be asked; 3 some are, or RabbitMQ
    was away, and their dead letters are still on the DLQ.
    """
    from dispatcher.ops.held import release as decide

    return _decide("release", decide, names, selection, (actor, reason), yes=yes, as_json=as_json)


def _filters(selection: Selection) -> set[str]:
    """The filters that the operator gave; `status` is always set."""
    return selection.filters.keys() - {"status"}


async def _find(
    settings: Settings, selection: Selection, after: UUID | None, limit: int
) -> tuple[list[HeldEmail], int]:
    from dispatcher.store.held import list_held

    async with opened_session(settings, "held") as session:
        return await list_held(session, selection, after=after, limit=limit)


async def _find_ids(settings: Settings, selection: Selection, names: tuple[str, ...]) -> tuple[UUID, ...]:
    """The emails with these names, in any status; without names, those that the filter selects."""
    from dispatcher.store.failures import find_dead_ids

    async with opened_session(settings, "held") as session:
        chosen = await named(session, selection, names)
        return chosen.email_ids or tuple(await find_dead_ids(session, chosen))


def _decide(
    name: str,
    decide: Decide,
    names: tuple[str, ...],
    selection: Selection,
    actor_and_reason: tuple[str | None, str],
    *,
    yes: bool,
    as_json: bool,
) -> Exit:
    from dispatcher.ops.acts import Act

    refuse_both(names, _filters(selection))
    if not names and not _filters(selection):
        raise click.UsageError("Which ones? Give ids or message keys, or a filter such as --provider.")
    act = Act.of(*actor_and_reason)
    settings = load_settings("database_url", "amqp_url")
    email_ids = asyncio.run(_find_ids(settings, selection, names))
    if not email_ids:
        say("No held email matches.")
        return Exit.FAILED
    if not names and not yes and not _agreed(name, email_ids):
        return Exit.DONE if is_terminal() else Exit.USAGE
    verdicts, letters, fault = asyncio.run(_run(settings, decide, email_ids, act))
    if as_json:
        print_json({"emails": {str(i): verdict for i, verdict in verdicts.items()}, "dead_letters_removed": letters})
    _tell(verdicts)
    if fault:
        say(f"Their dead letters are still on the DLQ: {fault} `dispatcher dlq reconcile --mend` removes them later.")
    well = sum(verdict.value in _HARMLESS[name] for verdict in verdicts.values())
    if well == len(verdicts):
        return Exit.PARTLY if fault else Exit.DONE
    return Exit.PARTLY if well else Exit.FAILED


def _agreed(name: str, email_ids: tuple[UUID, ...]) -> bool:
    some = ", ".join(map(str, email_ids[:5]))
    say(f"{len(email_ids):,} held email{'' if len(email_ids) == 1 else 's'}, such as {some}.")
    return agreed(f"{name.capitalize()} {len(email_ids):,}?")


def _tell(verdicts: dict[UUID, Verdict]) -> None:
    if len(verdicts) > _NAMED:
        for verdict, count in Counter(verdicts.values()).items():
            say(f"{count:,}: {_WORDS[verdict.value]}")
        return
    for email_id, verdict in verdicts.items():
        say(f"{email_id} {_WORDS[verdict.value]}")


async def _run(
    settings: Settings, decide: Decide, email_ids: tuple[UUID, ...], act: Act
) -> tuple[dict[UUID, Verdict], int, str | None]:
    """What became of each, how many dead letters left the DLQ, and why they did not all."""
    from dispatcher.ops.held import Verdict
    from dispatcher.ops.letters import sweep

    async with opened_session(settings, "held") as session:
        verdicts = {email_id: await decide(session, email_id, act) for email_id in email_ids}
        if all(verdict in (Verdict.UNKNOWN, Verdict.FAILED, Verdict.CONTENT_PRUNED) for verdict in verdicts.values()):
            return verdicts, 0, None
        try:
            async with opened_dlq(settings, "held") as dlq:
                return verdicts, await sweep(session, dlq, frozenset(email_ids)), None
        except DispatcherError as error:
            return verdicts, 0, error.message


def _show(emails: list[HeldEmail]) -> None:
    table = TextTable("email", "enqueued", "tenant", "key", "provider", "attempts", "what was seen")
    for email in emails:
        when = email.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        words = (email.tenant_id, email.message_key, email.provider or "-", email.attempt_count)
        table.add(email.email_id, when, *words, email.last_error or "-")
    table.show()
