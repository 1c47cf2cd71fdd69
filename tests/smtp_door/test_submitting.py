"""Tests what becomes of messages: logins of mail programs, the email, repeats, outages and the drain."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trustme
from psycopg import sql

from dispatcher.config import Settings
from tests.api.running_api import make_key
from tests.smtp_door.running import MESSAGE, Client, RunningDoor, base64, plain, running
from tests.waiting import DEADLINE_SECONDS

BOTH = ("ann@example.org", "bob@example.org")
OTHER_TEXT = MESSAGE.replace(b"Thank you.", b"Thank you, Ann.")
KEYED = b"Idempotency-Key: order-17\r\n" + MESSAGE
RENDERED_ANEW = KEYED.replace(b"12:00:00", b"12:05:00").replace(b"<order-17@", b"<another@")


def stored(connection: psycopg.Connection) -> list[Any]:
    """The emails: their keys, tenants, lanes and recipients in the order To, Cc, Bcc."""
    return connection.execute(
        """
        select message_key, tenant_id, lane, recipients from email_log join email_content using (email_id)
        order by email_id
        """
    ).fetchall()


def recipients(connection: psycopg.Connection) -> list[str]:
    """Every recipient of every email, sorted; one who would get two emails is there twice."""
    return sorted(each for row in stored(connection) for name in ("to", "cc", "bcc") for each in row[3].get(name, []))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(["EHLO [192.168.0.2]", "AUTH LOGIN", "{user}", "{password}"], id="Outlook"),
        pytest.param(["EHLO [192.168.0.2]", "AUTH PLAIN {plain}"], id="Thunderbird"),
        pytest.param(["EHLO localhost", "AUTH LOGIN {user}", "{password}"], id="PHP, with an initial response"),
        pytest.param(["EHLO web1", "auth login", "{user}", "{password}"], id="PHP, in lower case"),
        pytest.param(["EHLO web1.example.com", "AUTH PLAIN", "{plain}"], id="Java, without an initial response"),
        pytest.param(["EHLO a", "NOOP", "RSET", "EHLO a", "AUTH PLAIN {plain}"], id="Java, a pool that checks"),
    ],
)
async def test_mail_programs_log_in(door: RunningDoor, token: str, steps: list[str]) -> None:
    words = {"user": base64("any user"), "password": base64(token), "plain": plain(token)}
    async with door.client() as client:
        reply = ""
        for step in steps:
            reply = await client.say(step.format(**words))
        assert reply.startswith("235 2.7.0")
        assert (await client.submit()).startswith("250 2.0.0")


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
async def test_a_client_encrypts_first(
    token: str, settings: Settings, certificate: Path, authority: trustme.CA, tls: str
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    secured: dict[str, Any] = {"submission_tls": tls, "submission_certificate": certificate}
    first = context if tls == "implicit" else None
    async with running(replace(settings, **secured)) as door, door.client(first) as client:
        if tls == "starttls":
            assert "AUTH" not in await client.say("EHLO a")
            await client.start_tls(context)
        await client.log_in(token)
        assert "STARTTLS" not in await client.say("EHLO a")
        assert (await client.submit()).startswith("250 2.0.0")


async def test_the_envelope_decides_who_gets_the_email_and_bcc_is_removed(
    client: Client, connection: psycopg.Connection
) -> None:
    content = b"Bcc: eve@example.org\r\nX-Mailer: Shop 1\r\nUser-Agent: Shop\r\nReceived: from a by b\r\n" + MESSAGE
    assert (await client.submit(*BOTH, BOTH[0], content=content)).startswith("250 2.0.0 OK, queued as ")

    assert stored(connection)[0][1:] == ("shop", "normal", {"to": [BOTH[0]], "bcc": [BOTH[1]]})
    assert connection.execute("select headers from email_content").fetchone() == ({"X-Mailer": "Shop 1"},)


async def test_the_key_decides_tenant_and_lane(
    door: RunningDoor, connection: psycopg.Connection, settings: Settings
) -> None:
    token = make_key(connection, lane="bulk", tenant_id="other")
    async with door.client() as client:
        await client.log_in(token)
        await client.submit(content=KEYED, sender="anyone@example.net")

    assert [row[:3] for row in stored(connection)] == [("order-17", "other", "bulk")]


@pytest.mark.parametrize(
    ("first", "then", "reply", "emails"),
    [
        # the same message again, after its reply was lost
        ((BOTH, MESSAGE), [(BOTH, MESSAGE)], "250", 1),
        ((BOTH, MESSAGE), [(BOTH, b"Received: from x by y; now\r\n" + MESSAGE)], "250", 1),
        ((BOTH, KEYED), [(BOTH, RENDERED_ANEW)], "250", 1),
        # with other recipients, as Postfix regroups them
        ((BOTH, MESSAGE), [(BOTH[:1], MESSAGE), (BOTH[1:], MESSAGE)], "250", 1),
        ((BOTH[:1], MESSAGE), [(BOTH, MESSAGE), (BOTH, MESSAGE), (BOTH[1:], MESSAGE)], "250", 2),
        ((BOTH[1:], KEYED), [(BOTH, KEYED), (BOTH[:1], KEYED)], "250", 2),
        # another message with the same name
        ((BOTH, MESSAGE), [(BOTH, OTHER_TEXT)], "554 5.6.0", 1),
        ((BOTH[:1], MESSAGE), [(BOTH, OTHER_TEXT)], "554 5.6.0", 1),
        ((BOTH[:1], KEYED), [(BOTH[1:], KEYED.replace(b"Thank", b"thank"))], "554 5.6.0", 1),
        ((BOTH[:1], MESSAGE), [(BOTH[1:], OTHER_TEXT), (BOTH[1:], OTHER_TEXT)], "250", 2),
    ],
)
async def test_no_recipient_gets_a_message_twice(
    client: Client, connection: psycopg.Connection, first: Any, then: Any, reply: str, emails: int
) -> None:
    assert (await client.submit(*first[0], content=first[1])).startswith("250 2.0.0")
    last = ""
    for envelope, content in then:
        last = await client.submit(*envelope, content=content)

    assert last.startswith(reply)
    assert len(stored(connection)) == emails
    assert len(recipients(connection)) == len(set(recipients(connection)))


async def test_a_message_is_no_repetition_of_a_test(
    door: RunningDoor, client: Client, connection: psycopg.Connection
) -> None:
    test = make_key(connection, is_test=True)
    async with door.client() as tester:
        await tester.log_in(test)
        for content in (MESSAGE, MESSAGE, KEYED):
            assert (await tester.submit(content=content)).startswith("250 2.0.0")

    assert [(await client.submit(content=each))[:9] for each in (MESSAGE, KEYED)] == ["554 5.6.0"] * 2
    assert connection.execute("select distinct channel from email_log").fetchall() == [("test",)]


async def test_a_key_that_is_revoked_sends_no_message_that_it_has_begun(
    door: RunningDoor, client: Client, connection: psycopg.Connection, token: str
) -> None:
    assert (await client.begin("ann@example.org")).startswith("354")
    connection.execute("update api_key set revoked_at = now()")

    async def is_known() -> bool:
        async with door.client() as other:
            await other.say("EHLO a")
            return (await other.say(f"AUTH PLAIN {plain(token)}")).startswith("235")

    async with asyncio.timeout(DEADLINE_SECONDS):
        while await is_known():
            pass
    assert (await client.say(MESSAGE + b".\r\n")).startswith("421 4.7.0")
    assert stored(connection) == []


async def test_a_large_message_is_copied_for_a_few_more_recipients_at_a_time(
    door: RunningDoor, connection: psycopg.Connection
) -> None:
    people = [f"{name}@example.org" for name in "abcdef"]
    content = MESSAGE + (b"a" * 990 + b"\r\n") * 7_000  # two copies fit into a batch
    token = make_key(connection, recipients_per_day=4)
    async with door.client() as client:
        await client.log_in(token)
        assert (await client.submit(people[0], content=content)).startswith("250 2.0.0")
        assert (await client.submit(*people, content=content)).startswith("450 4.7.1")

    assert recipients(connection) == people[:3]


async def test_two_processes_cannot_accept_a_recipient_twice(
    token: str, settings: Settings, connection: psycopg.Connection
) -> None:
    people = [f"{name}@example.org" for name in "abcdef"]
    groups = [people[start : start + 4] for start in (0, 1, 2)] + [[each] for each in people]
    async with running(settings) as one, running(settings) as other:

        async def submit(door: RunningDoor, group: list[str]) -> str:
            async with door.client() as client:
                await client.log_in(token)
                return await client.submit(*group)

        replies = await asyncio.gather(*(submit(door, group) for group in groups for door in (one, other)))

    assert {reply[:4] for reply in replies} == {"250 "}
    assert recipients(connection) == people


async def test_a_message_without_a_message_id_is_known_by_its_content(
    client: Client, connection: psycopg.Connection
) -> None:
    content = MESSAGE.replace(b"Message-ID", b"X-Id")
    for each in (content, content, content.replace(b"12:00:00", b"13:00:00")):
        assert (await client.submit(content=each)).startswith("250")

    assert len(stored(connection)) == 2


async def test_dots_and_messages_in_one_packet_arrive(client: Client, connection: psycopg.Connection) -> None:
    lines = b"MAIL FROM:<shop@example.com>\r\nRCPT TO:<ann@example.org>\r\nDATA\r\n"
    await client.send(lines)
    assert [(await client.reply())[:3] for _ in range(3)] == ["250", "250", "354"]
    await client.send(MESSAGE + b"..\r\n...a\r\n.\r\n" + lines)
    assert [(await client.reply())[:3] for _ in range(4)] == ["250", "250", "250", "354"]
    await client.send(b".")
    assert (await client.say(b"\r\n")).startswith("554 5.6.0")

    assert connection.execute("select text_body from email_content").fetchone() == ("Thank you.\n.\n..a\n",)


async def test_replies_are_temporary_while_the_database_is_away(
    door: RunningDoor, client: Client, connection: psycopg.Connection, token: str
) -> None:
    info = connection.info
    allow = sql.SQL("alter database {} allow_connections {}").format
    database = sql.Identifier(info.dbname)
    with psycopg.connect(info.dsn, dbname="postgres", password=info.password, autocommit=True) as admin:
        admin.execute(allow(database, sql.SQL("false")))
        try:
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [info.dbname])
            assert (await client.submit()).startswith("451 4.3.0")
            async with door.client() as other:
                await other.log_in(token)  # known keys stay valid
        finally:
            admin.execute(allow(database, sql.SQL("true")))
    assert (await client.submit()).startswith("250 2.0.0")


async def test_a_stop_finishes_the_message_in_progress(
    door: RunningDoor, client: Client, token: str, connection: psycopg.Connection
) -> None:
    async with door.client() as idle:
        assert (await client.begin("ann@example.org")).startswith("354")
        door.stop()
        assert (await idle.reply()).startswith("421 4.3.2")
    assert (await client.say(MESSAGE + b".\r\n")).startswith("250 2.0.0")
    assert (await client.reply()).startswith("421 4.3.2")

    assert len(stored(connection)) == 1


async def test_a_stop_does_not_wait_for_clients_that_do_nothing(
    settings: Settings, token: str, certificate: Path, authority: trustme.CA
) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    secured: dict[str, Any] = {"submission_tls": "starttls", "submission_certificate": certificate}
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        running(replace(settings, **secured)) as door,
        door.client() as silent,
        door.client() as client,
    ):
        await silent.say("STARTTLS")  # and no handshake
        await client.say("EHLO a")
        await client.start_tls(context)
        await client.log_in(token)
        door.stop()
        assert (await client.reply()).startswith("421 4.3.2")
