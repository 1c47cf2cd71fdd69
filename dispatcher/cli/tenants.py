"""`dispatcher tenants list|set|unset`: tenants' rates and shares."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Number, audit_options, json_option, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.controls import MAX_LIMIT, MIN_LIMIT
from dispatcher.domain.email_rules import tenant
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act


@click.group("tenants")
def command() -> None:
    """List and set the rates and shares of tenants.

    \b
    Examples:
      dispatcher tenants list
      dispatcher tenants set acme --per-second 50 --weight 2
      dispatcher tenants unset acme

    A tenant is an application or a customer that `dispatcher enqueue --tenant` or an API key names. Within a lane,
    tenants take turns: a tenant with weight 2 sends twice as many emails as a tenant with weight 1, while both
    have due emails. A tenant for which nothing is set has weight 1, and no ceiling for its emails per second.
    """


@command.command("list")
@json_option()
def list_(*, as_json: bool) -> int:
    """List the tenants whose rate or share was set.

    \b
    Examples:
      dispatcher tenants list
      dispatcher tenants list --json | jq -r '.[].tenant_id'
    """
    from dispatcher.ops.lanes import list_limits

    limits = run_with_session("tenants", list_limits)
    if as_json:
        print_json([asdict(limit) for limit in limits])
    elif limits:
        shown = Table("tenant", "weight", "per second")
        for limit in limits:
            shown.add(
                limit.tenant_id, f"{limit.weight:g}", "-" if limit.per_second is None else f"{limit.per_second:g}"
            )
        print_data("\n".join(shown.lines()))
    else:
        say("Nothing is set: all tenants have weight 1 and no ceiling.")
    return Exit.DONE


@command.command("set")
@click.argument("tenant_id", metavar="TENANT")
@click.option(
    "--per-second",
    type=Number(MIN_LIMIT, MAX_LIMIT),
    metavar="N",
    help="The most emails per second, all hosts together.",
)
@click.option(
    "--weight",
    type=Number(MIN_LIMIT, MAX_LIMIT),
    metavar="N",
    help="The share within a lane, relative to the other tenants that have due emails.",
)
@audit_options(is_required=False)
def set_(tenant_id: str, per_second: float | None, weight: float | None, act: Act | None) -> int:
    """Set a tenant's rate and share. All hosts apply them within two seconds. Values for which you give no option do
    not change.

    \b
    Examples:
      dispatcher tenants set acme --per-second 50 --weight 2
    """
    from dispatcher.ops import lanes

    if per_second is None and weight is None:
        raise click.UsageError("Nothing to set. Give --per-second, --weight or both.")
    name, decided = _tenant(tenant_id), made_act(act, "dispatcher tenants set")
    values = {"per_second": per_second, "weight": weight}
    limit = run_with_session("tenants", lambda session: lanes.set_limit(session, name, values, decided))
    say(lanes.describe_limit(limit))
    return Exit.DONE


@command.command("unset")
@click.argument("tenant_id", metavar="TENANT")
@audit_options(is_required=False)
def unset(tenant_id: str, act: Act | None) -> int:
    """Delete a tenant's rate and share. The tenant then has weight 1, and no ceiling for its emails per second.

    \b
    Example:
      dispatcher tenants unset acme
    """
    from dispatcher.ops import lanes

    name, decided = _tenant(tenant_id), made_act(act, "dispatcher tenants unset")
    run_with_session("tenants", lambda session: lanes.unset_limit(session, name, decided))
    say(f"Unset tenant {name}.")
    return Exit.DONE


def _tenant(text: str) -> str:
    try:
        return tenant(text)
    except InvalidEmail as error:
        raise click.UsageError(f"The tenant's name {error.reason}.") from None
