"""`dispatcher topology`: prints commands that give RabbitMQ users and PostgreSQL roles the least privileges."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json

if TYPE_CHECKING:
    from dispatcher.broker.topology import User


@click.group("topology")
def command() -> None:
    """Print commands that give RabbitMQ users and PostgreSQL roles the least privileges. (`dispatcher init` creates the
    queues and tables.)

    \b
    Examples:
      dispatcher topology users
      dispatcher topology grants
    """


@command.command("users", short_help="Print rabbitmqctl commands for least-privilege users.")
@click.option("--prefix", default="dispatcher_", show_default=True, help="Prefix for the users' names.")
@json_option("Print one line of JSON: every user with its permissions.")
def users(prefix: str, as_json: bool) -> int:
    """Print rabbitmqctl commands that create users with the least privileges they need.

    \b
    Examples:
      dispatcher topology users
      dispatcher topology users --prefix shop_mail_
      dispatcher topology users --json | jq -r '.users[].role'

    The names of the exchange and the queues come from DISPATCHER_EXCHANGE, DISPATCHER_QUEUE and DISPATCHER_DLQ. The
    virtual host comes from DISPATCHER_AMQP_URL (/ if that variable is not set). This command changes nothing. When you
    run its output, `rabbitmqctl add_user` asks for each user's password.
    """
    from dispatcher.broker.connection import vhost_of
    from dispatcher.broker.topology import Topology, users_of

    settings = load_settings()
    vhost = vhost_of(settings.amqp_url) if settings.amqp_url else "/"
    wanted = users_of(Topology.of(settings))
    if as_json:
        print_json({"vhost": vhost, "users": [{"name": f"{prefix}{user.role}", **asdict(user)} for user in wanted]})
    else:
        print_data("\n\n".join(_commands(user, f"{prefix}{user.role}", vhost) for user in wanted))
    return Exit.DONE


@command.command("grants", short_help="Print GRANT statements for three PostgreSQL roles.")
@click.option(
    "--producer",
    default="dispatcher_producer",
    show_default=True,
    metavar="ROLE",
    help="The role for applications that enqueue.",
)
@click.option(
    "--dispatcher",
    default="dispatcher",
    show_default=True,
    metavar="ROLE",
    help="The role for `run`, `api` and operators.",
)
@click.option(
    "--reader", default="dispatcher_reader", show_default=True, metavar="ROLE", help="The role that only reads."
)
@click.option(
    "--exact",
    "is_exact",
    is_flag=True,
    help="First revoke the privileges that only the library of earlier releases needs.",
)
@json_option("Print one line of JSON: every role with its statements.")
def grants(as_json: bool, is_exact: bool, **names: str) -> int:
    """Print GRANT statements that give three PostgreSQL roles the least privileges they need.

    \b
    Examples:
      dispatcher topology grants | psql --single-transaction --set ON_ERROR_STOP=1 "$OWNERS_DATABASE_URL"
      dispatcher topology grants --producer shop --dispatcher mail --reader oncall

    \b
    Roles:
      producer    for applications that enqueue with the library
      dispatcher  for `run`, `api` and operators' commands, except `init`
      reader      for commands that only read; cannot read content, addresses or API keys

    Execute the output as the owner of the tables. The schema is DISPATCHER_DATABASE_SCHEMA. This command changes
    nothing, and its output creates no role: create the roles first. A later release may need more privileges. So after
    each `dispatcher init`, run this command again and execute its output. The output is safe to execute repeatedly.
    It revokes nothing, because applications with the library of an earlier release may still need a privilege that this
    release does not grant. When no such application runs, execute the output of `--exact` in one transaction.
    """
    from dispatcher.store.grants import roles_of

    settings = load_settings()
    try:
        roles = roles_of(**names, is_exact=is_exact)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    if as_json:
        print_json({"schema": settings.database_schema, "roles": [asdict(role) for role in roles]})
    else:
        parts = [[f"-- {role.role}: {role.about}", *(f"{grant};" for grant in role.grants)] for role in roles]
        print_data("\n\n".join(map("\n".join, parts)))
    return Exit.DONE


def _commands(user: User, name: str, vhost: str) -> str:
    permissions = ["set_permissions", "-p", vhost, name, user.configure, user.write, user.read]
    commands = [["add_user", name], permissions]
    if user.tags:
        commands.append(["set_user_tags", name, user.tags])
    return "\n".join([f"# {user.role}: {user.about}", *[shlex.join(["rabbitmqctl", *words]) for words in commands]])
