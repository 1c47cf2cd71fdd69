"""Each PostgreSQL role can do exactly what the table in docs/deployment.md says. `dispatcher topology grants` prints
exactly the privileges that the statements need."""

from __future__ import annotations

import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg import errors as pg

from dispatcher import Acceptance, Attachment, UnusableConnection, enqueue, enqueue_many, enqueue_many_async
from dispatcher.domain.email_id import new_email_id
from dispatcher.store.grants import Role, roles_of
from dispatcher.store.queries import all_queries, query
from tests.store.books import Books, email

PAGE: Final = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
ROLES: Final = ("producer", "dispatcher", "reader")
OTHER: Final = "another application's email"
CODE: Final = email("login-17", text="482913 is your code.", erase_after_sending=True)
KEYS: Final = "array['default'], array['other-1']"
STATEMENTS: Final[dict[str, tuple[str, ...]]] = {
    "add a row to `email_log` with any values, such as an email that was already sent": (
        "insert into email_log (email_id, tenant_id, message_key, status) values ('{id}', 'default', 'k', 'sent')",
    ),
    "compare a payload with the payload of a message key": (f"select find_keys({KEYS}, array['\\x00'::bytea])",),
    "list the ids of all emails, and when each email is due": (
        "select email_id from email_idempotency",
        "select email_id, publish_due_at from email_log",
    ),
    "list the message keys and tenants of all emails": ("select tenant_id, message_key from email_idempotency",),
    "read the status of an email": ("select status from email_log",),
    "read attempts, events and audit records": (
        "select * from every_attempt",
        "select * from email_attempt",
        "select * from email_event",
        "select * from operator_audit",
    ),
    "read recipients, subject, text and attachments": (
        "select recipients from email_content",
        "select subject from email_content",
        "select text_body from email_content",
        "select content from email_attachment",
    ),
    "read the tags and the metadata of an email": ("select email_id, tags, metadata from email_content",),
    "read the hash of a payload": ("select payload_hash from email_idempotency",),
    "compute the hash of an address": ("select hash_addresses(array['ann@example.org'])",),
    "read the hashes of the recipients' addresses": (
        "select address_hash from email_recipient",
        "select address_hash from email_event",
    ),
    "read the secret key of these hashes": ("select address_key from dispatcher_database",),
    "read API keys' hashes and webhooks' secrets": ("select secret_hash from api_key", "select secret from webhook"),
    "read the lanes' policies": ("select * from lane_policy",),
    "read the lanes' rules, which contain senders' addresses": ("select * from lane_rule",),
    "change the status of an email": ("update email_log set status = 'cancelled'",),
    "change the content of an email": (
        "update email_content set text_body = ''",
        "update email_attachment set content = ''",
        "insert into email_content (email_id) values ('{id}') on conflict (email_id) do update set subject = 's'",
    ),
    "delete the content of an email": ("delete from email_content", "delete from email_attachment"),
    "delete an email's row in `email_log`": ("delete from email_log",),
    "choose when a message key was created or completed": (
        "insert into email_idempotency values ('default', 'k', '{id}', '', '2020-01-01', '2020-01-01')",
    ),
    "change or delete a message key": (
        "update email_idempotency set payload_hash = ''",
        "delete from email_idempotency",
    ),
    "pause, and suppress addresses": (
        "delete from pause",
        "delete from suppression",
        "insert into pause default values",
        "insert into suppression default values",
    ),
    "add an audit record": ("insert into operator_audit (actor, action) values ('ann', 'noted')",),
    "change an audit record, or delete a single one": (
        "update operator_audit set actor = 'bob'",
        "delete from operator_audit",
    ),
    "delete all audit records before a given time": ("select operator_audit_prune(now(), 1)",),
    "take or free a named lock, such as the relays' leadership": (
        "insert into named_lock default values",
        "update named_lock set pid = 0",
        "delete from named_lock",
    ),
    "create and drop weekly partitions": (
        "select email_partitions_make(now() + interval '1 year', 0)",
        "select email_partition_prune('email_log', '-infinity', '-infinity')",
    ),
    "read a weekly partition of `email_content` by its own name": ("select email_id from {partition}",),
    "create, empty or drop a table": ("create table mine (a integer)", "truncate email_log", "drop table email_log"),
}
"""What a role executes for an action of the page. The role can do the action if PostgreSQL permits every statement. It
cannot do the action if PostgreSQL permits none."""
BEFORE: Final = """
    grant usage on schema dispatcher to {role};
    grant insert on email_idempotency, email_log, email_content, email_attachment, email_recipient to {role};
    grant execute on function hash_addresses to {role};
    grant select (tenant_id, message_key, email_id, payload_hash) on email_idempotency to {role};
    grant select (email_id, publish_due_at) on email_log to {role};
    grant select on lane_policy, lane_rule, relay_polls to {role};
"""
"""What the release before granted to a producer."""


