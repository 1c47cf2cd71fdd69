"""`dispatcher alerts`: sends a test alert through every channel."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_json
from dispatcher.cli.table import Styled, Table
from dispatcher.errors import ConfigurationError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.domain.alert import Channel

_NO_CHANNEL = (
    "No alert channel is configured, so alerts are only logged. Set DISPATCHER_ALERT_WEBHOOK_URL and "
    "DISPATCHER_ALERT_WEBHOOK_SECRET, or DISPATCHER_ALERT_SMTP_URL, DISPATCHER_ALERT_EMAIL_FROM and "
    "DISPATCHER_ALERT_EMAIL_TO."
)


@click.group("alerts")
def command() -> None:
    """Test the alert channels.

    \b
    Example:
      dispatcher alerts test

    The monitor of `dispatcher run` raises an alert when the DLQ is not empty, when the monitor cannot check the DLQ,
    and for other faults. Every alert is logged. If the DISPATCHER_ALERT_… settings configure a webhook or email
    addresses, every alert is also sent there.
    """


@command.command("test", short_help="Send a test alert through every channel.")
@json_option("Print one line of JSON: the result for every channel.")
def test(as_json: bool) -> int:
    """Send a test alert through every configured channel, and show each result.

    \b
    Examples:
      dispatcher alerts test
      dispatcher alerts test --json | jq '.channels[] | select(.ok | not)'

    The command tries all channels at the same time, each channel once. It needs neither PostgreSQL nor RabbitMQ.

    Exit codes: 0 all channels accepted the alert, 1 no channel did, 3 only some did, 78 no channel is configured.
    """
    trials = asyncio.run(_try_all(load_settings()))
    failed = [trial for trial in trials if not trial["ok"]]
    if as_json:
        print_json({"ok": not failed, "channels": trials})
    else:
        table = Table()
        for trial in trials:
            mark = Styled("✓", "green") if trial["ok"] else Styled("✗", "red")
            table.add(mark, trial["channel"], trial["detail"])
        table.show()
    if not failed:
        return Exit.DONE
    return Exit.FAILED if len(failed) == len(trials) else Exit.PARTLY


async def _try_all(settings: Settings) -> list[dict[str, Any]]:
    """Sends a test alert through every channel; returns the results in the form that `--json` prints."""
    from uuid import uuid4

    from dispatcher.domain.alert import Alert, Kind, NotDelivered, Notice, Phase
    from dispatcher.monitor.alert_channels import channels_of

    channels = channels_of(settings)
    if not channels:
        raise ConfigurationError([_NO_CHANNEL])
    now = datetime.now(UTC)
    alert = Alert(Kind.DEAD_LETTERS, False, settings.dlq, now, settings.host_name)
    notice = Notice(f"alert_{uuid4().hex}", Phase.TEST, now, alert)

    async def attempt(channel: Channel) -> dict[str, Any]:
        try:
            return {"channel": channel.name, "ok": True, "detail": await channel.send(notice)}
        except NotDelivered as error:
            return {"channel": channel.name, "ok": False, "detail": error.reason}

    return list(await asyncio.gather(*map(attempt, channels)))
