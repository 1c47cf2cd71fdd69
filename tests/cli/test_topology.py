"""`dispatcher topology`: commands for users of RabbitMQ; and grants in a separate schema of an application's database.
tests/store/test_roles.py tests what each role may do."""

from __future__ import annotations

import re
import secrets
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson
import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.cli.commandline import CommandLine, settings_for
from tests.waiting import wait_until

SCHEMA = "order"
DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
ADDRESSED = "--from shop@example.com --to ann@example.org --subject Hello"
APPLICATION = """
    revoke create on schema public from public;
    create table public.api_key (mine integer);
    create table public.email_log (mine integer);
    create table public.dispatcher_migration (mine integer);
    create function public.email_id_lowest_at(timestamptz) returns uuid language sql as 'select null::uuid';
"""


ROLES = ("owner", "producer", "dispatcher", "reader")


class Database:
    def __init__(self, servers: Servers, name: str) -> None:
        self._parts = urlsplit(servers.database_url)._replace(path=f"/{name}")
        self.names = {role: f"{role}_{name}" for role in ROLES}

    def url(self, role: str = "") -> str:
        host = f"{self._parts.hostname}:{self._parts.port}"
        return self._parts._replace(netloc=f"{self.names[role]}:secret@{host}" if role else self._parts.netloc).geturl()

    def execute(self, statement: str, role: str = "") -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(role), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def database(servers: Servers) -> Iterator[Database]:
    """A database in which the application has tables and a function with the same names as ours."""
    name = f"shop_{secrets.token_hex(4)}"
    opened = Database(servers, name)
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(f"create database {name}".encode())
        for role in opened.names.values():
            administration.execute(f"create role {role} login password 'secret'".encode())
        administration.execute(f"grant create on database {name} to {opened.names['owner']}".encode())
        opened.execute(APPLICATION)
        yield opened
        administration.execute(f"drop database {name} with (force)".encode())
        administration.execute(f"drop role {', '.join(opened.names.values())}".encode())


@pytest.fixture
def owner(bare: CommandLine, servers: Servers, database: Database, topology_names: Topology) -> CommandLine:
    settings = settings_for(topology_names, servers, database.url("owner"))
    # This process has loaded the statements with the usual schema.
    return replace(bare, needs_process=True).having(**settings, DISPATCHER_DATABASE_SCHEMA=SCHEMA)


def granted(owner: CommandLine, database: Database) -> dict[str, CommandLine]:
    succeed(owner, "init")
    options = [word for role in ("producer", "dispatcher", "reader") for word in (f"--{role}", database.names[role])]
    database.execute(owner("topology", "grants", "--exact", *options).stdout, "owner")
    return {role: owner.having(DISPATCHER_DATABASE_URL=database.url(role)) for role in ROLES}


def enqueue(producer: CommandLine, key: str, *options: str) -> None:
    for _ in range(2):  # the second time, the email already exists
        succeed(producer, f"enqueue --key {key} {ADDRESSED}", *options)


@pytest.mark.slow  # two dozen commands, each as a role of its own
def test_the_grants_of_each_role_are_enough_for_its_work(owner: CommandLine, database: Database) -> None:
    roles = granted(owner, database)
    producer, dispatcher, reader = roles["producer"], roles["dispatcher"], roles["reader"]
    weeks = "select relname, relowner::regrole::text from pg_class"
    weeks += " where relname ~ '^email_log_p' and relkind = 'r' order by relname"
    made = database.execute(weeks)
    database.execute(f'drop table "order".{made[-1][0]}')

    (owner.folder / "terms.txt").write_text("terms")
    enqueue(producer, "welcome", "--text", "It works.", "--attach", "terms.txt")
    enqueue(producer.having(DISPATCHER_PROVIDERS=None), "template", "--template", "t-1")
    succeed(reader, "dlq show welcome --no-queue")  # this also reads why the email waits
    keys = dispatcher("keys", "create", "--name", "shop", "--recipients-per-day", "5", "--from-anywhere")
    assert keys.code == 0, keys.stderr
    with (
        dispatcher.started("run") as running,
        dispatcher.having(DISPATCHER_API_ADDRESS="127.0.0.1:0").started("api") as api,
    ):
        assert api.stdout is not None
        listener = orjson.loads(api.stdout.readline())["listener"]
        body = orjson.dumps({"from": "a@example.com", "to": "b@example.org", "subject": "Hello", "text": "It works."})
        headers = {"Content-Type": "application/json", "Idempotency-Key": "by-http"}
        headers["Authorization"] = f"Bearer {keys.stdout.strip()}"
        with urlopen(Request(f"http://{listener}/v1/emails", body, headers), timeout=20) as answer:
            assert answer.status == 202
        wait_until(lambda: reader("status", "--json").json["emails"] == counts(sent=2, failed=1))
        workers = reader("status", "--json").json["workers"]
        assert {worker["age_seconds"] is None for worker in workers} == {False}
        wait_until(lambda: database.execute(weeks) == made)
        for process in (api, running):
            process.send_signal(signal.SIGTERM)
        log, errors = running.communicate(timeout=30)
        api.communicate(timeout=30)
    assert (running.returncode, api.returncode, errors) == (0, 0, b"")
    assert b"refuse" not in log

    database.execute("""select "order".email_partitions_make('2020-01-01', 0)""")
    enqueue(producer, "waiting", "--text", "It waits.")
    for words in _LOOKS:
        succeed(reader, words)
    keeping = {"DISPATCHER_RETAIN_EMAILS_DAYS": "90", "DISPATCHER_RETAIN_AUDIT_DAYS": "90"}
    for words in _WORK:
        succeed(dispatcher.having(**keeping), words)
    findings = {finding["subject"]: finding for finding in dispatcher("doctor", "--json").json["findings"]}
    assert (findings["tables"]["state"], findings["partitions"]["state"]) == ("ok", "ok")

    assert database.execute(weeks) == made  # the partition of 2020 was dropped
    assert not [name for name, of in made if of != database.names["owner"]]
    for table in ("api_key", "email_log"):
        assert database.execute(f"table public.{table}") == []


