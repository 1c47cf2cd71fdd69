"""Tests the parser of single SMTP replies: codes, reasons, queue ids, and replies that arrive in pieces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.domain.outcome import (
    Accepted,
    Concern,
    Deferred,
    PartialDelivery,
    Reason,
    Rejected,
    Uncertain,
    left_out,
)
from dispatcher.transport.smtp_protocol import InvalidReply, SmtpConnectionLost, SmtpProtocol
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, acceptance, no_recipient_left, refusal, reply_of
from tests.cpu import takes_cpu


@pytest.mark.parametrize(
    ("code", "text", "enhanced", "words"),
    [
        (250, "2.0.0 Ok", "2.0.0", "Ok"),
        (550, "5.1.1", "5.1.1", ""),
        (550, "User unknown", "", "User unknown"),
        # RFC 2034, section 4: an enhanced code has the same class as the basic code.
        (250, "5.1.1 Ok", "", "5.1.1 Ok"),
        (550, "5.1.1: unknown", "", "5.1.1: unknown"),
    ],
)
def test_enhanced_codes_are_separated_from_text(code: int, text: str, enhanced: str, words: str) -> None:
    assert reply_of(code, text) == SmtpReply(code, enhanced, words)


@pytest.mark.parametrize(
    ("code", "form"), [(450, "{}"), (550, "{}"), (550, "ip, {}, ip,"), (550, "{} relay not relay")]
)
def test_a_hostile_server_that_refuses_a_thousand_recipients_takes_little_cpu(code: int, form: str) -> None:
    letters = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(1000))
    refused = [(at, reply_of(code, form.format(each) + "ip," * 20_000)) for at, each in enumerate(letters, 1)]

    def judge() -> None:
        acceptance(reply_of(250, "Ok"), refused, positions=range(1, 1002))
        no_recipient_left(refused)

    assert takes_cpu(judge, at_most=0.3)  # about 0.1 s; every text on its own took 14 s


@pytest.mark.parametrize("other", ["no such user", "policy {letters}"])
def test_each_of_a_thousand_recipients_is_judged_by_the_words_of_its_own_refusal(other: str) -> None:
    words = ["daily quota exceeded, id {number}", other, "<reader-{number}@example.org> mailbox unavailable"]
    texts = [words[number % 3].format(number=number, letters="x" * number) for number in range(1000)]
    refused = [(at, reply_of(550, text)) for at, text in enumerate(texts, 1)]

    outcome = acceptance(reply_of(250, "Ok"), refused, positions=range(1, 1002))

    assert isinstance(outcome, Deferred)
    assert outcome.partial is not None
    refused_for_good = {at for at, text in enumerate(texts, 1) if "quota" not in text}
    found = {at for at, code in outcome.partial.codes.items() if code is not None}
    if "{" in other:  # after the first texts, unknown words count as temporary: nobody is left out by mistake
        assert {at for at in refused_for_good if at % 3 == 0} < found < refused_for_good
    else:
        assert found == refused_for_good


@pytest.mark.parametrize(
    ("text", "queue_id"),
    [
        ("2.0.0 Ok: queued as 4XyZ12abCDz3q", "4XyZ12abCDz3q"),  # Postfix
        ("OK id=1rAbCd-0000Xy-2Z", "1rAbCd-0000Xy-2Z"),  # Exim
        ("Ok 0102018b5c7e-3f1e4c2a-8d7b-000000", "0102018b5c7e-3f1e4c2a-8d7b-000000"),  # Amazon SES
        ("2.0.0 OK", None),
        ("2.6.0 Queued mail for delivery", None),
        ("queued as <script>", None),
        ("queued as ann@example.com", None),
    ],
)  # fmt: skip
def test_only_safe_queue_ids_are_read(text: str, queue_id: str | None) -> None:
    assert getattr(acceptance(reply_of(250, text)), "provider_message_id", "none") == queue_id


@pytest.mark.parametrize(
    ("phase", "text", "reason", "concern"),
    [
        ("MAIL", "451 4.5.3 Too many recipients", Reason.SERVER_ERROR, Concern.EITHER),
        ("MAIL", "451 4.3.1 Insufficient system storage", Reason.SERVER_ERROR, Concern.EITHER),
        # These replies concern a mailbox, not the dispatcher. If they paused the provider, all other emails would wait.
        ("MAIL", "451 4.2.1 The user is receiving mail at a rate that", Reason.RECIPIENT_DEFERRED, Concern.EMAIL),
        ("MAIL", "451 4.2.2 The mailbox is over its message quota", Reason.RECIPIENT_DEFERRED, Concern.EMAIL),
        ("MAIL", "451 4.7.1 Graylisted, come back", Reason.RECIPIENT_DEFERRED, Concern.EMAIL),
        # A temporary refusal of a recipient may concern the recipient or the server.
        ("RCPT", "450 4.7.1 recipient rate limit exceeded", Reason.RECIPIENT_DEFERRED, Concern.EITHER),
        ("RCPT", "451 4.3.0 lookup failed", Reason.RECIPIENT_DEFERRED, Concern.EITHER),
        ("RCPT", "452 4.5.3 too many recipients", Reason.RECIPIENT_DEFERRED, Concern.EITHER),
        ("RCPT", "450 4.2.1 mailbox busy", Reason.RECIPIENT_DEFERRED, Concern.EMAIL),
        ("RCPT", "450 4.7.1 Greylisted", Reason.RECIPIENT_DEFERRED, Concern.EMAIL),
    ],
)
def test_a_refusal_about_a_mailbox_is_distinguished_from_one_about_the_server(
    phase: str, text: str, reason: Reason, concern: Concern
) -> None:
    judged = refusal(reply_of(int(text[:3]), text[4:]), SmtpPhase[phase])

    assert isinstance(judged, Deferred)
    assert (judged.reason, judged.concern) == (reason, concern)


def test_refusals_of_all_recipients_give_one_outcome() -> None:
    gone, later, full = reply_of(550, "5.1.1 no"), reply_of(451, "4.7.1 later"), reply_of(552, "5.2.2 mailbox full")

    all_gone = no_recipient_left([(1, gone), (2, full)])
    one_later = no_recipient_left([(1, gone), (2, later)])

    assert all_gone == Rejected(
        Reason.REJECTED_RECIPIENT, "refused recipients: 1 (550 5.1.1), 2 (552 5.2.2); no", "550 5.1.1"
    )
    words = "refused recipients: 1 (550 5.1.1), 2 (451 4.7.1); later"
    assert one_later == Deferred(Reason.RECIPIENT_DEFERRED, words, "451 4.7.1", known_concern=Concern.EITHER)


@pytest.mark.parametrize(
    ("text", "is_final"),
    [
        ("550 5.1.1 no such user", True),
        ("550 Rule 7 says no", True),
        ("554 5.7.1 Relay access denied", True),
        ("550 5.4.5 Daily user sending limit exceeded", False),
        ("550 Domain example.com has exceeded the max emails per hour (101/100) allowed", False),
        ("554 5.7.1 You are sending too fast", False),
        ("451 4.7.1 Greylisted", False),
    ],
)
def test_the_rest_of_a_transaction_is_settled_only_by_a_refusal_that_is_no_quota_and_no_rate(
    text: str, is_final: bool
) -> None:
    """The server accepted another recipient in the same transaction, so our account works."""
    refused = reply_of(int(text[:3]), text[4:])

    outcome = acceptance(reply_of(250, "2.0.0 Ok"), [(2, refused)], positions=[1, 2])

    if is_final:
        assert isinstance(outcome, Accepted)
    else:
        assert isinstance(outcome, Deferred)
        assert (outcome.reason, outcome.retry_after) == (Reason.RECIPIENT_DEFERRED, None)
        assert outcome.partial == PartialDelivery({1: None})


def test_neighbouring_refused_recipients_form_a_range() -> None:
    gone, many = reply_of(550, "5.1.1 no"), reply_of(452, "4.5.3 too many")
    refused = [(2, gone), *((position, many) for position in range(101, 151)), (151, gone), (153, gone)]

    judged = acceptance(reply_of(250, "2.0.0 Ok"), refused)

    assert left_out(judged.detail) == "2 (550 5.1.1), 101-150 (452 4.5.3), 151 (550 5.1.1), 153 (550 5.1.1)"


def test_a_thousand_refused_recipients_fit_into_one_line() -> None:
    refused = [(position, reply_of(550, "5.1.1 no")) for position in range(1, 1001, 2)]

    judged = acceptance(reply_of(250, "2.0.0 Ok"), refused)

    assert len(judged.detail or "") < 500
    assert "and 490 more" in (judged.detail or "")


@settings(max_examples=50)
@given(st.integers(200, 599), st.text(max_size=60), st.sampled_from(SmtpPhase))
def test_every_reply_before_the_final_dot_has_a_definite_outcome(code: int, text: str, phase: SmtpPhase) -> None:
    judged = refusal(reply_of(code, text), phase)

    if code >= 400:
        assert isinstance(judged, Deferred if code < 500 else Rejected)
    else:
        assert isinstance(judged, Uncertain if phase is SmtpPhase.FINAL else Deferred)
    assert not isinstance(judged, Accepted)


class Wire(asyncio.Transport):
    """A minimal transport. The test itself passes data to the protocol."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass


