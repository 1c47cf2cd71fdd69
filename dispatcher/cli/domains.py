"""`dispatcher domains list|set|remove`: the ceilings of recipient domains."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Number, audit_options, json_option, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.controls import MAX_CONCURRENT, MAX_LIMIT, MIN_LIMIT
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act


@click.group("domains")
def command() -> None:
    """Limit the emails that the provider smtp sends to a recipient domain: per second, and at the same time.

    \b
    Examples:
      dispatcher domains set example.org --per-second 5 --concurrent 2
      dispatcher domains list
      dispatcher domains remove example.org

    Use this if a recipient's mail servers limit how many emails or connections they accept from you. The ceilings apply
    to all hosts together. An email that must wait becomes `waiting`, and its worker continues with other emails. So a
    waiting email does not delay emails to other domains. The ceilings do not apply to the providers sendgrid, ses and
    resend, which deliver at their own pace.
    """


@command.command("list")
@json_option()
def list_(*, as_json: bool) -> int:
    """List the domains that have ceilings.

    Also shows how many emails wait for each domain, counted up to 10,000.

    \b
    Examples:
      dispatcher domains list
      dispatcher domains list --json | jq '.[] | select(.waiting > 0)'

    \b
    JSON:
      [{"domain": "example.org", "per_second": 5.0, "concurrent": 2, "attempt_seconds": 0.4, "waiting": 1234}]
    """
    from dispatcher.ops.domains import list_domains

    domains = run_with_session("domains", list_domains)
    if as_json:
        print_json([{**asdict(each.limit), "waiting": each.waiting} for each in domains])
    elif domains:
        shown = Table("domain", "per second", "at the same time", "emails that wait", right=[1, 2, 3])
        for each in domains:
            limit = each.limit
            rate = "-" if limit.per_second is None else f"{limit.per_second:g}"
            most = "-" if limit.concurrent is None else f"{limit.concurrent:,}"
            shown.add(limit.domain, rate, most, f"{each.waiting:,}")
        print_data("\n".join(shown.lines()))
    else:
        say("No recipient domain has a ceiling.")
    return Exit.DONE


@command.command("set")
@click.argument("domain", metavar="DOMAIN")
@click.option(
    "--per-second",
    type=Number(MIN_LIMIT, MAX_LIMIT),
    metavar="N",
    help="The most emails per second, all hosts together. 0.1 is one email in ten seconds.",
)
@click.option(
    "--concurrent",
    type=click.IntRange(1, MAX_CONCURRENT),
    metavar="N",
    help="The most emails that are transmitted at the same time, all hosts together.",
)
@audit_options(is_required=False)
def set_(domain: str, per_second: float | None, concurrent: int | None, act: Act | None) -> int:
    """Set the ceilings of a recipient domain.

    All hosts apply them within two seconds. A ceiling for which you give no option does not change.

    \b
    Examples:
      dispatcher domains set example.org --per-second 5
      dispatcher domains set example.org --concurrent 2 --reason "their postmaster asked"

    DOMAIN is the part of the addresses after the @, without subdomains: example.org does not include
    mail.example.org. An email to several domains with ceilings counts for each of them, and waits until all of them
    allow it.
    """
    from dispatcher.ops import domains

    if per_second is None and concurrent is None:
        raise click.UsageError("Nothing to set. Give --per-second, --concurrent or both.")
    name, decided = _domain(domain), made_act(act, "dispatcher domains set")
    values = {"per_second": per_second, "concurrent": concurrent}
    limit = run_with_session("domains", lambda session: domains.set_limit(session, name, values, decided))
    say(f"{limit.describe()}.")
    return Exit.DONE


@command.command("remove")
@click.argument("domain", metavar="DOMAIN")
@audit_options(is_required=False)
def remove(domain: str, act: Act | None) -> int:
    """Remove the ceilings of a recipient domain.

    The emails that wait for the ceilings become due within two seconds.

    \b
    Example:
      dispatcher domains remove example.org
    """
    from dispatcher.ops import domains

    name, decided = _domain(domain), made_act(act, "dispatcher domains remove")
    run_with_session("domains", lambda session: domains.remove_limit(session, name, decided))
    say(f"{name} has no ceiling any more.")
    return Exit.DONE


def _domain(text: str) -> str:
    from dispatcher.ops.domains import parse_domain

    try:
        return parse_domain(text)
    except InvalidEmail as error:
        raise click.UsageError(f"The domain {text!r} {error.reason}.") from None
