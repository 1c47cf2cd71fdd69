"""`dispatcher held`: lists the emails whose outcome is unknown, and confirms or releases them for an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import filters_of, held_filter_options, require_names_or_filter, select_by_names
from dispatcher.cli.options import audit_options, confirm, json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import open_dlq, run_with_session
from dispatcher.cli.table import Table
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.verdicts import Verdict
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

    Decide = Callable[[AsyncSession, UUID, Act], Awaitable[Verdict]]

_VERDICT_TEXTS: Final = {
    "confirmed": "confirmed; the status is now sent.",
    "released": "released; the status is now pending, and the email will be sent again.",
    "already_sent": "not changed: already sent.",
    "under_way": "not changed: no longer held, but pending, waiting or sending.",
    "cancelled": "not changed: cancelled.",
    "expired": "not changed: the email has expired, and is never sent again.",
    "failed": "not changed: failed, not held. `dispatcher dlq replay` sends it again.",
    "content_pruned": "not changed: the email cannot be sent again, because its content was deleted.",
    "unknown": "not found in this database.",
}
_MAX_LISTED: Final = 20
"""The most results that are printed one per line. If there are more, the output is a count for each kind of result."""
_SUCCESSFUL: Final = {
    "confirm": frozenset({"confirmed", "already_sent"}),
    "release": frozenset({"released", "already_sent", "under_way"}),
}
"""The results that count as success, by command. Some mean that the email already had the intended status."""
_KEEPS_DEAD_LETTER: Final = frozenset({"unknown", "failed", "content_pruned"})
"""The results that leave the email's dead letter on the DLQ."""


@click.group("held")
def command() -> None:
    """List emails whose outcome is unknown, and resolve each: confirm (it arrived) or release (send it again).

    \b
    Examples:
      dispatcher held list
      dispatcher held confirm ID --reason "SendGrid shows it as delivered"
      dispatcher held release ID --reason "the provider never received it"

    A held email may have been transmitted, but the provider's answer is not known. The dispatcher does not guess
    whether the email arrived. To find out, search for the email's id at the provider: the id is in SendGrid's custom
    argument `email_id`, in the tag `email_id` of SES and Resend, and in the Message-ID of SMTP.
    """


@command.command("list")
@held_filter_options(takes_keys=False)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), metavar="N", default=50, show_default=True, help="Emails per page."
)
@click.option("--after", type=click.UUID, metavar="ID", help="Show the next page: the emails after ID.")
@json_option()
def list_(selection: Selection, limit: int, after: UUID | None, as_json: bool) -> int:
    """List held emails, oldest first.

    \b
    Examples:
      dispatcher held list --provider ses --older-than 1h
      dispatcher held list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "message_key": …, …}], "total": 1, "next_after": null}
    """
    from dispatcher.store.failures import list_held

    emails, total = run_with_session("held", lambda session: list_held(session, selection, after=after, limit=limit))
    next_after = emails[-1].email_id if total > len(emails) else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "total": total, "next_after": next_after})
    elif not emails:
        say("No held email matches." if after or filters_of(selection) else "No email is held.")
    else:
        table = Table("email", "enqueued", "tenant", "key", "provider", "attempts", "last error")
        for each in emails:
            names = (each.tenant_id, each.message_key, each.provider)
            table.add(each.email_id, each.created_at, *names, each.attempt_count, each.last_error)
        table.show()
        say(f"{len(emails)} of {total} held." + (f" Next page: --after {next_after}" if next_after else ""))
    return Exit.DONE


def _decision_options(command: Callable[..., int]) -> Callable[..., int]:
    """A decorator that adds the arguments and options that `held confirm` and `held release` share."""
    for option in (
        json_option("Print one line of JSON: the result for each email."),
        click.option(
            "--yes", is_flag=True, help="With a filter: do not ask for confirmation; required without a terminal."
        ),
        audit_options(),
        held_filter_options(takes_keys=True),
        click.argument("names", metavar="[ID|KEY...]", nargs=-1),
    ):
        command = option(command)
    return command


