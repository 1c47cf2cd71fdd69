"""`dispatcher webhooks`: adds, lists, tests and removes the URLs that get events about emails."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import Age
from dispatcher.cli.options import audit_options, json_option, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.outgoing_event import TYPES, OutgoingKind, kind_of
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.webhooks import Webhook

_NUMBER: Final = click.argument("number", type=click.IntRange(1, 2**63 - 1))
_SAVE: Final = "Save this secret now: it is not shown again. The receiver needs it to verify signatures."


@click.group("webhooks")
def command() -> None:
    """Manage webhooks, which post events about emails to an application: sent, failed, held, delivered, bounced,
    complained, suppressed, cancelled.

    \b
    Examples:
      dispatcher webhooks add https://shop.example.com/hooks --tenant shop --events email.sent,email.bounced
      dispatcher webhooks test 1
      dispatcher webhooks list
      dispatcher webhooks replay 1 --since 2h

    An event may be posted more than once, each time with the same `webhook-id`. Each post is signed according to
    Standard Webhooks. The monitor of `dispatcher run` posts the events. Instead of a webhook, an application can poll
    for events with GET /v1/events of the HTTP API. See docs/webhooks.md.
    """


def _kinds(_context: click.Context, _parameter: click.Parameter, text: str) -> list[OutgoingKind]:
    try:
        return [kind_of(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _tenant(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else tenant(text)
    except InvalidEmail as error:
        raise click.BadParameter(error.reason) from None


def _since(context: click.Context, parameter: click.Parameter, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        try:
            return datetime.now(UTC) - timedelta(seconds=Age().convert(text, parameter, context))
        except (click.BadParameter, OverflowError):
            words = f"{text!r} is neither an age (90s, 2h, 3d) nor a time (2026-11-21T10:00:00Z)"
            raise click.BadParameter(words) from None
    if instant.tzinfo is None:
        raise click.BadParameter("the time needs a zone. Example: 2026-11-21T10:00:00Z")
    return instant


@command.command("add")
@click.argument("url")
@click.option(
    "--tenant",
    "tenant_id",
    callback=_tenant,
    help="The tenant whose events the webhook gets. Required without --all-tenants.",
)
@click.option("--all-tenants", is_flag=True, help="The webhook gets the events of all tenants.")
@click.option(
    "--events",
    "kinds",
    callback=_kinds,
    default=",".join(TYPES),
    metavar="KINDS",
    help=f"The types of events that the webhook gets, separated by commas: {', '.join(TYPES)}.  [default: all]",
)
@click.option(
    "--recipients",
    is_flag=True,
    help="Include recipients' addresses in the events of an email, until the email's content is deleted.",
)
@audit_options(is_required=False)
@json_option()
def add(
    url: str,
    tenant_id: str | None,
    all_tenants: bool,
    kinds: list[OutgoingKind],
    recipients: bool,
    act: Act | None,
    as_json: bool,
) -> int:
    """Add a webhook and print its secret. The webhook gets the events that are recorded from now on.

    \b
    Examples:
      dispatcher webhooks add https://shop.example.com/hooks --tenant shop
      dispatcher webhooks add https://ops.example.com/hooks --all-tenants --events email.failed,email.held
    """
    from dispatcher.ops import webhooks

    if all_tenants == (tenant_id is not None):
        raise click.UsageError("Give either --tenant or --all-tenants.")
    settings = load_settings("database_url")
    try:
        checked = webhooks.checked_url(url, allow_private=settings.webhooks_allow_private)
    except ValueError as error:
        raise click.UsageError(f"URL {error}.") from None
    made = run_with_session(
        "webhooks",
        lambda session: webhooks.add(
            session,
            checked,
            tenant_id=tenant_id,
            kinds=kinds,
            with_recipients=recipients,
            act=made_act(act, "dispatcher webhooks add"),
        ),
        settings,
    )
    if as_json:
        print_json({"webhook": made.webhook_id, "secret": made.secret})
    else:
        print_data(made.secret)
        say(f"Added webhook {made.webhook_id}. {_SAVE}")
    return Exit.DONE


@command.command("list")
@click.option("--tenant", "tenant_id", callback=_tenant, help="Only webhooks of this tenant.")
@json_option()
def list_(tenant_id: str | None, as_json: bool) -> int:
    """List the webhooks: state, lag, retries, last error. The list never shows secrets.

    \b
    Examples:
      dispatcher webhooks list
      dispatcher webhooks list --json | jq '.[] | select(.state == "disabled")'

    "retries" is the number of refused events that wait to be posted again. "given up" is the number of refused events
    that are not posted again. "lag" is the age of the oldest event that the receiver has neither accepted nor refused.
    """
    from dispatcher.ops.webhooks import list_webhooks

    found = run_with_session("webhooks", partial(list_webhooks, tenant_id=tenant_id))
    if as_json:
        print_json([_document(webhook) for webhook in found])
    elif found:
        table = Table("webhook", "url", "tenant", "events", "state", "lag", "retries", "given up", "last error")
        for each in found:
            kinds = "all" if len(each.kinds) == len(TYPES) else " ".join(each.kinds)
            state = "failing" if each.state == "active" and each.failing_since else each.state
            lag = "-" if each.lag_seconds is None else f"{each.lag_seconds:,.0f} s"
            who = each.tenant_id or "all"
            table.add(each.webhook_id, each.url, who, kinds, state, lag, each.retries, each.given_up, each.last_error)
        table.show()
    else:
        say("There is no webhook. To add one, see `dispatcher webhooks add --help`.")
    return Exit.DONE


def _document(webhook: Webhook) -> dict[str, Any]:
    from dataclasses import asdict

    document = asdict(webhook)
    return {"webhook": document.pop("webhook_id"), **document}


@command.command("test")
@_NUMBER
@json_option()
def test(number: int, as_json: bool) -> int:
    """Post a test event, even to a disabled webhook. The event has the type `webhook.test`.

    \b
    Example:
      dispatcher webhooks test 1

    Exit codes: 0 the receiver accepted the event, 1 it did not.
    """
    from dispatcher.ops import webhooks

    settings = load_settings("database_url")

    async def post(session: AsyncSession) -> webhooks.TestResult:
        return await webhooks.post_test(await webhooks.find_test_target(session, number), settings)

    result = run_with_session("webhooks", post, settings)
    if as_json:
        print_json({"webhook": number, "ok": result.is_accepted, "detail": result.detail})
    else:
        say(f"Webhook {number}: {result.detail}.")
    return Exit.DONE if result.is_accepted else Exit.FAILED


@command.command("remove")
@_NUMBER
@audit_options(is_required=False)
def remove(number: int, act: Act | None) -> int:
    """Remove a webhook. Events that were not posted yet are never posted to it.

    \b
    Example:
      dispatcher webhooks remove 1
    """
    from dispatcher.ops import webhooks

    run_with_session(
        "webhooks", lambda session: webhooks.remove(session, number, made_act(act, "dispatcher webhooks remove"))
    )
    say(f"Removed webhook {number}.")
    return Exit.DONE


@command.command("rotate")
@_NUMBER
@audit_options(is_required=False)
@json_option()
def rotate(number: int, act: Act | None, as_json: bool) -> int:
    """Give a webhook a new secret and print it. For 24 hours, events are signed with both secrets, old and new.

    \b
    Example:
      dispatcher webhooks rotate 1
    """
    from dispatcher.ops import webhooks

    secret = run_with_session(
        "webhooks", lambda session: webhooks.rotate(session, number, made_act(act, "dispatcher webhooks rotate"))
    )
    if as_json:
        print_json({"webhook": number, "secret": secret})
    else:
        print_data(secret)
        say(_SAVE)
    return Exit.DONE


@command.command("enable")
@_NUMBER
@audit_options(is_required=False)
def enable(number: int, act: Act | None) -> int:
    """Make a webhook active again, and post its waiting events.

    \b
    Example:
      dispatcher webhooks enable 1
    """
    from dispatcher.ops import webhooks

    run_with_session(
        "webhooks", lambda session: webhooks.enable(session, number, made_act(act, "dispatcher webhooks enable"))
    )
    say(f"Webhook {number} is active.")
    return Exit.DONE


@command.command("disable")
@_NUMBER
@audit_options(is_required=False)
def disable(number: int, act: Act | None) -> int:
    """Post nothing to a webhook until `webhooks enable`. Its events wait.

    Waiting events that are older than DISPATCHER_RETAIN_EVENTS_DAYS are deleted: the webhook never gets them. An alert
    reminds operators of disabled webhooks.

    \b
    Example:
      dispatcher webhooks disable 1 --reason "the receiver moves"
    """
    from dispatcher.ops import webhooks

    decided = made_act(act, "dispatcher webhooks disable")
    run_with_session("webhooks", lambda session: webhooks.disable(session, number, decided))
    say(f"Webhook {number} is disabled.")
    return Exit.DONE


@command.command("replay")
@_NUMBER
@click.option(
    "--since",
    required=True,
    callback=_since,
    metavar="AGE|TIME",
    help="Post again the events from this time on: an age such as 2h or 3d, or a time with its zone.",
)
@audit_options(is_required=False)
def replay(number: int, since: datetime, act: Act | None) -> int:
    """Post again all events since a given time. The events keep their ids.

    Events older than DISPATCHER_RETAIN_EVENTS_DAYS are deleted, so they cannot be posted again.

    \b
    Examples:
      dispatcher webhooks replay 1 --since 2h
      dispatcher webhooks replay 1 --since 2026-11-21T10:00:00Z
    """
    from dispatcher.ops import webhooks

    run_with_session(
        "webhooks", lambda session: webhooks.replay(session, number, since, made_act(act, "dispatcher webhooks replay"))
    )
    say(f"Webhook {number} gets the events since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC again.")
    return Exit.DONE
