"""`dispatcher topology`: what RabbitMQ needs to know about us."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json

if TYPE_CHECKING:
    from dispatcher.broker.users import User


@click.group("topology")
def command() -> None:
    """RabbitMQ's side of this dispatcher. `init` makes exchange and queues, `doctor` verifies them.

    \b
    Example:
      dispatcher topology users
    """


@command.command("users", short_help="Print the users with the fewest permissions that work.")
@click.option("--prefix", default="dispatcher_", show_default=True, help="What the users' names begin with.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: every user with its permissions.")
def users(prefix: str, as_json: bool) -> int:
    """Print the users with the fewest permissions that work, as commands for RabbitMQ's administrator.

    Names exchange and queues as DISPATCHER_EXCHANGE, DISPATCHER_QUEUE and DISPATCHER_DLQ do, and the virtual host as
    DISPATCHER_AMQP_URL does (/ without one). Changes nothing. `rabbitmqctl add_user` asks for a password.

    \b
    Examples:
      dispatcher topology users
      dispatcher topology users --prefix shop_mail_
      dispatcher topology users --json | jq -r '.users[].role'
    """
    from dispatcher.broker.connection import vhost_of
    from dispatcher.broker.topology import Topology
    from dispatcher.broker.users import users_of

    settings = load_settings()
    vhost = vhost_of(settings.amqp_url) if settings.amqp_url else "/"
    wanted = users_of(Topology.of(settings))
    if as_json:
        print_json({"vhost": vhost, "users": [{"name": f"{prefix}{user.role}", **asdict(user)} for user in wanted]})
    else:
        print_data("\n\n".join(_commands(user, f"{prefix}{user.role}", vhost) for user in wanted))
    return Exit.DONE


def _commands(user: User, name: str, vhost: str) -> str:
    permissions = ["set_permissions", "-p", vhost, name, user.configure, user.write, user.read]
    commands = [["add_user", name], permissions]
    if user.tags:
        commands.append(["set_user_tags", name, user.tags])
    return "\n".join([f"# {user.role}: {user.about}", *[shlex.join(["rabbitmqctl", *words]) for words in commands]])
