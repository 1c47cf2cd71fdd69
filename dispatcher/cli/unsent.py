"""`dispatcher cancel` and `dispatcher reschedule`, for emails that are not sent yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import DEFAULT_TENANT, Age, Instant, require_names_or_filter, unsent_filter_options
from dispatcher.cli.options import audit_options, confirm, json_option, known_lane, progress
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session

if TYPE_CHECKING:
    from dispatcher.domain.status import Status
    from dispatcher.ops.acts import Act
    from dispatcher.ops.unsent import Changed, ChangeMany
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.unsent import UnsentFilter

_TEXTS: Final = {
    "cancelled": "cancelled.",
    "rescheduled": "rescheduled.",
    "already_cancelled": "not changed: already cancelled.",
    "too_late": "too late: not changed, because the status is {status}.",
    "expires_first": "not changed: the email expires before the new time.",
    "locked": "not changed: another transaction holds a lock on its row. Try again later.",
    "unknown": "not found in this database.",
}
_SUCCESSFUL: Final = frozenset({"cancelled", "rescheduled", "already_cancelled"})
_MAX_LISTED: Final = 20
"""The most results that are printed one per line. If there are more, the output is a count for each kind of result."""


def _selecting(command: Callable[..., int]) -> Callable[..., int]:
    """A decorator that adds the arguments and options that `cancel` and `reschedule` share."""
    for option in (
        json_option("Print one line of JSON: the number of emails by result, and the emails that were not changed."),
        click.option(
            "--yes",
            is_flag=True,
            help="With a filter or --all: do not ask for confirmation. Required without a terminal.",
        ),
        click.option("--dry-run", is_flag=True, help="Only show how many emails are selected; change nothing."),
        audit_options(
            is_required=False,
            reason="The reason, for the audit log: a few words, without addresses. Required without --dry-run.",
        ),
        click.option("--all", "everything", is_flag=True, help="Select every pending and waiting email."),
        unsent_filter_options,
        click.argument("names", metavar="[ID|KEY...]", nargs=-1),
    ):
        command = option(command)
    return command


@click.command("cancel")
@_selecting
def cancel(**options: Any) -> int:
    """Cancel emails that are pending or waiting: they are never sent.

    \b
    Examples:
      dispatcher cancel order-17-reminder --tenant shop --reason "the customer has paid"
      dispatcher cancel --lane bulk --correlation-id newsletter-48 --dry-run
      dispatcher cancel --lane bulk --correlation-id newsletter-48 --reason "wrong price in it" --yes

    Give the ids or message keys of the emails, select emails by a filter, or select all with --all. With a filter or
    --all, the command first shows the number of selected emails and the ids of a few, and asks for confirmation.

    An email that the command reports as cancelled is never sent. If a worker has already leased an email, it is too
    late: the email is not changed, and the command reports this. The command is safe to repeat.

    Exit codes: 0 all selected emails are cancelled (by this command or by an earlier one), or no email matches the
    filter; 1 no selected email is cancelled; 2 confirmation needs a terminal or --yes; 3 only some are cancelled.
    """
    from dispatcher.ops.unsent import cancel as cancel_emails

    def make(act: Act) -> ChangeMany:
        return lambda session, email_ids: cancel_emails(session, email_ids, act)

    return _change("cancel", make, **options)


@click.command("reschedule")
@click.option("--send-at", type=Instant(), metavar="TIME", help="Send at this time, such as 2026-12-24T18:00:00+01:00.")
@click.option(
    "--send-in",
    type=Age(),
    metavar="DURATION",
    help="Send after this length of time, counted from now, such as 90s, 15m, 2h or 3d.",
)
@click.option("--now", "is_now", is_flag=True, help="Send as soon as possible.")
@_selecting
def reschedule(send_at: datetime | None, send_in: float | None, is_now: bool, **options: Any) -> int:
    """Change the send time of pending or waiting emails.

    \b
    Examples:
      dispatcher reschedule order-17-reminder --tenant shop --send-at 2026-12-24T18:00:00+01:00 --reason "new date"
      dispatcher reschedule --tenant shop --status waiting --now --reason "the mail server is back" --yes
      dispatcher reschedule --lane bulk --send-in 2h --reason "traffic peak" --dry-run

    Give the new time with --send-at, --send-in or --now. Give the ids or message keys of the emails, select emails by a
    filter, or select all with --all. With a filter or --all, the command first shows the number of selected emails and
    the ids of a few, and asks for confirmation.

    The emails wait until the new time. If a worker has already leased an email, it is too late: the email is not
    changed. An email that expires before the new time is not changed, either.

    Exit codes: 0 all selected emails are rescheduled, or no email matches the filter; 1 no selected email is
    rescheduled; 2 confirmation needs a terminal or --yes; 3 only some are rescheduled.
    """
    from dispatcher.ops.unsent import reschedule as reschedule_emails

    if (send_at is not None) + (send_in is not None) + is_now != 1:
        raise click.UsageError("Give exactly one of --send-at, --send-in and --now.")
    until = send_at or datetime.now(UTC) + timedelta(seconds=send_in or 0.0)

    def make(act: Act) -> ChangeMany:
        return lambda session, email_ids: reschedule_emails(session, email_ids, until, act)

    return _change("reschedule", make, **options)


def _change(
    verb: str,
    make: Callable[[Act], ChangeMany],
    *,
    names: tuple[str, ...],
    selection: UnsentFilter,
    everything: bool,
    act: Act | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    from dispatcher.ops.unsent import change_all

    ways = "ids or message keys, a filter such as --lane, or --all"
    require_names_or_filter(names, selection, ways, is_chosen=everything)
    if act is None and not dry_run:
        raise click.UsageError("--reason is missing. Give a few words for the audit log. (--dry-run needs no reason.)")
    settings = load_settings("database_url")
    found, email_ids = run_with_session(verb, lambda session: _find(session, selection, names), settings)
    if not email_ids and selection.lane is not None:
        # Check the lane's name only if the lane has no emails: a lane that was removed from the settings can still have
        # emails.
        known_lane(selection.lane, "--lane")
    if act is None or dry_run or not names:
        _show(found, len(email_ids), as_json=as_json and dry_run)
    if act is None or dry_run or not email_ids:
        return Exit.DONE
    if not names:
        confirm(f"{verb.capitalize()} {counted(len(email_ids), 'email')}?", yes=yes)
    change = make(act)

    async def change_each(session: AsyncSession) -> list[Changed]:
        results = []
        with progress(verb, total=len(email_ids)) as advance:
            async for batch in change_all(session, email_ids, change):
                results += batch
                for _ in batch:
                    advance()
        return results

    return _report(run_with_session(verb, change_each, settings), as_json=as_json)


async def _find(
    session: AsyncSession, selection: UnsentFilter, names: tuple[str, ...]
) -> tuple[dict[Status, tuple[int, list[UUID]]], Sequence[UUID]]:
    """The selected emails that are pending or waiting, by status, and the ids of all selected emails."""
    from dispatcher.ops.names import find_ids
    from dispatcher.ops.unsent import SAMPLE
    from dispatcher.store.unsent import UnsentFilter, count_unsent, find_unsent_ids

    if names:
        ids = await find_ids(session, selection.tenant_id or DEFAULT_TENANT, names)
        return await count_unsent(session, UnsentFilter(email_ids=ids), sample=SAMPLE), ids
    ids = tuple(await find_unsent_ids(session, selection))
    return await count_unsent(session, replace(selection, email_ids=ids), sample=SAMPLE), ids


def _show(found: dict[Status, tuple[int, list[UUID]]], selected: int, *, as_json: bool) -> None:
    others = selected - sum(number for number, _ in found.values())
    if as_json:
        counts = {status: number for status, (number, _) in found.items()}
        print_json({"emails": counts, "samples": {status: ids for status, (_, ids) in found.items()}, "others": others})
        return
    for status, (number, ids) in found.items():
        say(f"{counted(number, 'email')}: {status}. For example {', '.join(map(str, ids))}")
    if others:
        say(f"{counted(others, 'email')}: not pending or waiting. The command does not change them.")
    if not selected:
        say("No pending or waiting email matches.")


def _report(results: list[Changed], *, as_json: bool) -> int:
    counts = Counter(each.change.value for each in results)
    unchanged = [each for each in results if each.change.value not in _SUCCESSFUL]
    if as_json:
        listed = {str(each.email_id): {"result": each.change, "status": each.status} for each in unchanged}
        print_json({"counts": counts, "unchanged": listed})
    if len(results) <= _MAX_LISTED:
        for each in results:
            say(f"{each.email_id}: {_TEXTS[each.change].format(status=each.status)}")
    else:
        for (change, status), number in Counter((each.change, _status(each)) for each in results).items():
            say(f"{counted(number, 'email')}: {_TEXTS[change].format(status=status)}")
    if not unchanged:
        return Exit.DONE
    return Exit.PARTLY if len(unchanged) < len(results) else Exit.FAILED


def _status(result: Changed) -> Status | None:
    """The email's status if the result's text contains it. Otherwise None, so that results with equal texts are counted
    together."""
    return result.status if "{status}" in _TEXTS[result.change] else None
