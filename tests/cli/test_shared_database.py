"""Our tables are in a separate schema of an application's database. Each of three roles has exactly the privileges that
it needs."""

from __future__ import annotations

import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson
import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

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


class Database:
    """An application's database, with roles that can log in."""

    def __init__(self, servers: Servers, name: str) -> None:
        self._parts = urlsplit(servers.database_url)._replace(path=f"/{name}")
        self.name = name
        self.roles: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The URL of the superuser."""
        return self._parts.geturl()

    def url_of(self, role: str) -> str:
        """The URL of a role that `make_role` has created."""
        netloc = f"{self.roles[role]}:secret@{self._parts.hostname}:{self._parts.port}"
        return self._parts._replace(netloc=netloc).geturl()

    def make_role(self, role: str) -> None:
        """Creates a role with a login and without privileges."""
        self.roles[role] = f"{role}_{self.name}"
        self.execute(self.url, sql.SQL("create role {} login password 'secret'").format(self.identifier(role)))

    def identifier(self, role: str) -> sql.Identifier:
        """The role's name, quoted for SQL."""
        return sql.Identifier(self.roles[role])

    def execute(self, url: str, statement: str | sql.Composed) -> list[tuple[object, ...]]:
        """Executes one statement in a new session; returns its rows."""
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode() if isinstance(statement, str) else statement)
            return cursor.fetchall() if cursor.description else []

    def refuses(self, role: str, statement: str) -> bool:
        """Whether a role lacks the privilege for a statement."""
        try:
            self.execute(self.url_of(role), statement)
        except pg.InsufficientPrivilege:
            return True
        return False


@pytest.fixture
def database(servers: Servers) -> Iterator[Database]:
    """A database in which the application has tables and a function with the same names as ours."""
    opened = Database(servers, f"shop_{secrets.token_hex(4)}")
    opened.execute(servers.database_url, f"create database {opened.name}")
    for role in ("owner", "producer", "dispatcher", "reader"):
        opened.make_role(role)
    opened.execute(opened.url, APPLICATION)
    opened.execute(
        opened.url,
        sql.SQL("grant create on database {} to {}").format(sql.Identifier(opened.name), opened.identifier("owner")),
    )
    yield opened
    opened.execute(servers.database_url, f"drop database {opened.name} with (force)")
    for role in opened.roles:
        opened.execute(servers.database_url, sql.SQL("drop role {}").format(opened.identifier(role)))


@pytest.fixture
def owner(bare: CommandLine, servers: Servers, database: Database, topology_names: Topology) -> CommandLine:
    """`dispatcher` as the role that may create a schema."""
    settings = settings_for(topology_names, servers, database.url_of("owner"))
    return bare.having(**settings, DISPATCHER_DATABASE_SCHEMA=SCHEMA)


def granted(owner: CommandLine, database: Database) -> dict[str, CommandLine]:
    """`dispatcher` as each role, after `init` and after the owner has executed the output of `topology grants`."""
    succeed(owner, "init")
    options = [word for role in ("producer", "dispatcher", "reader") for word in (f"--{role}", database.roles[role])]
    database.execute(database.url_of("owner"), owner("topology", "grants", "--exact", *options).stdout)
    return {role: owner.having(DISPATCHER_DATABASE_URL=database.url_of(role)) for role in database.roles}


def enqueue(producer: CommandLine, key: str, *options: str) -> None:
    for _ in range(2):  # the second time, the email already exists
        succeed(producer, f"enqueue --key {key} {ADDRESSED}", *options)


@pytest.mark.slow
def test_the_grants_of_each_role_are_enough_for_its_work(owner: CommandLine, database: Database) -> None:
    roles = granted(owner, database)
    producer, dispatcher, reader = roles["producer"], roles["dispatcher"], roles["reader"]
    weeks = """
        select relname, relowner::regrole::text
        from pg_class
        where relname ~ '^email_log_p' and relkind = 'r'
        order by relname
    """
    made = database.execute(database.url, weeks)
    database.execute(database.url, f'drop table "order".{made[-1][0]}')

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
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": "by-http",
            "Authorization": f"Bearer {keys.stdout.strip()}",
        }
        with urlopen(Request(f"http://{listener}/v1/emails", body, headers), timeout=20) as answer:
            assert answer.status == 202
        wait_until(lambda: reader("status", "--json").json["emails"] == counts(sent=2, failed=1))
        workers = reader("status", "--json").json["workers"]
        assert {worker["age_seconds"] is None for worker in workers} == {False}
        wait_until(lambda: database.execute(database.url, weeks) == made)
        for process in (api, running):
            process.send_signal(signal.SIGTERM)
        log, errors = running.communicate(timeout=30)
        api.communicate(timeout=30)
    assert (running.returncode, api.returncode, errors) == (0, 0, b"")
    assert b"refuse" not in log

    database.execute(database.url, """select "order".email_partitions_make('2020-01-01', 0)""")
    enqueue(producer, "waiting", "--text", "It waits.")
    for words in _LOOKS:
        succeed(reader, words)
    keeping = {"DISPATCHER_RETAIN_EMAILS_DAYS": "90", "DISPATCHER_RETAIN_AUDIT_DAYS": "90"}
    for words in _WORK:
        succeed(dispatcher.having(**keeping), words)
    findings = {finding["subject"]: finding for finding in dispatcher("doctor", "--json").json["findings"]}
    assert (findings["tables"]["state"], findings["partitions"]["state"]) == ("ok", "ok")

    assert database.execute(database.url, weeks) == made  # the partition of 2020 was dropped
    assert not [name for name, of in made if of != database.roles["owner"]]
    for table in ("api_key", "email_log"):
        assert database.execute(database.url, f"table public.{table}") == []


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


