"""`dispatcher held`: emails of which nobody knows whether they arrived, and what a person decides about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.acting import acting, confirm, in_session, json_option, opened_dlq
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import check_choice, filters_of, named, selecting_held
from dispatcher.cli.table import Table
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.verdicts import Verdict
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

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
_LEAVES_LETTER: Final = frozenset({"unknown", "failed", "content_pruned"})
"""How a decision may end that makes no dead letter stale."""


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
@json_option()
def list_(selection: Selection, limit: int, after: UUID | None, as_json: bool) -> int:
    """List held emails, the oldest first.

    \b
    Examples:
      dispatcher held list --provider ses --older-than 1h
      dispatcher held list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "message_key": …, …}], "total": 1, "next_after": null}
    """
    from dispatcher.store.failures import list_held

    emails, total = in_session("held", lambda session: list_held(session, selection, after=after, limit=limit))
    next_after = emails[-1].email_id if total > len(emails) else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "total": total, "next_after": next_after})
    elif not emails:
        say("No held email matches." if after or filters_of(selection) else "No email is held.")
    else:
        table = Table("email", "enqueued", "tenant", "key", "provider", "attempts", "what was seen")
        for each in emails:
            names = (each.tenant_id, each.message_key, each.provider)
            table.add(each.email_id, each.created_at, *names, each.attempt_count, each.last_error)
        table.show()
        say(f"{len(emails)} of {total} held." + (f" Next page: --after {next_after}" if next_after else ""))
    return Exit.DONE


def _deciding(command: Callable[..., int]) -> Callable[..., int]:
    """The arguments and options of a decision."""
    for option in (
        json_option("One line of JSON: what became of each email."),
        click.option(
            "--yes", is_flag=True, help="With a filter: go on without asking; needed where there is no terminal."
        ),
        acting(),
        selecting_held,
        click.argument("names", metavar="[ID|KEY...]", nargs=-1),
    ):
        command = option(command)
    return command


@command.command("confirm")
@_deciding
def confirm_(**options: Any) -> int:
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
    from dispatcher.ops.verdicts import confirm as decide

    return _decide("confirm", decide, **options)


@command.command("release")
@_deciding
def release(**options: Any) -> int:
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
    from dispatcher.ops.verdicts import release as decide

    return _decide("release", decide, **options)


def _decide(
    name: str,
    decide: Decide,
    *,
    names: tuple[str, ...],
    selection: Selection,
    act: Act,
    yes: bool,
    as_json: bool,
) -> Exit:
    from dispatcher.ops.letters import sweep
    from dispatcher.store.failures import find_dead_ids

    async def find(session: AsyncSession) -> tuple[UUID, ...]:
        chosen = await named(session, selection, names)
        return chosen.email_ids or tuple(await find_dead_ids(session, chosen))

    async def decide_all(session: AsyncSession) -> tuple[dict[UUID, Verdict], int, str | None]:
        """What became of each, how many dead letters left the DLQ, and why they did not all."""
        verdicts = {email_id: await decide(session, email_id, act) for email_id in email_ids}
        if all(verdict.value in _LEAVES_LETTER for verdict in verdicts.values()):
            return verdicts, 0, None
        try:
            async with opened_dlq(settings, "held") as dlq:
                return verdicts, await sweep(session, dlq, frozenset(email_ids)), None
        except DispatcherError as error:
            return verdicts, 0, error.message

    check_choice(names, selection, "ids or message keys, or a filter such as --provider")
    settings = load_settings("database_url", "amqp_url")
    email_ids = in_session("held", find, settings)
    if not email_ids:
        say("No held email matches.")
        return Exit.FAILED
    if not names:
        some = ", ".join(map(str, email_ids[:5]))
        say(f"{len(email_ids):,} held email{'' if len(email_ids) == 1 else 's'}, such as {some}.")
        confirm(f"{name.capitalize()} {len(email_ids):,}?", yes=yes)
    verdicts, letters, fault = in_session("held", decide_all, settings)
    if as_json:
        print_json({"emails": {str(i): verdict for i, verdict in verdicts.items()}, "dead_letters_removed": letters})
    _report(verdicts)
    if fault:
        say(f"Their dead letters are still on the DLQ: {fault} `dispatcher dlq reconcile --fix` removes them later.")
    well = sum(verdict.value in _HARMLESS[name] for verdict in verdicts.values())
    if well == len(verdicts):
        return Exit.PARTLY if fault else Exit.DONE
    return Exit.PARTLY if well else Exit.FAILED


def _report(verdicts: dict[UUID, Verdict]) -> None:
    if len(verdicts) > _NAMED:
        for verdict, count in Counter(verdicts.values()).items():
            say(f"{count:,}: {_WORDS[verdict.value]}")
        return
    for email_id, verdict in verdicts.items():
        say(f"{email_id} {_WORDS[verdict.value]}")
