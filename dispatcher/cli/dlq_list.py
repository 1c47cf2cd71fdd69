"""`dispatcher dlq list`: what failed or is held, and why."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.acting import opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import selecting
from dispatcher.cli.text_table import TextTable

if TYPE_CHECKING:
    from datetime import datetime

    from dispatcher.config import Settings
    from dispatcher.ops.poison import Poison
    from dispatcher.store.failures import DeadEmail, Group, Selection

_GROUPS: Final = ("error_type", "provider", "tenant", "status", "error")


@click.command("list")
@selecting
@click.option("--by", type=click.Choice(_GROUPS), help="Count instead, by this.")
@click.option("--poison", is_flag=True, help="Messages on the DLQ that have no email.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Entries per page.")
@click.option("--before", type=click.UUID, metavar="ID", help="The page before this email; each page names it.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def command(selection: Selection, by: str | None, poison: bool, limit: int, before: UUID | None, as_json: bool) -> int:
    """List failed and held emails, the newest first, or count them by what they have in common.

    Reads the database alone, except for --poison, which looks into the DLQ: that takes nothing off it and changes no
    order. An age counts from when the email was enqueued.

    \b
    Examples:
      dispatcher dlq list --by error_type --newer-than 1d
      dispatcher dlq list --provider ses --text "not verified" --limit 200
      dispatcher dlq list --poison
      dispatcher dlq list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "status": …, "error_type": …, …}], "total": 1, "next_before": null}
      --by:     {"by": "error_type", "groups": [{"value": …, "emails": …, "oldest_at": …, "newest_at": …}]}
      --poison: {"poison": [{"poison_id": …, "octets": …, "problem": …, "x_death": …}], "total": 2}
    """
    if poison:
        return _show_poison(asyncio.run(_find_poison(load_settings("database_url", "amqp_url"))), limit, as_json)
    settings = load_settings("database_url")
    if by:
        return _show_groups(by, asyncio.run(_count(settings, selection, by)), as_json=as_json)
    emails, total = asyncio.run(_find(settings, selection, before, limit))
    next_before = emails[-1].email_id if total > len(emails) else None
    if as_json:
        print_json({"emails": [asdict(email) for email in emails], "total": total, "next_before": next_before})
        return Exit.DONE
    if not emails:
        say(
            "No failed or held email matches."
            if selection.filters or before
            else "Nothing failed, and nothing is held."
        )
        return Exit.DONE
    _show(emails)
    say(f"{len(emails)} of {total:,}." + (f" Next page: --before {next_before}" if next_before else ""))
    return Exit.DONE


async def _find(
    settings: Settings, selection: Selection, before: UUID | None, limit: int
) -> tuple[list[DeadEmail], int]:
    from dispatcher.store.failures import list_dead

    async with opened_session(settings, "dlq") as session:
        return await list_dead(session, selection, before=before, limit=limit)


async def _count(settings: Settings, selection: Selection, by: str) -> list[Group]:
    from dispatcher.store.failures import count_dead

    async with opened_session(settings, "dlq") as session:
        return await count_dead(session, selection, by)


async def _find_poison(settings: Settings) -> list[Poison]:
    from dispatcher.ops.poison import list_poison

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        return await list_poison(session, dlq)


def _show(emails: list[DeadEmail]) -> None:
    table = TextTable("email", "enqueued", "status", "error", "provider", "attempts", "tenant", "key", "words")
    for email in emails:
        words = (email.error_type or "-", email.provider or "-", email.attempt_count)
        names = (email.tenant_id, email.message_key, email.error or "-")
        table.add(email.email_id, _instant(email.created_at), email.status, *words, *names)
    table.show()


def _show_groups(by: str, groups: list[Group], *, as_json: bool) -> int:
    if as_json:
        print_json({"by": by, "groups": [asdict(group) for group in groups]})
        return Exit.DONE
    # The group comes last: an error's text may be long.
    table = TextTable("emails", "first enqueued", "last enqueued", by.replace("_", " "), right=[0])
    for group in groups:
        table.add(f"{group.emails:,}", _instant(group.oldest_at), _instant(group.newest_at), group.value)
    if groups:
        table.show()
    say(f"{sum(group.emails for group in groups):,} in all.")
    return Exit.DONE


def _show_poison(found: list[Poison], limit: int, as_json: bool) -> int:
    from dispatcher.ops.poison import glimpse

    if as_json:
        print_json({"poison": [_poison_json(each) for each in found[:limit]], "total": len(found)})
        return Exit.DONE
    table = TextTable("message", "place", "octets", "dead-lettered", "problem", "beginning", right=[1, 2])
    for each in found[:limit]:
        died = each.x_death[0].get("time", "-") if each.x_death else "published there"
        table.add(each.poison_id, each.position + 1, f"{len(each.body):,}", died, each.problem, glimpse(each.body))
    if not found:
        say("Every message on the DLQ tells of an email.")
        return Exit.DONE
    table.show()
    shown = min(limit, len(found))
    say(f"{shown} of {len(found)} without an email. `dispatcher dlq show {found[0].poison_id}` shows the first.")
    return Exit.DONE


def _poison_json(each: Poison) -> dict[str, Any]:
    from dispatcher.ops.poison import glimpse

    return {
        "poison_id": each.poison_id,
        "position": each.position,
        "octets": len(each.body),
        "problem": each.problem,
        "beginning": glimpse(each.body),
        "headers": each.headers,
        "x_death": each.x_death,
    }


def _instant(instant: datetime) -> str:
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S")
