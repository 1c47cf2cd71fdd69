"""`dispatcher webhooks`: its actions, and `test`, which posts an event from here."""

from __future__ import annotations

import asyncio
from typing import Final

import click

from dispatcher.actions import webhooks
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.face import group
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_json, say
from dispatcher.cli.sessions import run_with_session

command: Final = group(webhooks, "webhooks")


@command.command("test")
@click.argument("webhook_id", metavar="N", type=click.IntRange(1, 2**63 - 1))
@json_option()
def test(webhook_id: int, as_json: bool) -> int:
    """Post a test event, even to a disabled webhook. The event has the type `webhook.test`.

    \b
    Example:
      dispatcher webhooks test 1

    Exit codes: 0 the receiver accepted the event, 1 it did not.
    """
    from dispatcher.actions.runner import Face, Who, run
    from dispatcher.ops.webhooks import post_test

    settings = load_settings("database_url")
    asked = webhooks.FindTarget(webhook_id=webhook_id)
    target = run_with_session("webhooks", lambda session: run(session, asked, Who(Face.COMMAND)), settings)
    result = asyncio.run(post_test(target, settings))
    if as_json:
        print_json(result)
    else:
        say(f"Webhook {webhook_id}: {result.detail}.")
    return Exit.DONE if result.is_accepted else Exit.FAILED
