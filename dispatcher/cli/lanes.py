"""`dispatcher lanes list|set|unset`: the lanes' shares and policies, and the lanes of senders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import AgeOrOff
from dispatcher.cli.options import Number, audit_options, json_option, known_lane, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.controls import MAX_LIMIT, MIN_LIMIT, LaneRule
from dispatcher.domain.status import OnUncertain

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession


def _sender_option(about: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    text = f"{about}: an address (otp@example.com) or a domain (@example.com)."
    return click.option("--from", "sender", metavar="SENDER", help=text)


@click.group("lanes")
def command() -> None:
    """List the lanes of emails, and set their shares, policies and senders.

    \b
    Examples:
      dispatcher lanes list
      dispatcher lanes set --from otp@example.com urgent
      dispatcher lanes set urgent --on-uncertain resend
      dispatcher lanes set bulk --weight 5 --redeliver-for 4h
      dispatcher lanes unset bulk

    DISPATCHER_LANES names the lanes, most urgent first. Each lane has its own send queue, and a share of the workers
    and of the providers' rates. A lane's policy says how often and for how long an email is tried, and what happens to
    an email whose outcome is unknown. See docs/lanes.md.
    """


@command.command("list", short_help="List the lanes: shares, policies, senders.")
@json_option()
def list_(*, as_json: bool) -> int:
    """List the lanes with their shares and policies, and the lanes of senders.

    \b
    Examples:
      dispatcher lanes list
      dispatcher lanes list --json | jq '.lanes[] | {lane, share}'

    `share` is the lane's part of the workers and of the providers' rates while every lane has emails. If a lane has no
    emails, the other lanes use its share. In the table, `-` means that nothing is set for the lane, so the host's
    setting applies: DISPATCHER_ON_UNCERTAIN, DISPATCHER_MAX_ATTEMPTS or DISPATCHER_REDELIVER_FOR.
    """
    from dispatcher.ops.lanes import LaneShare, list_rules, list_shares

    settings = load_settings("database_url")

    async def read(session: AsyncSession) -> tuple[list[LaneShare], list[LaneRule]]:
        return await list_shares(session, settings), await list_rules(session)

    shares, rules = run_with_session("lanes", read, settings)
    lanes = [{**asdict(each.policy), "share": each.share, "queue": each.queue} for each in shares]
    if as_json:
        print_json({"lanes": lanes, "rules": [asdict(rule) for rule in rules]})
        return Exit.DONE
    shown = Table("lane", "share", "weight", "on uncertain", "attempts", "redeliver", "queue")
    for lane in lanes:
        seconds = lane["redeliver_seconds"]
        shown.add(
            *(lane["lane"], f"{lane['share']:.0%}", f"{lane['weight']:g}", str(lane["on_uncertain"] or "-")),
            *(str(lane["max_attempts"] or "-"), "-" if seconds is None else f"{seconds:g} s", lane["queue"]),
        )
    lines = shown.lines()
    if rules:
        senders = Table("sender", "lane")
        for rule in rules:
            senders.add(rule.sender, rule.lane)
        lines += ["", *senders.lines()]
    print_data("\n".join(lines))
    return Exit.DONE


@command.command("set")
@click.argument("lane")
@_sender_option("Assign this sender to LANE")
@click.option(
    "--weight",
    type=Number(MIN_LIMIT, MAX_LIMIT),
    metavar="N",
    help="The lane's share of the workers and of the providers' rates, relative to the other lanes that have emails.",
)
@click.option(
    "--on-uncertain",
    type=click.Choice([each.value for each in OnUncertain]),
    help="What happens to an email whose outcome is unknown, unless the email has its own setting.",
)
@click.option("--max-attempts", type=click.IntRange(1, 1000), metavar="N", help="The most attempts for an email.")
@click.option(
    "--redeliver-for",
    "redeliver_seconds",
    type=AgeOrOff(),
    metavar="TIME",
    help="For how long a deferred email is tried again, such as 4h; `off` means not at all.",
)
@audit_options(is_required=False)
def set_(lane: str, sender: str | None, act: Act | None, **values: Any) -> int:
    """Set a lane's share and policy, or the lane of a sender's emails. Values for which you give no option do not
    change.

    \b
    Examples:
      dispatcher lanes set urgent --on-uncertain resend --max-attempts 3
      dispatcher lanes set bulk --weight 5 --redeliver-for 4h
      dispatcher lanes set --from otp@example.com urgent
      dispatcher lanes set --from @news.example.com bulk

    All hosts apply a new share within two seconds. While the most urgent lane has emails, its share is at least 20 %,
    even if its weight is small.

    A new policy applies only to emails that are enqueued from now on, because the policy is stored with each email when
    it is enqueued. The same is true of a sender's new lane. If an email or its API key names a lane, that lane is used
    instead of the sender's lane.
    """
    from dispatcher.ops import lanes

    settings = load_settings("database_url")
    known_lane(lane, "LANE")
    decided = made_act(act, "dispatcher lanes set")
    given = [name for name, value in values.items() if value is not None]
    if sender is not None:
        if given:
            raise click.UsageError(
                "--from cannot be combined with --weight, --on-uncertain, --max-attempts or --redeliver-for: these "
                "apply to a whole lane."
            )
        rule = LaneRule(_comparable(sender), lane)
        run_with_session("lanes", lambda session: lanes.set_rule(session, rule, decided), settings)
        say(f"Emails from {rule.sender} that are enqueued from now on are in the lane {lane}.")
        return Exit.DONE
    if not given:
        raise click.UsageError(
            "Nothing to set. Give --weight, --on-uncertain, --max-attempts, --redeliver-for or --from."
        )
    if (values["redeliver_seconds"] or 0) > lanes.MAX_REDELIVER_SECONDS:
        raise click.BadParameter("must be at most 366 days.", param_hint="'--redeliver-for'")
    policy = run_with_session(
        "lanes", lambda session: lanes.set_policy(session, lane, values, decided, settings), settings
    )
    say(f"{lanes.describe_policy(policy)} For all else, the host's settings apply.")
    return Exit.DONE


@command.command("unset")
@click.argument("lane", required=False)
@_sender_option("Delete the lane of this sender")
@audit_options(is_required=False)
def unset(lane: str | None, sender: str | None, act: Act | None) -> int:
    """Delete the share and policy of a lane, or the lane of a sender.

    \b
    Examples:
      dispatcher lanes unset bulk
      dispatcher lanes unset --from otp@example.com

    A lane without its own share and policy has its default weight, and the settings of each host apply to its emails.

    If you delete the lane of a sender's address, the lane of the sender's domain applies. If the domain has no lane
    either, the lane is normal. A lane that the email or its API key names is always used instead.
    """
    from dispatcher.ops import lanes

    if (lane is None) == (sender is None):
        raise click.UsageError("Give a lane or --from SENDER.")
    settings = load_settings("database_url")
    decided = made_act(act, "dispatcher lanes unset")
    subject = _comparable(sender) if sender is not None else str(lane)
    change = lanes.unset_policy if sender is None else lanes.unset_rule
    run_with_session("lanes", lambda session: change(session, subject, decided), settings)
    say(f"Unset {subject}.")
    return Exit.DONE


def _comparable(sender: str) -> str:
    """The sender in the form in which a lane's rule stores senders.

    Raises:
        UsageError: the sender is neither an address nor a domain.
    """
    from dispatcher.store.comparable_address import comparable_address

    try:
        if sender.startswith("@"):
            return comparable_address(f"x{sender}").removeprefix("x")
        return comparable_address(sender)
    except ValueError as error:
        raise click.UsageError(f"--from {sender!r} {error}.") from None