@contextmanager
def greeted() -> Iterator[SmtpProtocol]:
    """A protocol that has read its greeting."""
    local, remote = socket.socketpair()
    with local, remote:
        protocol = SmtpProtocol()
        protocol.connection_made(Wire({"socket": local}))
        protocol.data_received(b"220 one.test\r\n")
        assert protocol.received_reply() is not None
        yield protocol


@settings(max_examples=50)
@given(st.data())
async def test_replies_are_parsed_however_the_network_splits_them(data: st.DataObject) -> None:
    octets = b"250-one.test\r\n250-SIZE 1\r\n250 \r\n354\r\n550 5.1.1 <a@b> n\xc3\xb6\r\n451-4.7.1 no\n451 4.7.1 no\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(octets)), max_size=8)))
    with greeted() as protocol:
        protocol.write(b"", 4)

        for start, end in zip([0, *cuts], [*cuts, len(octets)], strict=True):
            protocol.data_received(octets[start:end])

        assert [await protocol.reply() for _ in range(4)] == [
            SmtpReply(250, "", "one.test\nSIZE 1"),
            SmtpReply(354, "", ""),
            SmtpReply(550, "5.1.1", "<a@b> nö"),
            SmtpReply(451, "4.7.1", "no\n4.7.1 no"),
        ]
        assert protocol.is_sound


@pytest.mark.parametrize(
    "octets",
    ["", "OK", "99 x", "2500 x", "250_x", "600 x", " 250 x", "+25 x", "250-a\r\n251 b"],
)
async def test_an_invalid_reply_breaks_the_connection_for_good(octets: str) -> None:
    with greeted() as protocol:
        protocol.write(b"", 2)

        protocol.data_received(f"{octets}\r\n250 but now\r\n".encode())

        with pytest.raises(InvalidReply):
            await protocol.reply()
        assert not protocol.is_sound


async def test_an_endless_reply_does_not_fill_the_memory() -> None:
    with greeted() as protocol:
        protocol.write(b"", 1)

        for _ in range(200):
            protocol.data_received(b"250-" + b"x" * 996 + b"\r\n")

        with pytest.raises(SmtpConnectionLost):
            await protocol.reply()


async def test_a_surplus_reply_makes_a_connection_unusable() -> None:
    with greeted() as protocol:
        assert protocol.is_sound

        protocol.data_received(b"421 4.4.2 going down\r\n")

        assert not protocol.is_sound