def test_no_role_has_more_privileges_than_it_needs(owner: CommandLine, database: Database) -> None:
    roles = granted(owner, database)
    enqueue(roles["producer"], "welcome", "--text", "It works.")
    (week,) = database.execute(database.url, 'select tableoid::regclass::text from "order".email_content')[0]
    refused = {
        "producer": (
            'select * from "order".email_log',
            'select payload_hash from "order".email_idempotency',
            'update "order".email_log set status = null',
            'delete from "order".email_log',
            'select subject from "order".email_content',
            f"table {week}",
            'select * from "order".api_key',
            'truncate "order".email_log',
            """select "order".email_partitions_make(now() + '1 year', 0)""",
            """select "order".email_partition_prune('email_log', now(), now())""",
            """select "order".operator_audit_prune(now(), 1)""",
            'create table "order".mine (a integer)',
            'insert into "order".relay_polls default values',
            'delete from "order".relay_polls',
        ),
        "dispatcher": (
            'drop table "order".email_log',
            'create table "order".mine (a integer)',
            'delete from "order".operator_audit',
            'update "order".operator_audit set actor = null',
            f"table {week}",
            'truncate "order".email_log',
            "select * from public.api_key",
            """update "order".dispatcher_migration set name = ''""",
        ),
        "reader": (
            'select subject from "order".email_content',
            f"table {week}",
            'select * from "order".email_attachment',
            'select * from "order".api_key',
            'update "order".email_log set status = null',
            """insert into "order".operator_audit (actor, action) values ('x', 'x')""",
            """select "order".operator_audit_prune(now(), 1)""",
        ),
    }

    ended = roles["reader"](*f"enqueue --key another {ADDRESSED} --text Hello".split())
    assert (ended.code, "may not enqueue: permission denied for table" in ended.stderr) == (1, True)
    assert "dispatcher topology grants --producer" in ended.stderr

    allowed = [
        (role, words)
        for role, statements in refused.items()
        for words in statements
        if not database.refuses(role, words)
    ]

    assert allowed == []


def test_a_role_that_may_drop_partitions_cannot_drop_another_applications_tables(
    owner: CommandLine, database: Database
) -> None:
    owner = owner.having(DISPATCHER_DATABASE_SCHEMA="mail")
    granted(owner, database)
    database.execute(
        database.url_of("owner"),
        """
        create table mail.orders (a uuid) partition by range (a);
        create table mail.orders_p20200101 partition of mail.orders default;
    """,
    )

    pruned = database.execute(
        database.url_of("dispatcher"), "select mail.email_partition_prune('orders', now(), now())"
    )

    assert pruned == []


def test_the_documented_script_moves_the_tables_of_the_release_before(owner: CommandLine, database: Database) -> None:
    database.execute(database.url, "drop table public.api_key, public.email_log, public.dispatcher_migration")
    database.execute(database.url, "drop function public.email_id_lowest_at")
    database.execute(database.url, sql.SQL("grant create on schema public to {}").format(database.identifier("owner")))
    there = owner.having(DISPATCHER_DATABASE_SCHEMA="public")
    succeed(there, "init")
    enqueue(there, "welcome", "--text", "It works.")
    (script,) = re.findall(r"```sql\n(create schema dispatcher;.*?)```", DEPLOYMENT.read_text(), re.DOTALL)

    database.execute(database.url_of("owner"), script)

    moved = owner.having(DISPATCHER_DATABASE_SCHEMA=None)
    assert moved("init").stdout.startswith("nothing to create")
    succeed(moved, "dlq show welcome --no-queue")
    succeed(moved, "prune --dry-run")
    left = """
        select relname from pg_class where relnamespace = 'public'::regnamespace
        union all
        select proname from pg_proc where pronamespace = 'public'::regnamespace
        union all
        select typname from pg_type where typnamespace = 'public'::regnamespace
    """
    assert database.execute(database.url, left) == []
    assert database.execute(database.url, "select dispatcher.email_partitions_make(now() + interval '1 year', 0)")