_LOOKS: Final = (
    "held list",
    "dlq list",
    "dlq list --by error_type",
    "dlq replays",
    "dlq show template --no-queue",
    "dlq show waiting --no-queue",
    "dlq replay --status failed --dry-run",
    "prune --dry-run",
)
_WORK: Final = (
    "init",
    "dlq replay --status failed --reason tried --yes",
    "dlq replays",
    "dlq show welcome --no-queue --reveal --reason tried",
    "dlq show waiting --no-queue",
    "keys list",
    "prune",
)


def succeed(commandline: CommandLine, words: str, *options: str) -> None:
    ended = commandline(*words.split(), *options)
    assert ended.code == 0, (words, ended.stderr)


def counts(**emails: int) -> dict[str, int]:
    return {"pending": 0, "waiting": 0, "sending": 0, "sent": 0, "cancelled": 0, "failed": 0, "held": 0, **emails}


def test_a_role_has_no_rights_without_a_grant_and_none_on_others_tables(owner: CommandLine, database: Database) -> None:
    roles = granted(owner, database)
    made = """create table "order".orders (a uuid) partition by range (a);"""
    made += """create table "order".orders_p20200101 partition of "order".orders default"""
    database.execute(made, "owner")

    ended = roles["reader"](*f"enqueue --key another {ADDRESSED} --text Hello".split())

    assert (ended.code, "may not enqueue: permission denied for table" in ended.stderr) == (1, True)
    assert "dispatcher topology grants --producer" in ended.stderr
    prune = """select "order".email_partition_prune('orders', now(), now())"""
    assert database.execute(prune, "dispatcher") == []  # only our partitions


def test_the_documented_script_moves_the_tables_of_the_release_before(owner: CommandLine, database: Database) -> None:
    database.execute("drop table public.api_key, public.email_log, public.dispatcher_migration")
    database.execute("drop function public.email_id_lowest_at")
    database.execute(f"grant create on schema public to {database.names['owner']}")
    there = owner.having(DISPATCHER_DATABASE_SCHEMA="public")
    succeed(there, "init")
    enqueue(there, "welcome", "--text", "It works.")
    (script,) = re.findall(r"```sql\n(create schema dispatcher;.*?)```", DEPLOYMENT.read_text(), re.DOTALL)

    database.execute(script, "owner")

    moved = owner.having(DISPATCHER_DATABASE_SCHEMA=None)
    assert moved("init").stdout.startswith("nothing to create")
    succeed(moved, "dlq show welcome --no-queue")
    succeed(moved, "prune --dry-run")
    left = "select relname from pg_class where relnamespace = 'public'::regnamespace union all"
    left += " select proname from pg_proc where pronamespace = 'public'::regnamespace union all"
    left += " select typname from pg_type where typnamespace = 'public'::regnamespace"
    assert database.execute(left) == []
    assert database.execute("select dispatcher.email_partitions_make(now() + interval '1 year', 0)")


def _commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_users_are_printed_as_commands_and_no_server_is_needed(bare: CommandLine) -> None:
    ended = bare("topology", "users")

    assert (ended.code, ended.stderr) == (0, "")
    exchange = r"^email\.dispatcher$"
    everything = "^({0}|{0}\\.send\\.urgent|{0}\\.send|{0}\\.send\\.bulk|{0}\\.dlq)$".format(r"email\.dispatcher")
    granting = ["rabbitmqctl", "set_permissions", "-p", "/"]
    assert _commands(ended.stdout) == [
        ["rabbitmqctl", "add_user", "dispatcher_producer"],
        [*granting, "dispatcher_producer", "^$", exchange, "^$"],
        ["rabbitmqctl", "add_user", "dispatcher_worker"],
        [*granting, "dispatcher_worker", "^$", everything, everything],
        ["rabbitmqctl", "add_user", "dispatcher_operator"],
        [*granting, "dispatcher_operator", everything, everything, everything],
        ["rabbitmqctl", "add_user", "dispatcher_probe"],
        [*granting, "dispatcher_probe", "^$", "^$", "^$"],
        ["rabbitmqctl", "set_user_tags", "dispatcher_probe", "monitoring"],
    ]


def test_names_are_quoted_for_the_shell_and_escaped_for_regular_expressions(bare: CommandLine) -> None:
    odd = "shop's $(mail) | .*"
    named = bare.having(DISPATCHER_QUEUE=odd, DISPATCHER_AMQP_URL="amqp://app:mq-secret@mq.example:5672/shop%20mail")

    ended = named("topology", "users", "--prefix", "shop_")
    listed = named("topology", "users", "--json").json

    (worker,) = [words for words in _commands(ended.stdout) if words[1:5:3] == ["set_permissions", "shop_worker"]]
    assert worker[3] == listed["vhost"] == "shop mail"
    assert re.fullmatch(worker[-1], odd)
    assert not re.fullmatch(worker[-1], "shop's $(mail) | xx")
    assert "mq-secret" not in ended.stdout + ended.stderr
    assert [user["name"] for user in listed["users"]][1] == "dispatcher_worker"
