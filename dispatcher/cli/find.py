"""`dispatcher find`: the table of the emails that were found."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.actions.action import document
from dispatcher.actions.emails import FoundPage, ListEmails
from dispatcher.cli import face
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table

_OPTIONAL: Final = ("attempts", "provider", "tenant", "email", "enqueued", "error type", "delivery", "to")


def _find(*, as_json: bool, **given: Any) -> int:
    asked = face.read_options(ListEmails, given)
    from dispatcher.actions.runner import Face, Who, run

    settings = load_settings("database_url")
    with face.in_words(ListEmails):
        page = run_with_session("find", lambda session: run(session, asked, Who(Face.COMMAND), settings), settings)
    assert isinstance(page, FoundPage)
    if as_json:
        print_json(document(ListEmails, page))
    else:
        _show(page)
    return Exit.DONE if page.rows or page.next else Exit.FAILED


def _show(page: FoundPage) -> None:
    if page.rows:
        states = ("status", "delivery", "to", "error type", "provider", "attempts")
        table = Table("email", "key", "enqueued", *states, "tenant", optional=_OPTIONAL)
        for row in page.rows:
            state = (row.error_type, row.provider, row.attempt_count)
            to = ", ".join(row.recipients or ()) or None
            delivery = row.delivery and row.delivery.words
            table.add(row.id, row.message_key, row.created_at, row.status, delivery, to, *state, row.tenant_id)
        table.show()
    if page.was_cut:
        say(
            f"{counted(len(page.rows), 'email')} so far. The page ended early, because it reads a limited number of "
            "emails. To make the search faster, add --since."
        )
    else:
        say(f"{counted(len(page.rows), 'email')}." if page.rows else ListEmails.nothing)
    if page.next is not None:
        say(f"Next page: --after {page.next}")
    if page.recipients_since is not None:
        since = page.recipients_since.astimezone().isoformat(sep=" ", timespec="seconds")
        why = "an early release stored no hashes of recipients"
        say(f"Emails that were enqueued before {since} are not found by recipient: {why}.")


command = face.command(ListEmails)
command.callback = _find
