"""Tests what the SMTP door refuses: each case is what a client sends, and the last reply that it gets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
import pytest

from dispatcher.config import Settings
from tests.api.running_api import make_key
from tests.smtp_door.running import MESSAGE, Client, RunningDoor, base64, plain, running
from tests.waiting import DEADLINE_SECONDS


class Quiet(NamedTuple):
    """Octets that are not answered."""

    octets: bytes


class Case(NamedTuple):
    about: str
    steps: Sequence[str | bytes | Quiet]
    """Texts are commands. The words of `words` are put in their braces."""
    reply: str
    key: str = "shop"
    """Whose key logs in first; empty: nobody."""


MAIL: Final = ("MAIL FROM:<shop@example.com>",)
TO_ANN: Final = (*MAIL, "RCPT TO:<ann@example.org>")


def message(content: bytes = MESSAGE, *changes: tuple[bytes, bytes]) -> list[str | bytes]:
    """The steps of a message."""
    for old, new in changes:
        assert old in content
        content = content.replace(old, new)
    return [*TO_ANN, "DATA", content + b".\r\n"]


def with_header(line: bytes) -> list[str | bytes]:
    return message(line + b"\r\n" + MESSAGE)


FROM: Final = b"Shop <shop@example.com>"
EXE: Final = (
    b"From: shop@example.com\r\nTo: ann@example.org\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: application/octet-stream; name="run.exe"\r\n'
    b'Content-Disposition: attachment; filename="run.exe"\r\n\r\nMZ\r\n'
)


def signed(*changes: tuple[bytes, bytes]) -> list[str | bytes]:
    """The steps of a message that is sent as it is."""
    body = b"\r\n--b\r\n\r\nHello\r\n--b\r\nContent-Type: text/x-sig\r\n\r\nsig\r\n--b--\r\n"
    return message(
        b"From: shop@example.com\r\nSubject: Hello\r\nContent-Type: multipart/signed; boundary=b\r\n" + body, *changes
    )


ME: Final = b"From: shop@example.com"
CASES: Final = (
    # No relay: without a key, nothing begins.
    Case("MAIL first", MAIL, "503 5.5.1", ""),
    Case("MAIL without a login", ["EHLO a", *MAIL], "530 5.7.0", ""),
    Case("MAIL after HELO", ["HELO a", *MAIL], "530 5.7.0", ""),
    Case("RCPT without a login", ["EHLO a", "RCPT TO:<ann@example.org>"], "530 5.7.0", ""),
    Case("DATA without a login", ["EHLO a", "DATA"], "530 5.7.0", ""),
    Case("VRFY tells nothing", ["EHLO a", "VRFY root"], "252 2.5.1", ""),
    Case("EXPN", ["EHLO a", "EXPN staff"], "502", ""),
    Case("ETRN", ["EHLO a", "ETRN example.org"], "500", ""),
    Case("five unknown commands", ["EHLO a", *["GET / HTTP/1.1"] * 5], "502 5.5.1", ""),
    Case("a hundred HELP", ["EHLO a", *["HELP"] * 101], "421 4.7.0", ""),
    Case("commands without a login", ["EHLO a", Quiet(b"NOOP\r\n" * 2000), *["NOOP"] * 400], "421 4.7.0", ""),
    # Logins.
    Case("another mechanism", ["EHLO a", "AUTH CRAM-MD5"], "504 5.5.4", ""),
    Case("AUTH before EHLO", ["AUTH PLAIN {plain}"], "503 5.5.1", ""),
    Case("AUTH after HELO", ["HELO a", "AUTH PLAIN {plain}"], "503 5.5.1", ""),
    Case("a password that is no key", ["EHLO a", f"AUTH PLAIN {plain('secret')}"], "535 5.7.8", ""),
    Case("an empty password", ["EHLO a", "AUTH LOGIN", "c2hvcA==", ""], "535 5.7.8", ""),
    Case("a wrong secret", ["EHLO a", "AUTH PLAIN {wrong}"], "535 5.7.8", ""),
    Case("a revoked key", ["EHLO a", "AUTH PLAIN {revoked}"], "535 5.7.8", ""),
    Case("a key that may only read", ["EHLO a", "AUTH PLAIN {reader}"], "535 5.7.8", ""),
    Case("a key of all tenants", ["EHLO a", "AUTH PLAIN {everyone}"], "535 5.7.8", ""),
    Case("a login that is no base64", ["EHLO a", "AUTH PLAIN !!!"], "501 5.5.2", ""),
    Case("a login in one part", ["EHLO a", f"AUTH PLAIN {base64('shop')}"], "501 5.5.2", ""),
    Case("a login with an end", ["EHLO a", "AUTH PLAIN a b c"], "501", ""),
    Case("a cancelled login", ["EHLO a", "AUTH LOGIN", "*"], "501 5.7.0", ""),
    Case("a user name without end", ["EHLO a", "AUTH LOGIN", "A" * 2000], "500 5.5.2", ""),
    Case("a login twice", ["AUTH PLAIN {plain}"], "503 5.5.1"),
    Case("three wrong logins", ["EHLO a", *["AUTH PLAIN {wrong}"] * 3], "421 4.7.0", ""),
    # Smuggling: only CRLF ends a line, and only CRLF.CRLF ends a message.
    Case("LF.LF", [*TO_ANN, "DATA", b"a\n.\n"], "554 5.5.2"),
    Case("CRLF.LF", [*TO_ANN, "DATA", b"a\r\n.\n"], "554 5.5.2"),
    Case("LF.CRLF", [*TO_ANN, "DATA", b"a\n.\r\n"], "554 5.5.2"),
    Case("CR.CR", [*TO_ANN, "DATA", b"a\r.\r\n"], "554 5.5.2"),
    Case("CRLF.CR", [*TO_ANN, "DATA", Quiet(b"a\r\n.\r"), b"b"], "554 5.5.2"),
    Case("a CR in a line", [*TO_ANN, "DATA", b"a\rb\r\n"], "554 5.5.2"),
    Case("a CR CR LF", [*TO_ANN, "DATA", b"a\r\r\n"], "554 5.5.2"),
    Case("a command that ends with LF", [b"NOOP\n"], "554 5.5.2"),
    Case("a command with a CR", [b"NOOP\rRSET\r\n"], "554 5.5.2"),
    Case("content before the reply to DATA", [*TO_ANN, b"DATA\r\nSubject: a\r\n"], "554 5.5.1"),
    Case("a NUL in the content", message(MESSAGE, (b"Thank", b"Th\0nk")), "554 5.6.0"),
    Case("a NUL in an address", [*MAIL, b"RCPT TO:<a\0b@example.org>\r\n"], "553 5.1.3"),
    Case("an address in UTF-7 quotes", [*MAIL, 'RCPT TO:<"a b"@example.org>'], "553 5.1.3"),
    Case("an address that is no UTF-8", [*MAIL, b"RCPT TO:<\xff@example.org>\r\n"], "553 5.1.3"),
    Case("BDAT", ["BDAT 4 LAST"], "500"),
    # The order of commands, and their parameters.
    Case("RCPT before MAIL", ["RCPT TO:<ann@example.org>"], "503 5.5.1"),
    Case("DATA before RCPT", [*MAIL, "DATA"], "503 5.5.1"),
    Case("MAIL twice", [*MAIL, *MAIL], "503 5.5.1"),
    Case("an unknown parameter of MAIL", [f"{MAIL[0]} SOLICIT=x"], "555 5.5.4"),
    Case("an unknown parameter of RCPT", [*MAIL, "RCPT TO:<a@example.org> ORCPT=rfc822;b"], "555 5.5.4"),
    Case("a binary body", [f"{MAIL[0]} BODY=BINARYMIME"], "501"),
    Case("an address without brackets", ["MAIL FROM:shop@example.com"], "553 5.1.3"),
    # Senders.
    Case("no envelope sender", ["MAIL FROM:<>"], "550 5.7.1"),
    Case("a sender of another domain", message(MESSAGE, (FROM, b"ceo@example.net")), "550 5.7.1"),
    Case("a sender of a subdomain", message(MESSAGE, (FROM, b"ceo@a.example.com")), "550 5.7.1"),
    Case("a name that looks like an address", message(MESSAGE, (FROM, b'"a@example.com" <b@x.net>')), "550 5.7.1"),
    Case("two senders", message(MESSAGE, (FROM, FROM + b", ceo@example.net")), "554 5.6.0"),
    Case("two From", with_header(b"From: ceo@example.net"), "554 5.6.0"),
    Case("no From", message(MESSAGE, (b"From:", b"X-From:")), "554 5.6.0"),
    Case("a sender in a signed message", signed((ME, b"From: ceo@example.net")), "550 5.7.1"),
    Case("a first From with a space", signed((b"From", b"From : ceo@example.net\r\nFrom")), "554 5.6.0"),
    Case("a From below a space", signed((b"Subject:", b"Subject :"), (b"Content", b"From: c@x.net\r\nContent")), "554"),
    Case("a Sender with a space", signed((ME, ME + b"\r\nSender : ceo@example.net")), "554 5.6.0"),
    Case("two addresses in angles", signed((b"shop@", b"<shop@example.com> <ceo@example.net> x")), "554 5.6.0"),
    Case("an address as the name", signed((ME, ME + b" <ceo@example.net>")), "554 5.6.0"),
    Case("a group of senders", signed((ME, ME + b": ceo@example.net;")), "554 5.6.0"),
    Case("a quote in a comment", signed((ME, b'From: (") <ceo@example.net> (") <shop@example.com>')), "554 5.6.0"),
    Case("another Sender", with_header(b"Sender: ceo@example.net"), "550 5.7.1"),
    Case("another Resent-From", with_header(b"Resent-From: ceo@example.net"), "550 5.7.1"),
    Case("a header that controls a provider", with_header(b"X-SES-CONFIGURATION-SET: a"), "554 5.6.0"),
    # Recipients, sizes and content.
    Case("a recipient without a domain", [*MAIL, "RCPT TO:<postmaster>"], "553 5.1.3"),
    Case("a recipient at an IP address", [*MAIL, "RCPT TO:<ann@[127.0.0.1]>"], "553 5.1.3"),
    Case("a source route", [*MAIL, "RCPT TO:<@relay.example,@b.example:ann@example.org>"], "553 5.1.3"),
    Case("too many recipients", [*MAIL, *[f"RCPT TO:<a{number}@example.org>" for number in range(51)]], "452 4.5.3"),
    Case("a size above the limit", [f"{MAIL[0]} SIZE=99999999"], "552 5.3.4"),
    Case("a command without end", [f"NOOP {'a' * 5000}"], "500 5.5.2"),
    Case("a line of 999 bytes", message(MESSAGE + b"a" * 999 + b"\r\n"), "554 5.6.0"),
    Case("an empty message", [*TO_ANN, "DATA", b".\r\n"], "554 5.6.0"),
    Case("a program", message(EXE), "554 5.7.1"),
    Case("a circle", with_header(b"\r\n".join([b"Received: from a by b"] * 51)), "554 5.4.6"),
    Case("a message key with a space at its end", with_header(b'Idempotency-Key: "a "'), "554 5.6.0"),
    Case("two message keys", with_header(b"Idempotency-Key: a\r\nIdempotency-Key: b"), "554 5.6.0"),
    # Rates.
    Case("a second message in ten seconds", [*message(), *MAIL], "450 4.7.1", "slow"),
    Case(
        "more recipients than are left today",
        [*MAIL, *[f"RCPT TO:<{each}@b.example>" for each in "ab"], "DATA", MESSAGE + b".\r\n"],
        "450 4.7.1",
        "small",
    ),
)
TIGHT: Final = (
    # Slow and large clients, on a server with small limits.
    Case("no command", [b""], "421 4.4.2", ""),
    Case("a part of a command", [b"EHL"], "421 4.4.2", ""),
    Case("no answer in a login", ["EHLO a", "AUTH LOGIN", b""], "421 4.4.2", ""),
    Case("no command after a login", [b""], "421 4.4.2"),
    Case("no content", [*TO_ANN, "DATA", b""], "421 4.4.2"),
    Case("content without end", [*TO_ANN, "DATA", Quiet(b"a\r\n"), Quiet(b"b\r\n"), b"c"], "421 4.4.2"),
    Case("a message above the limit", message(MESSAGE + b"a\r\n" * 500), "552 5.3.4"),
)
SECURED: Final = (
    # STARTTLS.
    Case("MAIL before STARTTLS", ["EHLO a", *MAIL], "530 5.7.0", ""),
    Case("AUTH before STARTTLS", ["EHLO a", "AUTH PLAIN {plain}"], "530 5.7.0", ""),
    Case("commands after STARTTLS", ["EHLO a", b"STARTTLS\r\nNOOP\r\n"], "554 5.5.1", ""),
    Case("STARTTLS with a parameter", ["EHLO a", "STARTTLS now"], "501 5.5.4", ""),
    Case("no TLS after STARTTLS", ["EHLO a", "STARTTLS", b"NOOP\r\n" * 20], "", ""),
)


async def play(door: RunningDoor, case: Case, words: dict[str, str], source: str) -> str:
    """The last reply of a case. Each client has another address, so that none is blocked for another's logins."""
    async with door.client(source=source) as client:
        if case.key:
            await client.log_in(words[case.key])
        reply = "nothing was sent"
        for step in case.steps:
            match step:
                case Quiet(octets):
                    await client.send(octets)
                    await asyncio.sleep(0)
                case bytes():
                    reply = await client.say(step)
                case str():
                    reply = await client.say(step.format(**words))
                    if reply.startswith("421"):
                        break
        return reply


