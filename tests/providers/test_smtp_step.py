"""After a surplus SMTP reply, the adapter sends no more emails on that connection, and reports none as accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Uncertain
from tests.providers.emails import an_email, outcome_text, send
from tests.providers.scripted_server import END, GREETING, LOGIN, PLAIN, ScriptedServer, scripted

PIPELINED: Final = {**PLAIN, "EHLO": "250-hi\r\n250-AUTH PLAIN LOGIN\r\n250-PIPELINING\r\n250 SIZE"}
each_way = pytest.mark.parametrize("replies", [PLAIN, PIPELINED], ids=["one by one", "pipelined"])

SURPLUS: Final = [
    (GREETING, "220 hi\r\n250 more"),
    ("EHLO", "250-hi\r\n250 AUTH PLAIN\r\n250 more"),
    ("AUTH", "235 welcome\r\n250 more"),
    ("AUTH", "235 welcome\r\n250 MAIL\r\n250 RCPT\r\n354 DATA"),
    ("MAIL", "250 ok\r\n250 more"),
    ("MAIL", "250 ok\r\n354 more"),
    ("MAIL", "250 ok\r\n250 RCPT\r\n354 DATA"),
    ("RCPT", "250 ok\r\n250 more"),
    ("RCPT", "250 ok\r\n354 more"),
    ("DATA", "354 go\r\n250 queued"),
    ("DATA", "354 go\r\n25"),
    ("DATA", "354 go\r\n250-queued"),
    ("DATA", "354 go\r\n421 closing"),
    ("DATA", "354 go\r\n550 no"),
    ("DATA", "354 go" + "\r\n250 queued" * 9),
]


@each_way
@pytest.mark.parametrize(("step", "reply"), SURPLUS)
async def test_a_reply_before_the_final_dot_stops_the_email_and_the_next_uses_a_new_connection(
    step: str, reply: str, replies: Mapping[str, str]
) -> None:
    server = ScriptedServer({**replies, step: reply, END: "550 no"})
    async with scripted(server) as provider:
        sending = await send(provider, an_email())
        assert is_definite_server_failure(sending.outcome)
        assert (sending.left, server.ends) == (0, 0)
        before, server.later = server.connections, replies

        assert isinstance((await send(provider, an_email())).outcome, Accepted)
        assert (server.connections, server.ends) == (before + 1, 1)


@pytest.mark.parametrize("reply", ["250 queued\r\n250 more", "250 queued\r\n25", "250 queued\r\n354 go"])
@pytest.mark.parametrize("idle_seconds", [5.0, 0.0], ids=["trusted", "probed"])
async def test_a_surplus_reply_after_an_email_does_not_answer_the_next_one(reply: str, idle_seconds: float) -> None:
    server = ScriptedServer({**PLAIN, END: reply}, later={**PLAIN, END: "550 no"})
    async with scripted(server, idle_seconds=idle_seconds) as provider:
        await send(provider, an_email())
        second = await send(provider, an_email())

        assert not isinstance(second.outcome, Accepted)
        assert server.connections == 2


@pytest.mark.parametrize("more", ["250 more", "354 more", "421 closing"])
@pytest.mark.parametrize("step", ["RSET", "MAIL", "RCPT", "DATA"])
@each_way
async def test_no_email_is_sent_on_a_reused_connection_that_is_out_of_step(
    replies: Mapping[str, str], step: str, more: str
) -> None:
    first = dict(replies)
    server = ScriptedServer(first, later=replies)
    async with scripted(server, idle_seconds=0.0) as provider:
        await send(provider, an_email())
        first[step] += f"\r\n{more}"
        sending = await send(provider, an_email())

        left = int(isinstance(sending.outcome, Accepted))
        assert left or is_definite_server_failure(sending.outcome)
        assert (sending.left, server.ends, server.connections) == (left, 1 + left, 1 + left)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("250 queued\r\n550 no", Uncertain),
        ("550 no\r\n250 queued", Uncertain),
        ("451 later\r\n250 queued", Uncertain),
        ("250 queued\r\n250 ok\r\n550 no", Uncertain),
        ("250 queued\r\n250 queued", Accepted),
        ("250 queued\r\n421 closing", Accepted),
    ],
)
async def test_contradicting_replies_to_an_email_are_uncertain_but_a_repetition_or_421_is_not(
    reply: str, kind: type[Outcome]
) -> None:
    async with scripted(ScriptedServer({**PLAIN, END: reply})) as provider:
        assert isinstance((await send(provider, an_email())).outcome, kind)


CRAM: Final = "250-hi\r\n250 AUTH CRAM-MD5"
CLOSING: Final = "the server is closing the connection while connecting"


@pytest.mark.parametrize(
    ("replies", "login", "expected", "detail"),
    [
        ({"RCPT": "354 go"}, LOGIN, "deferred server_error", ""),
        ({"EHLO": "500 what?", "HELO": "250 hi"}, ("", ""), "accepted", ""),
        ({"EHLO": CRAM, "AUTH": "334 \N{SNOWMAN}"}, LOGIN, "deferred server_error", ""),
        ({"AUTH": "235 welcome\r\n421 4.7.0 ann, correct horse"}, LOGIN, "deferred server_error", CLOSING),
    ],
    ids=["354 before DATA", "no EHLO", "a challenge that is not Base64", "a surplus 421 with the password"],
)
async def test_a_server_that_is_out_of_step_is_no_wrong_password_and_gets_no_body(
    replies: dict[str, str], login: tuple[str, str], expected: str, detail: str
) -> None:
    server = ScriptedServer({**PLAIN, **replies})
    async with scripted(server, login) as provider:
        sending = await send(provider, an_email(to=("ann@example.com", "bob@example.com")))

    assert outcome_text(sending.outcome) == expected
    assert sending.left == server.ends == int(expected == "accepted")
    assert not detail or getattr(sending.outcome, "detail", None) == detail
    assert not detail or getattr(sending.outcome, "code", None) == "421 4.7.0"


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 21, "-1", "1e9", "\u0663", "1 2"])
async def test_an_invalid_size_sets_no_limit(size: str) -> None:
    server = ScriptedServer({**PLAIN, "EHLO": f"250-hi\r\n250-AUTH PLAIN\r\n250 SIZE {size}"})
    async with scripted(server) as provider:
        assert isinstance((await send(provider, an_email())).outcome, Accepted)
        assert "announces no size limit" in await provider.check()


def is_definite_server_failure(outcome: Outcome | None) -> bool:
    return isinstance(outcome, Deferred) and outcome.reason is Reason.SERVER_ERROR
