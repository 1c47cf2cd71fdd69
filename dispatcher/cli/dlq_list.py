"""`dispatcher dlq list`: lists or counts failed and held emails, or lists poison messages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

import click

from dispatcher.actions.failures import DeadFilter
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import filter_options
from dispatcher.cli.options import json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_dlq, run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.failures import GROUPINGS, Selection


@click.command("list")
@filter_options(DeadFilter)
@click.option("--by", type=click.Choice(GROUPINGS), help="Count the emails by this field instead of listing them.")
@click.option("--poison", is_flag=True, help="List the poison messages: messages on the DLQ that point to no email.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), metavar="N", default=50, show_default=True, help="Entries per page."
)
@click.option("--before", type=click.UUID, metavar="ID", help="Show the next page: emails older than ID.")
@json_option()
def list_(asked: DeadFilter[Any], by: str | None, poison: bool, limit: int, before: UUID | None, as_json: bool) -> int:
    """List failed and held emails, newest first, or count them by cause.

    \b
    Examples:
      dispatcher dlq list --by error_type --newer-than 1d
      dispatcher dlq list --by domain --error-type timeout_before_send
      dispatcher dlq list --provider ses --text "not verified" --limit 200
      dispatcher dlq list --poison
      dispatcher dlq list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "status": …, "error_type": …, …}], "next": null}
    JSON with --by: {"by": "error_type", "groups": [{"value": …, "emails": …, "oldest_at": …, "newest_at": …, …}]}
    JSON with --poison: {"poison": [{"poison_id": …, "octets": …, "problem": …, "x_death": …}], "total": 2}

    `--by error_type` groups by cause, such as outcome_unknown. `--by error` groups by the text of the last error.

    With `--by domain`, an email counts once for each domain of its recipients. Emails whose content was deleted have no
    recipients any more: they are in the group `-`.

    The command reads only the database. With --poison it reads the DLQ instead; it does not remove or reorder messages.
    """
    if poison:
        return _list_poison(limit, as_json=as_json)
    selection = asked.selected()
    if by:
        return _list_groups(selection, by, as_json=as_json)
    from dispatcher.store.failures import list_dead

    found = run_with_session("dlq", lambda session: list_dead(session, selection, before=before, limit=limit + 1))
    emails = found[:limit]
    following = emails[-1].email_id if len(found) > limit else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "next": following})
    elif emails:
        table = Table(
            "email", "enqueued", "status", "error type", "provider", "attempts", "tenant", "key", "last error"
        )
        for each in emails:
            cause = (each.status, each.error_type, each.provider, each.attempt_count)
            table.add(each.email_id, each.created_at, *cause, each.tenant_id, each.message_key, each.error)
        table.show()
        if following:
            say(f"Next page: --before {following}")
    elif selection.filters or before:
        say("No failed or held email matches.")
    else:
        say("No email is failed or held.")
    return Exit.DONE


def _list_groups(selection: Selection, by: str, *, as_json: bool) -> int:
    from dispatcher.store.failures import group_dead

    groups = run_with_session("dlq", lambda session: group_dead(session, selection, by))
    if as_json:
        print_json({"by": by, "groups": [asdict(group) for group in groups]})
        return Exit.DONE
    # The group is the last column, because an error's text may be long.
    table = Table("emails", "first enqueued", "last enqueued", by.replace("_", " "), right=[0])
    for group in groups:
        table.add(f"{group.emails:,}", group.oldest_at, group.newest_at, group.value)
    if groups:
        table.show()
    say(f"{counted(sum(group.emails for group in groups), 'email')} in total.")
    return Exit.DONE


def _list_poison(limit: int, *, as_json: bool) -> int:
    from dispatcher.ops.poison import glimpse, list_poison

    found = run_with_dlq("dlq", list_poison)
    shown = found[:limit]
    if as_json:
        documents = [
            {
                "poison_id": each.poison_id,
                "position": each.position,
                "octets": len(each.body),
                "problem": each.problem,
                "beginning": glimpse(each.body),
                "headers": each.headers,
                "x_death": each.x_death,
            }
            for each in shown
        ]
        print_json({"poison": documents, "total": len(found)})
        return Exit.DONE
    table = Table("message", "position", "bytes", "dead-lettered", "problem", "first bytes", right=[1, 2])
    for each in shown:
        died = each.x_death[0].get("time", "-") if each.x_death else "published to the DLQ"
        table.add(each.poison_id, each.position + 1, f"{len(each.body):,}", died, each.problem, glimpse(each.body))
    if not found:
        say("There is no poison message: every message on the DLQ belongs to an email.")
        return Exit.DONE
    table.show()
    first = found[0].poison_id
    say(f"{len(shown)} of {counted(len(found), 'poison message')}. `dispatcher show {first}` shows the first.")
    return Exit.DONE