async def unexpected(door: RunningDoor, cases: Sequence[Case], words: dict[str, str]) -> dict[str, str]:
    """The cases with a reply that is not expected, and their replies."""
    sources = [f"127.0.1.{number}" for number in range(1, len(cases) + 1)]
    replies = await asyncio.gather(
        *(play(door, case, words, source) for case, source in zip(cases, sources, strict=True))
    )
    wrong = zip(cases, replies, strict=True)
    return {
        case.about: reply
        for case, reply in wrong
        if not reply.startswith(case.reply) or bool(reply) != bool(case.reply)
    }


@pytest.fixture
def words(token: str, connection: psycopg.Connection) -> dict[str, str]:
    revoked = make_key(connection, revoked_at="2026-01-01")
    return {
        "shop": token,
        "slow": make_key(connection, requests_per_second=0.1),
        "small": make_key(connection, recipients_per_day=1),
        "plain": plain(token),
        "wrong": plain(token[:-1] + ("a" if token[-1] != "a" else "b")),
        "revoked": plain(revoked),
        "reader": plain(make_key(connection, scopes=["read"])),
        "everyone": plain(make_key(connection, tenant_id=None)),
    }


async def test_abuse_is_refused(door: RunningDoor, words: dict[str, str], connection: psycopg.Connection) -> None:
    assert await unexpected(door, CASES, words) == {}
    assert connection.execute("select count(*) from email_log").fetchone() == (1,)  # of the slow key


