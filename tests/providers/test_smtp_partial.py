"""The smtp adapter delivers to the recipients that the server takes now, and says who needs a further attempt."""

from __future__ import annotations

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, PartialDelivery
from dispatcher.domain.outgoing import OutgoingEmail
from tests.providers.choosy_server import ChoosyServer, choosy_server
from tests.providers.emails import an_email, parsed, send

ANN, BOB, CEM = "ann@example.com", "bob@example.com", "cem@example.net"


def refuse(*replies: tuple[str, str]) -> ChoosyServer:
    by_address = dict(replies)
    return ChoosyServer(rule=lambda recipient, _count: by_address.get(recipient))


async def sent(server: ChoosyServer, *emails: OutgoingEmail) -> list[Outcome | None]:
    async with choosy_server(server) as provider:
        return [(await send(provider, email)).outcome for email in emails]


@pytest.mark.parametrize(
    ("reply", "follows_at_once"),
    [
        ("452 4.5.3 Error: too many recipients", True),
        ("452 Too many recipients received this hour", True),
        ("452 too many", True),
        ("451 4.5.3 one domain per transaction, please", True),
        ("451-4.3.0 Multiple destination domains per transaction is unsupported.\r\n451 4.3.0 Please try again", True),
        ("450 4.7.1 only one recipient per message, try again", True),
        ("451 4.7.1 Greylisting in action, please come back later", False),
        ("452 4.2.2 mailbox full", False),
        ("450 4.2.1 mailbox busy", False),
        ("421 4.7.0 later", None),
    ],
)
async def test_a_recipient_refused_for_now_needs_a_further_attempt(reply: str, follows_at_once: bool | None) -> None:
    server = refuse((CEM, reply))
    email = an_email(to=(ANN, BOB), cc=(CEM,))
    (outcome,) = await sent(server, email)

    assert isinstance(outcome, Deferred)
    if follows_at_once is None:  # the server closes the connection: nobody got the email
        assert (outcome.partial, server.recipients(email.email_id)) == (None, {})
        return
    assert outcome.partial == PartialDelivery({1: None, 2: None})
    assert (outcome.retry_after == 0.0) is follows_at_once
    assert (outcome.detail or "").startswith("refused recipients: 3 (45")
    assert server.recipients(email.email_id) == {ANN: 1, BOB: 1}


async def test_a_recipient_that_is_refused_for_good_needs_no_further_attempt_at_any_of_its_positions() -> None:
    server = refuse((CEM, "452 4.5.3 too many recipients"), (BOB, "550 5.1.1 no such user"))
    email = an_email(to=(ANN, BOB, CEM), cc=(f"Ann <{ANN.replace('example', 'EXAMPLE')}>", BOB), bcc=(CEM,))
    (outcome,) = await sent(server, email)

    assert isinstance(outcome, Deferred)
    assert outcome.partial == PartialDelivery({1: None, 4: None, 2: "550 5.1.1", 5: "550 5.1.1"})
    assert server.recipients(email.email_id) == {ANN: 1}


# Commands that arrive together are a group. Each fault makes the replies to a group wrong.
PIPELINING_FAULTS = {
    "refuses all but the first": lambda commands: [commands[0], *("!503 5.5.1 out of sequence" for _ in commands[1:])],
    "loses the first": lambda commands: commands[1:],
    "loses the second": lambda commands: [commands[0], *commands[2:]],
    "does not know the command": lambda commands: ["!500 5.5.2 unrecognized command" for _ in commands],
    "reads one long line": lambda _: ["!501 syntax error in parameters"],
    "is one reply ahead": lambda commands: ["!250 2.0.0 Ok", *commands],
}


@pytest.mark.parametrize("fault", PIPELINING_FAULTS)
async def test_a_server_that_announces_pipelining_wrongly_gets_one_command_at_a_time(fault: str) -> None:
    server = ChoosyServer(group_fault=PIPELINING_FAULTS[fault])
    emails = [an_email(to=(ANN, BOB)) for _ in range(3)]
    outcomes = await sent(server, *emails)

    assert all(isinstance(outcome, Accepted) for outcome in outcomes), outcomes
    assert [server.recipients(email.email_id) for email in emails] == [{ANN: 1, BOB: 1}] * 3
    assert server.groups == 1


@pytest.mark.parametrize(
    ("fields", "delivered", "partial"),
    [
        ({"to": (ANN, "jörg@example.com", CEM)}, {ANN: 1, CEM: 1}, {1: None, 3: None}),
        ({"to": ("jörg@example.com",), "bcc": (ANN,)}, {ANN: 1}, {2: None}),
        ({"to": (ANN,), "reply_to": ("jörg@example.com",)}, {ANN: 1}, None),
        ({"to": (ANN,), "cc": ("Jörg <ann@bücher.example>",)}, {ANN: 1, "ann@xn--bcher-kva.example": 1}, None),
    ],
)
async def test_an_address_that_the_server_does_not_support_does_not_stop_the_others(
    fields: dict[str, tuple[str, ...]], delivered: dict[str, int], partial: dict[int, None] | None
) -> None:
    server = ChoosyServer()
    email = an_email(**fields)
    (outcome,) = await sent(server, email)

    assert server.recipients(email.email_id) == delivered
    (content,) = server.contents
    assert content.isascii()
    assert "jörg" not in str(parsed(content)["To"])
    if partial is None:
        assert isinstance(outcome, Accepted)
        assert ("Reply-To was left out" in (outcome.detail or "")) is ("reply_to" in fields)
    else:
        assert isinstance(outcome, Deferred)
        assert outcome.partial == PartialDelivery(partial)
        assert "(no SMTPUTF8)" in (outcome.detail or "")
        assert outcome.retry_after == 0.0


async def test_a_later_transaction_names_all_recipients_in_its_headers() -> None:
    server = ChoosyServer()
    email = an_email(to=(BOB,), shown=((ANN, BOB), (CEM,)))
    await sent(server, email)

    assert server.recipients(email.email_id) == {BOB: 1}
    message = parsed(server.contents[0])
    assert (message["To"], message["Cc"]) == (f"{ANN}, {BOB}", CEM)
