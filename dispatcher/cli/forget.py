"""`dispatcher forget`: erases a recipient from emails, events and suppressions."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.options import audit_options, confirm, json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.ops.acts import Act
    from dispatcher.ops.forgetting import Forgotten

_MAX_LISTED: Final = 20
_PROGRESS_SECONDS: Final = 5.0


@click.command("forget")
@click.argument("address")
@audit_options(reason="The reason, for the audit log, such as a ticket's number. Write no name and no address.")
@click.option("--suppressions", is_flag=True, help="Remove the address's suppression entries, too.")
@click.option("--dry-run", is_flag=True, help="Only count what would be erased.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@json_option("Print one line of JSON: counts, and the ids of emails that were not changed.")
def command(address: str, act: Act, suppressions: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Erase a person's address or phone number from this database. This cannot be undone.

    \b
    Examples:
      dispatcher forget ann@example.com --reason "request 4711" --dry-run
      echo ann@example.com | dispatcher forget - --reason "request 4711" --yes
      dispatcher forget ann@example.com --reason "request 4711" --suppressions
      dispatcher forget "+49 151 12345678" --reason "request 4711"

    With `-`, the command reads the address from stdin, so that the address is not in the shell's history.

    The command erases the content and attachments of every finished email (sent, failed, held or cancelled) that has
    this address in to, cc, bcc or reply_to. It also erases the hash of the address in events, and what providers wrote
    about these emails. For each email it keeps id, key, status and times, as a proof that the email existed. The audit
    log does not contain the address.

    The command keeps the address's suppression entries, so that the address still gets no email. In these entries, it
    erases the masked address and the note. With --suppressions, it removes the entries instead.

    The command reads the recipients of every email that has content. This takes about a minute per million emails. You
    can interrupt the command and run it again.

    Emails that are not finished are listed and not changed: run the command again when they are finished. To finish
    pending and waiting emails at once, cancel them with `dispatcher cancel`.

    The command cannot reach copies outside this database: at the provider, in backups, in logs of other systems.
    See "A person asks for erasure" in docs/runbook.md.

    Exit codes: 0 no email with the address is left; 2 confirmation needs a terminal or --yes; 3 unfinished or locked
    emails are left.

    \b
    JSON: {"dry_run": false, "emails": 2, "contents": 2, "attachments": 0, "events": 3, "suppressions": 1,
           "unfinished": [], "locked": [], "read": 41000}

    In the JSON, `read` is the number of emails whose recipients the command has read.
    """
    from dispatcher.domain.suppression import Recipient
    from dispatcher.ops.forgetting import Forgetting

    text = (sys.stdin.readline() if address == "-" else address).strip()
    if text.startswith("@") or not (text.startswith("+") or "@" in text):
        raise click.UsageError("Give an address, or a phone number that begins with +.")
    try:
        recipient = Recipient.parse(text)
    except InvalidEmail as error:
        raise click.UsageError(f"The {error.field} {error.reason}.") from None
    if not dry_run:
        confirm("Erase this address from the database? This cannot be undone.", yes=yes)
    progress = _Progress()
    forgotten = run_with_session(
        "forget",
        lambda session: Forgetting(session, recipient.text, None if dry_run else act, progress.show).run(
            removes_suppressions=suppressions
        ),
    )
    if as_json:
        document = asdict(forgotten)
        del document["read_until"]
        print_json({"dry_run": dry_run, **document})
    else:
        _report(forgotten, dry_run=dry_run, removes=suppressions)
    return Exit.DONE if forgotten.is_complete else Exit.PARTLY


class _Progress:
    """Prints the progress, at most once every few seconds."""

    def __init__(self) -> None:
        self._next_at = time.monotonic() + _PROGRESS_SECONDS

    def show(self, forgotten: Forgotten) -> None:
        if time.monotonic() < self._next_at or forgotten.read_until is None:
            return
        self._next_at = time.monotonic() + _PROGRESS_SECONDS
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime((forgotten.read_until.int >> 80) / 1000))
        say(
            f"Read {counted(forgotten.read, 'email')}, the last one enqueued at {day}. "
            f"Found the address in {counted(forgotten.emails, 'email')}."
        )


def _report(forgotten: Forgotten, *, dry_run: bool, removes: bool) -> None:
    verb = "Would erase" if dry_run else "Erased"
    say(
        f"{verb} the address from {counted(forgotten.emails, 'email')}: {counted(forgotten.contents, 'content')}, "
        f"{counted(forgotten.attachments, 'attachment')}, {counted(forgotten.events, 'event')}."
    )
    if forgotten.suppressions:
        entries = counted(forgotten.suppressions, "suppression")
        if removes:
            say(f"{'Would remove' if dry_run else 'Removed'} {entries}.")
        else:
            say(f"{'Would keep' if dry_run else 'Kept'} {entries}, so that the address gets no email.")
    remedy = "Cancel such emails, or run the command again when they are finished."
    _list("pending, waiting or sending", remedy, forgotten.unfinished)
    _list("locked by another transaction", "Run the command again later.", forgotten.locked)


def _list(why: str, remedy: str, email_ids: list[UUID]) -> None:
    if not email_ids:
        return
    more = f" and {len(email_ids) - _MAX_LISTED:,} more" if len(email_ids) > _MAX_LISTED else ""
    ids = ", ".join(map(str, email_ids[:_MAX_LISTED]))
    say(f"Not changed: {counted(len(email_ids), 'email')} ({why}): {ids}{more}. {remedy}")