async def test_slow_and_large_clients_are_refused(settings: Settings, words: dict[str, str]) -> None:
    limits: dict[str, Any] = {
        "submission_idle_seconds": 0.5,
        "submission_data_seconds": 0.5,
        "submission_max_bytes": 1024,
    }
    async with running(replace(settings, **limits)) as door:
        assert await unexpected(door, TIGHT, words) == {}


async def test_commands_do_not_extend_the_time_for_the_login(settings: Settings, token: str) -> None:
    async with running(replace(settings, submission_idle_seconds=0.1)) as door, door.client() as client:
        while (reply := await client.say("NOOP")).startswith("250"):
            async with door.client():
                pass  # so that the time ends before 8 KiB of commands, another limit
    assert reply == "421 4.4.2 The client took too long to log in. Connect again."


async def test_without_tls_nothing_begins(settings: Settings, words: dict[str, str], certificate: Path) -> None:
    limits: dict[str, Any] = {"submission_tls": "starttls", "submission_certificate": certificate}
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with running(replace(settings, **limits)) as door:
        assert await unexpected(door, SECURED, words) == {}
        async with door.client() as client:
            await client.say("EHLO a")
            await client.start_tls(context)
            assert (await client.say("STARTTLS")).startswith("503 5.5.1")
            assert (await client.say(MAIL[0])).startswith("503 5.5.1")  # the EHLO before TLS does not count


