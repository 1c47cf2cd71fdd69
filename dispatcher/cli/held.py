"""`dispatcher held`: emails of which nobody knows whether they arrived, and what a person decides about them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.acting import Duration, acting, opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import PROVIDER
from dispatcher.cli.text_table import TextTable
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.held import Verdict
    from dispatcher.store.connections import AsyncSession
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
@click.option("--tenant", "tenant_id", metavar="ID", help="Only this tenant's.")
@click.option("--provider", type=PROVIDER, metavar="NAME", help="Only those that went to this provider.")
@click.option("--older-than", type=Duration(), metavar="AGE", help="Enqueued longer ago: 90s, 15m, 2h, 3d, 1w.")
@click.option("--newer-than", type=Duration(), metavar="AGE", help="Enqueued since then.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Emails per page.")
@click.option("--after", type=click.UUID, metavar="ID", help="The page after this email; each page names it.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def list_(limit: int, after: UUID | None, as_json: bool, **filters: Any) -> int:
    """List held emails, the oldest first.

    \b
    Examples:
      dispatcher held list --provider ses --older-than 1h
      dispatcher held list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "message_key": …, …}], "total": 1, "next_after": null}
    """
    settings = load_settings("database_url")
    renamed = {f"{name}_seconds" if name.endswith("_than") else name: value for name, value in filters.items()}
    emails, total = asyncio.run(_find(settings, limit=limit, after=after, **renamed))
    next_after = emails[-1].email_id if total > len(emails) else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "total": total, "next_after": next_after})
    elif not emails:
        say("No held email matches." if after or any(filters.values()) else "No email is held.")
    else:
        _show(emails)
        say(f"{len(emails)} of {total} held." + (f" Next page: --after {next_after}" if next_after else ""))
    return Exit.DONE


@command.command("confirm")
@click.argument("email_ids", metavar="ID...", nargs=-1, required=True, type=click.UUID)
@acting
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: what became of each id.")
def confirm(email_ids: tuple[UUID, ...], reason: str, actor: str | None, as_json: bool) -> int:
    """It did arrive: make held emails `sent`. Their dead letters leave the DLQ.

    Harmless to repeat. Cannot be undone: a sent email is never sent again.

    \b
    Example:
      dispatcher held confirm 0198c2f4-… --reason "SendGrid's activity shows it as delivered"

    Exit codes: 0 they are sent, now or before; 1 none is; 3 some are, or RabbitMQ was away, and their dead letters are
    still on the DLQ.
    """
    from dispatcher.ops.held import confirm as decide

    return _decide("confirm", decide, email_ids, reason, actor, as_json=as_json)


@command.command("release")
@click.argument("email_ids", metavar="ID...", nargs=-1, required=True, type=click.UUID)
@acting
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: what became of each id.")
def release(email_ids: tuple[UUID, ...], reason: str, actor: str | None, as_json: bool) -> int:
    """Send held emails again, although they may have arrived. Their dead letters leave the DLQ.

    Harmless to repeat: what is on its way or sent already is left alone, and said to be so.

    \b
    Example:
      dispatcher held release 0198c2f4-… --reason "the provider never saw it"

    Exit codes: 0 they are on their way, or sent already; 1 none is; 3 some are, or RabbitMQ was away, and their dead
    letters are still on the DLQ.
    """
    from dispatcher.ops.held import release as decide

    return _decide("release", decide, email_ids, reason, actor, as_json=as_json)


async def _find(settings: Settings, **filters: Any) -> tuple[list[HeldEmail], int]:
    from dispatcher.store.held import list_held

    async with opened_session(settings, "held") as session:
        return await list_held(session, **filters)


def _decide(
    name: str, decide: Decide, email_ids: tuple[UUID, ...], reason: str, actor: str | None, *, as_json: bool
) -> Exit:
    from dispatcher.ops.acts import Act

    settings = load_settings("database_url", "amqp_url")
    verdicts, letters, fault = asyncio.run(_run(settings, decide, email_ids, Act.of(actor, reason)))
    if as_json:
        print_json({"emails": {str(i): verdict for i, verdict in verdicts.items()}, "dead_letters_removed": letters})
    for email_id, verdict in verdicts.items():
        say(f"{email_id} {_WORDS[verdict.value]}")
    if fault:
        say(f"Their dead letters are still on the DLQ: {fault} `dispatcher dlq reconcile --mend` removes them later.")
    well = sum(verdict.value in _HARMLESS[name] for verdict in verdicts.values())
    if well == len(verdicts):
        return Exit.PARTLY if fault else Exit.DONE
    return Exit.PARTLY if well else Exit.FAILED


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