def promised() -> dict[str, dict[str, str]]:
    """The page's table: for each action, the cell of each role."""
    (table,) = re.findall(r"\| action \| producer \| dispatcher \| reader \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE)
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {action: dict(zip(ROLES, cells, strict=True)) for action, *cells in rows}


class Session:
    """A superuser's session, which becomes one of three roles."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        self.names = {role: f"{role}_{secrets.token_hex(4)}" for role in ROLES}

    def execute(self, statement: str) -> None:
        self.connection.execute(statement.encode())

    def grant(self, *, is_exact: bool = False) -> None:
        for role in roles_of(**self.names, is_exact=is_exact):
            self.execute(";".join(role.grants))

    def become(self, role: str) -> psycopg.Connection:
        """The session, with the rights of the role until the transaction is rolled back, or until `reset`."""
        self.execute(f"set session authorization {self.names[role]}")
        return self.connection

    def reset(self) -> None:
        self.execute("reset session authorization")

    def permits(self, role: str, statement: str) -> bool:
        """Whether the role has the rights that a statement needs. Changes nothing."""
        try:
            with self.connection.transaction(force_rollback=True):
                self.become(role).execute(statement.encode())
        except pg.InsufficientPrivilege:
            return False
        except pg.IntegrityError:
            return True  # PostgreSQL checks rights before it checks constraints
        return True


@pytest.fixture
def session(tables_session: psycopg.Connection) -> Iterator[Session]:
    """Three roles without rights."""
    opened = Session(tables_session)
    opened.execute("set search_path = dispatcher")
    for name in opened.names.values():
        opened.execute(f"create role {name}")
    yield opened
    opened.reset()
    for name in opened.names.values():
        opened.execute(f"drop owned by {name}; drop role {name}")


@pytest.fixture
def granted(session: Session) -> Session:
    session.grant(is_exact=True)
    return session


def test_each_role_can_do_what_the_page_says(granted: Session, books: Books) -> None:
    email_id = enqueue(books.connection, email("other-1", attachments=[Attachment("a", "text/plain", b"a")])).email_id
    ((partition,),) = books.connection.execute("select tableoid::regclass::text from email_content").fetchall()

    def can(role: str, action: str) -> str:
        statements = [each.format(id=email_id, partition=partition) for each in STATEMENTS[action]]
        return "/".join(sorted({"yes" if granted.permits(role, each) else "no" for each in statements}))

    found = {action: {role: can(role, action) for role in ROLES} for action in STATEMENTS}

    table = promised()
    assert found == {action: table[action] for action in table.keys() - set(BY_LIBRARY)}
    assert {cell for action in BY_LIBRARY for cell in table[action].values()} == {"yes", "no"}


BY_LIBRARY: Final = ("add an email, for any tenant and message key", "find the id of an email by its message key")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_enqueues_and_finds_ids_as_the_page_says(granted: Session, books: Books, role: str) -> None:
    other = books.enqueue_one(text=OTHER)
    ((tenant, key),) = books.connection.execute("select tenant_id, message_key from email_log").fetchall()
    connection = granted.become(role)

    added, found = None, None
    with suppress(UnusableConnection):
        added = enqueue(connection, email("new-1", attachments=[Attachment("a", "text/plain", b"a")])).acceptance
    if role == "reader":
        ((found,),) = connection.execute(
            "select email_id from email_idempotency where tenant_id = %s and message_key = %s", (tenant, key)
        ).fetchall()
    else:
        found = enqueue(connection, email(key, tenant_id=tenant, text=OTHER)).email_id

    table = promised()
    assert added == (Acceptance.ACCEPTED if table[BY_LIBRARY[0]][role] == "yes" else None)
    assert (found == other) == (table[BY_LIBRARY[1]][role] == "yes")


ADD_ATTACHMENT: Final = "insert into email_attachment values (%s, %s, 'invoice.exe', 'application/pdf', 'MALWARE')"


def test_an_attachment_that_a_producer_adds_to_another_email_is_neither_sent_nor_shown(
    granted: Session, books: Books
) -> None:
    email_id = books.enqueue_one(attachments=[Attachment("terms.txt", "text/plain", b"terms")])

    for position in (-1, 1, 7):
        granted.become("producer").execute(ADD_ATTACHMENT, (email_id, position))

    granted.reset()
    parameters = {"email_id": email_id}
    attachments, octets = (
        books.connection.execute(query(name), parameters).fetchall()
        for name in ("find_attachments", "find_content_octets")
    )
    assert attachments == [(0, "terms.txt", "text/plain", 5, None, None)]
    assert octets == [(len("Thank you.") + 5,)]
    with pytest.raises(pg.UniqueViolation):
        granted.become("producer").execute(ADD_ATTACHMENT, (email_id, 0))  # nor can the producer replace one


def guess(connection: psycopg.Connection, *codes: int) -> list[bytes | None]:
    """The hashes that `find_by_key` returns for the payloads with these codes."""
    hashes = [replace(CODE, text=f"{code} is your code.").payload_hash() for code in codes]
    keys = {"tenant_ids": [CODE.tenant_id] * len(codes), "message_keys": [CODE.message_key] * len(codes)}
    rows = connection.execute(query("find_by_key"), {**keys, "payload_hashes": hashes}).fetchall()
    return [found for *_, found in rows]


def test_each_wrong_guess_of_a_payload_takes_a_producer_a_tenth_of_a_second(granted: Session, books: Books) -> None:
    enqueue(books.connection, CODE)
    connection = granted.become("producer")
    began = time.monotonic()

    found = guess(connection, 482911, 482912, 482913, 482914)

    assert time.monotonic() - began >= 0.3
    assert found == [None, None, None, CODE.payload_hash()]


@pytest.mark.parametrize("role", ["producer", "dispatcher"])
def test_repeated_keys_and_the_http_api_do_not_wait(granted: Session, books: Books, role: str) -> None:
    enqueue(books.connection, CODE)
    connection = granted.become(role)
    granted.execute("set statement_timeout = '10s'")

    found = guess(connection, *([482913] * 200 if role == "producer" else range(482713, 482914)))

    assert found[-1] == CODE.payload_hash()


async def test_a_key_without_an_email_does_not_prevent_the_email_of_its_application(
    granted: Session, books: Books, tables_url: str
) -> None:
    other = books.enqueue_one(text=OTHER)
    emails = [email(f"order-{number}") for number in range(4)]
    granted.become("producer")
    for one, target in zip(emails, [new_email_id(), other, new_email_id(), other], strict=True):
        granted.connection.execute(
            "insert into email_idempotency (tenant_id, message_key, email_id, payload_hash) values (%s, %s, %s, %s)",
            (one.tenant_id, one.message_key, target, one.payload_hash()),
        )

    first = enqueue_many(granted.connection, [emails[0], emails[1], email("new-1")])
    granted.reset()
    async with await psycopg.AsyncConnection.connect(tables_url) as connection:
        second = await enqueue_many_async(connection, emails[2:])
    again = enqueue_many(granted.connection, emails)

    assert {each.acceptance for each in first + second} == {Acceptance.ACCEPTED}
    assert [each.acceptance for each in again] == [Acceptance.KNOWN] * 4
    assert [each.email_id for each in again] == [each.email_id for each in first[:2] + second]
    assert books.count("email_log") == 6


@pytest.mark.parametrize(
    "age",
    [
        "update email_idempotency set completed_at = now()",
        "update email_idempotency set created_at = now() - interval '1 day'",
    ],
    ids=["completed", "older than a day"],
)
def test_the_key_of_a_pruned_email_stays_known(books: Books, age: str) -> None:
    before = enqueue(books.connection, email())
    books.connection.execute("delete from email_log")
    books.connection.execute(age.encode())

    again = enqueue(books.connection, email())

    assert (again.acceptance, again.email_id) == (Acceptance.KNOWN, before.email_id)
    assert books.count("email_log") == 0


def test_exact_grants_leave_the_same_rights_whatever_was_granted_before(session: Session) -> None:
    name = session.names["producer"]
    rights = """
        select relname, null, privilege_type
        from pg_class, aclexplode(relacl)
        where grantee = %(role)s::regrole
        union all
        select attrelid::regclass::text, attname, privilege_type
        from pg_attribute, aclexplode(attacl)
        where grantee = %(role)s::regrole
        order by 1, 2, 3
    """
    session.grant(is_exact=True)
    expected = session.connection.execute(rights, {"role": name}).fetchall()
    session.execute(f"drop owned by {name};" + BEFORE.format(role=name))

    session.grant(is_exact=True)

    assert session.connection.execute(rights, {"role": name}).fetchall() == expected


OWNERS: Final = {
    "create_schema",
    "create_migration_table",
    "record_migration",
    "replace_old_record",
    "revoke_producer",
    "grant_producer",
    "grant_dispatcher",
    "grant_reader",
}
"""Statements that only the owner executes: those of `init`, and the grants."""
PRODUCERS: Final = {"enqueue", "enqueue_one", "enqueue_attachments", "find_by_key"}
_USES: Final = {
    "insert": r"\binsert into dispatcher\.(\w+)",
    "update": r"\bupdate dispatcher\.(\w+)|\binsert into dispatcher\.(\w+)(?:(?!insert into).)*?\bdo update",
    "delete": r"\bdelete from dispatcher\.(\w+)",
    "select": r"(?<!delete )\b(?:from|join) dispatcher\.(\w+)\b(?! ?\()",
    "execute": r"dispatcher\.(\w+)\(",
}


def used_by(names: set[str]) -> dict[str, set[str]]:
    used: dict[str, set[str]] = defaultdict(set)
    for name in names:
        text = all_queries()[name].decode()
        for right, pattern in _USES.items():
            for found in re.finditer(pattern, text, re.DOTALL):
                used[found[found.lastindex or 0]].add(right)
    for rights in used.values():
        if rights & {"update", "delete"}:
            rights.add("select")  # for the columns that `where` reads
    return dict(used)


def role_named(name: str, role: str) -> Role:
    names = {"producer": "app", "dispatcher": "mail", "reader": "oncall", role: name}
    (found,) = [each for each in roles_of(**names, is_exact=False) if each.role == role]
    return found


def granted_to(role: str) -> dict[str, set[str]]:
    """The privileges of a role, by table or function, including privileges on single columns."""
    granted: dict[str, set[str]] = defaultdict(set)
    for grant in role_named("somebody", role).grants:
        rights = re.match(r"grant (.+?) on ", grant)
        assert rights is not None, grant
        for target in re.findall(r"dispatcher\.(\w+)", grant):
            granted[target] |= set(re.findall(r"\b(?:select|insert|update|delete|execute)\b", rights[1]))
    return dict(granted)


def test_the_dispatcher_role_has_exactly_the_rights_that_its_statements_need() -> None:
    assert granted_to("dispatcher") == used_by(set(all_queries()) - OWNERS)


def test_the_producer_role_has_exactly_the_rights_that_enqueueing_needs() -> None:
    used = used_by(PRODUCERS)
    for table in ("email_log", "email_idempotency"):
        used[table].add("select")  # `returning` reads some columns

    assert granted_to("producer") == used


@pytest.mark.parametrize("name", ["", "two\nlines", "nul\0", "x" * 64, "\N{SNOWMAN}" * 22])
def test_an_invalid_role_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name for a role"):
        role_named(name, "reader")


def test_every_role_name_is_quoted() -> None:
    assert role_named('x"; drop  table {y}', "reader").grants[0] == (
        'grant usage on schema dispatcher to "x""; drop  table {y}"'
    )