async def test_connections_are_limited_by_address_and_in_total(settings: Settings, token: str) -> None:
    limits: dict[str, Any] = {"submission_connections": 3, "submission_connections_per_address": 2}
    async with running(replace(settings, **limits)) as door, door.client() as client:
        await client.log_in(token)
        async with door.client() as second, door.client(), door.client(source="127.0.0.2"):
            async with door.client(source="127.0.0.3"):
                pass
            await second.say("EHLO a")
            reply = await second.say(f"AUTH PLAIN {plain(token)}")
            assert reply.startswith("454 4.7.0")  # a key has at most half of the connections

    assert [greeting[:9] for greeting in door.greetings] == [
        "220 mx.ex",
        "220 mx.ex",
        "421 4.7.0",
        "220 mx.ex",
        "421 4.3.2",
    ]


async def test_connections_that_do_not_encrypt_are_limited_and_delay_no_stop(
    settings: Settings, token: str, certificate: Path
) -> None:
    limits: dict[str, Any] = {"submission_connections_per_address": 3, "submission_tls": "implicit"}
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        running(replace(settings, submission_certificate=certificate, **limits)) as door,
    ):
        silent = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(5)]
        assert [await reader.read() for reader, _ in silent[3:]] == [b"", b""]
        assert not any(reader.at_eof() for reader, _ in silent[:3])
        async with door.client(context, source="127.0.0.2") as client:
            await client.log_in(token)
        silent[0][1].write(b"EHLO a\r\n")  # and no TLS
        assert b"220" not in await silent[0][0].read()
        async with door.client(context):
            pass
        door.stop()
        assert [await reader.read() for reader, _ in silent[1:3]] == [b"", b""]
        for _, writer in silent:
            writer.close()


async def test_an_address_with_many_wrong_logins_gets_one_more_per_connection(
    door: RunningDoor, token: str, words: dict[str, str]
) -> None:
    replies = []
    for _ in range(5):
        async with door.client() as client:
            replies.append(await attempts(client, words["wrong"]))
    async with door.client() as client:
        await client.log_in(token)  # a valid key still works

    assert replies == [["535", "535", "421"]] * 3 + [["535", "421"], ["421"]]


async def attempts(client: Client, wrong: str) -> list[str]:
    """The codes of the replies to wrong logins, until the connection closes."""
    await client.say("EHLO a")
    codes = []
    while code := (await client.say(f"AUTH PLAIN {wrong}"))[:3]:
        codes.append(code)
        if code == "421":
            break
    return codes