@command.command("confirm")
@_decision_options
def confirm_(**options: Any) -> int:
    """Mark held emails as `sent`, because they did arrive. This cannot be undone.

    \b
    Examples:
      dispatcher held confirm 0198c2f4-… --reason "SendGrid's activity shows it as delivered"
      dispatcher held confirm order-17-receipt --tenant shop --reason "the customer has it"
      dispatcher held confirm --provider ses --older-than 1d --reason "SES shows all of them as delivered"

    Give the ids or message keys of the emails, or select emails by a filter. With a filter, the command first shows the
    number of selected emails and the ids of a few, and asks for confirmation. The dead letters of confirmed emails are
    removed from the DLQ. The command is safe to repeat.

    Exit codes: 0 all selected emails now have the status `sent`; 1 no selected email has the status `sent`; 2
    confirmation needs a terminal or --yes; 3 only some have the status `sent`, or RabbitMQ was unreachable, so that
    dead letters remain on the DLQ.
    """
    from dispatcher.ops.verdicts import confirm as decide

    return _decide("confirm", decide, **options)


@command.command("release")
@_decision_options
def release(**options: Any) -> int:
    """Send held emails again, although they may have arrived.

    \b
    Examples:
      dispatcher held release 0198c2f4-… --reason "the provider never received it"
      dispatcher held release login-code-4711 --tenant shop --reason "the customer asks for it"
      dispatcher held release --text "lease expired" --newer-than 1h --reason "the host lost its network"

    Give the ids or message keys of the emails, or select emails by a filter. With a filter, the command first shows the
    number of selected emails and the ids of a few, and asks for confirmation. The dead letters of released emails are
    removed from the DLQ. The command is safe to repeat: it does not change emails that are already pending, waiting,
    sending or sent.

    All released emails become due immediately. To send them at a limited rate, use `dispatcher dlq replay --status held
    --held` instead: --status selects held emails, and --held permits the replay to send them.

    Exit codes: 0 all selected emails are now pending, waiting, sending or sent; 1 no selected email has one of these
    statuses; 2 confirmation needs a terminal or --yes; 3 only some have one of these statuses, or RabbitMQ was
    unreachable, so that dead letters remain on the DLQ.
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
    from dispatcher.ops.dead_letters import sweep
    from dispatcher.store.failures import find_dead_ids

    async def find(session: AsyncSession) -> tuple[UUID, ...]:
        chosen = await select_by_names(session, selection, names)
        return chosen.email_ids or tuple(await find_dead_ids(session, chosen))

    async def decide_all(session: AsyncSession) -> tuple[dict[UUID, Verdict], int, str | None]:
        """Returns the result for each email, the number of removed dead letters, and why none could be removed."""
        verdicts = {email_id: await decide(session, email_id, act) for email_id in email_ids}
        if all(verdict.value in _KEEPS_DEAD_LETTER for verdict in verdicts.values()):
            return verdicts, 0, None
        try:
            async with open_dlq(settings, "held") as dlq:
                return verdicts, await sweep(session, dlq, frozenset(email_ids)), None
        except DispatcherError as error:
            return verdicts, 0, error.message

    require_names_or_filter(names, selection, "ids or message keys, or a filter such as --provider")
    settings = load_settings("database_url", "amqp_url")
    email_ids = run_with_session("held", find, settings)
    if not email_ids:
        say("No held email matches.")
        return Exit.FAILED
    if not names:
        emails, examples = counted(len(email_ids), "held email"), ", ".join(map(str, email_ids[:5]))
        say(f"The filter selects {emails}, such as {examples}.")
        confirm(f"{name.capitalize()} {emails}?", yes=yes)
    verdicts, removed, fault = run_with_session("held", decide_all, settings)
    if as_json:
        print_json({"emails": {str(i): verdict for i, verdict in verdicts.items()}, "dead_letters_removed": removed})
    _report(verdicts)
    if fault:
        say(f"The dead letters are still on the DLQ: {fault} To remove them later: dispatcher dlq reconcile --fix")
    successes = sum(verdict.value in _SUCCESSFUL[name] for verdict in verdicts.values())
    if successes == len(verdicts):
        return Exit.PARTLY if fault else Exit.DONE
    return Exit.PARTLY if successes else Exit.FAILED


def _report(verdicts: dict[UUID, Verdict]) -> None:
    if len(verdicts) > _MAX_LISTED:
        for verdict, count in Counter(verdicts.values()).items():
            say(f"{counted(count, 'email')}: {_VERDICT_TEXTS[verdict.value]}")
        return
    for email_id, verdict in verdicts.items():
        say(f"{email_id}: {_VERDICT_TEXTS[verdict.value]}")
