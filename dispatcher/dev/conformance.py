"""Tests that every provider adapter must pass, whether it is built in or comes from a package.

One line in a test module runs all tests:

    class TestJournal(Conformance, place=journal_place): ...

`journal_place(folder)` is an asynchronous context manager that yields a `Place`: the adapter, and a test server. The
adapter sends to the server, and the server counts the emails. If the server stores whole emails, inherit from
`ContentConformance`, which also compares the emails' content. The tests need pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import email.message
import email.parser
import email.policy
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import pytest
import pytest_asyncio

from dispatcher.domain.capabilities import Requirement
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Accepted, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.domain.sms import SMS_CHANNEL
from dispatcher.providers.contract import Attempt, Provider

PATIENCE_SECONDS: Final = 120.0
"""The deadline of an attempt, in seconds; no test should reach it."""
_HIDDEN: Final = "victim"
"""Part of every address that a test tries to inject."""


class Place(Protocol):
    """The environment of a test: an adapter, and a test server to which the adapter sends."""

    @property
    def provider(self) -> Provider:
        """The adapter under test."""
        ...

    def times(self) -> Counter[str]:
        """How often each email arrived at the server, by email id."""
        ...


@dataclass(frozen=True, slots=True)
class ProviderQuirks:
    """The differences between a provider and a plain mail server. The defaults describe a plain mail server.

    Attributes:
        own_headers: Headers that the provider replaces with its own or does not accept, such as `Date`.
        takes_empty_files: Whether the provider accepts an attachment without content.
    """

    own_headers: frozenset[str] = frozenset()
    takes_empty_files: bool = True


NO_QUIRKS: Final = ProviderQuirks()


class ContentPlace(Place, Protocol):
    """The environment of a test that compares content: an adapter, and a test server that stores every email."""

    @property
    def quirks(self) -> ProviderQuirks:
        """The differences between the provider and a plain mail server."""
        ...

    def contents(self) -> list[bytes]:
        """The emails that arrived, in order, in the form in which a recipient gets them."""
        ...


class TextPlace(Place, Protocol):
    """The environment of a test of texts (SMS, or a similar channel): an adapter, and a test server that stores every
    text."""

    def texts(self) -> list[str]:
        """The texts that arrived, in order."""
        ...


OpenPlace = Callable[[Path], AbstractAsyncContextManager[Place]]


class CountingAttempt(Attempt):
    """An attempt that counts the adapter's calls of `mark_on_wire`.

    Attributes:
        left: The number of calls so far. The adapter calls `mark_on_wire` just before it transmits the email.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        super().__init__(1, asyncio.get_running_loop().time() + PATIENCE_SECONDS)
        self.left = 0

    def mark_on_wire(self) -> None:
        self.left += 1


def an_email(**changes: Any) -> OutgoingEmail:
    """An ordinary email, except for the fields in `changes`."""
    plain: dict[str, Any] = {
        "email_id": new_email_id(),
        "created_at": datetime(2026, 11, 21, 7, 30, tzinfo=UTC),
        "sender": "Shop <shop@example.org>",
        "to": ("ann@example.com",),
        "subject": "Your order",
        "text": "Thank you.\n",
    }
    return OutgoingEmail(**{**plain, **changes})


def a_text(**changes: Any) -> OutgoingEmail:
    """An ordinary SMS, except for the fields in `changes`."""
    plain = {"sender": "+4915799912345", "to": ("+4915112345678",), "subject": "", "text": "Your code is 1234."}
    return an_email(**{**plain, "channel": SMS_CHANNEL, **changes})


def parsed(content: bytes) -> email.message.EmailMessage:
    """A rendered email, parsed by the standard library and not by our code."""
    message = email.parser.BytesParser(policy=email.policy.default).parsebytes(content)
    assert isinstance(message, email.message.EmailMessage)
    return message


async def send(place: Place, outgoing: OutgoingEmail) -> tuple[Outcome, int]:
    """Sends one email or SMS. Returns the outcome, and how often the adapter called `mark_on_wire`."""
    attempt = CountingAttempt()
    outcome = await place.provider.send(outgoing, attempt)
    assert attempt.left <= 1, "the adapter called mark_on_wire twice"
    return outcome, attempt.left


class ChannelConformance:
    """The tests for every provider of any channel."""

    __test__ = False
    pytestmark = pytest.mark.asyncio
    open_place: ClassVar[OpenPlace]
    message: ClassVar[Callable[..., OutgoingEmail]]
    """Makes an ordinary email or SMS, except for the fields in its arguments."""

    def __init_subclass__(cls, place: OpenPlace | None = None) -> None:
        if place is not None:
            cls.open_place = staticmethod(place)
            cls.__test__ = True

    @pytest_asyncio.fixture
    async def place(self, tmp_path: Path) -> AsyncIterator[Place]:
        """The environment of one test. The fixture closes the adapter after the test."""
        async with type(self).open_place(tmp_path) as opened:
            yield opened

    async def test_an_accepted_email_arrives_once(self, place: Place) -> None:
        email = type(self).message()

        outcome, left = await send(place, email)

        assert isinstance(outcome, Accepted)
        assert left == 1
        assert place.times() == {str(email.email_id): 1}

    async def test_an_email_that_is_sent_twice_arrives_twice_or_once_by_its_key(self, place: Place) -> None:
        email = type(self).message()

        first, _ = await send(place, email)
        second, _ = await send(place, email)

        if place.provider.capabilities.idempotency_key_seconds is None:
            assert place.times() == {str(email.email_id): 2}
        else:
            assert isinstance(first, Accepted)
            assert second == first
            assert place.times() == {str(email.email_id): 1}

    async def test_many_concurrent_emails_arrive_once_each(self, place: Place) -> None:
        emails = [type(self).message() for _ in range(200)]

        sendings = await asyncio.gather(*(send(place, email) for email in emails))

        assert all(isinstance(outcome, Accepted) for outcome, _ in sendings)
        assert place.times() == Counter(str(email.email_id) for email in emails)

    async def test_close_is_idempotent(self, place: Place) -> None:
        await send(place, type(self).message())

        await place.provider.close()
        await place.provider.close()


class TextConformance(ChannelConformance):
    """The tests for providers of SMS, and of any other channel in which a message is one text for one recipient."""

    message = staticmethod(a_text)

    @pytest.mark.parametrize("changes", [{"text": "lone \ud800 surrogate"}, {"text": None}, {"to": ()}])
    async def test_a_message_that_cannot_be_encoded_is_refused_before_the_first_byte(
        self, place: Place, changes: dict[str, Any]
    ) -> None:
        outcome, left = await send(place, type(self).message(**changes))

        assert isinstance(outcome, Rejected)
        assert (outcome.code, left) == (None, 0)
        assert not place.times()

    async def test_a_text_in_every_script_arrives_unchanged(self, place: TextPlace) -> None:
        text = 'Grüße, "1 & 2" = 100 %+; Кирилл 🎉\nhttps://example.org/?a=b&c=%20'

        await send(place, type(self).message(text=text))

        assert place.texts() == [text]

    async def test_the_provider_takes_its_channel_and_no_emails(self, place: Place) -> None:
        capabilities = place.provider.capabilities

        assert capabilities.unmet_requirement(type(self).message()) is None
        assert capabilities.unmet_requirement(an_email()) is Requirement.CHANNEL


class Conformance(ChannelConformance):
    """The tests for every provider of emails."""

    message = staticmethod(an_email)

    @pytest.mark.parametrize(
        ("reason", "changes"),
        [
            (Reason.INVALID_CONTENT, {"subject": "Hello\r\nBcc: victim@example.com"}),
            (Reason.INVALID_CONTENT, {"subject": "Hello\nthere"}),
            (Reason.INVALID_CONTENT, {"subject": "Hello\0"}),
            (Reason.INVALID_CONTENT, {"headers": {"X-One": "1\r\nX-Two: 2"}}),
            (Reason.INVALID_CONTENT, {"headers": {"X-One: 1\r\nX-Two": "2"}}),
            (Reason.INVALID_CONTENT, {"headers": {"bCC": "victim@example.com"}}),
            (Reason.INVALID_CONTENT, {"text": "lone \ud800 surrogate"}),
            (Reason.INVALID_CONTENT, {"attachments": (OutgoingAttachment("a\r\nb", "text/plain", b""),)}),
            (Reason.INVALID_CONTENT, {"attachments": (OutgoingAttachment("a", "text/plain\r\nX: y", b""),)}),
            (Reason.INVALID_CONTENT, {"reply_to": ("a\r\n@example.com",)}),
            (Reason.REJECTED_SENDER, {"sender": "shop@example.org>\r\nRCPT TO:<victim@example.com"}),
            (Reason.REJECTED_SENDER, {"sender": "Sh\nop <shop@example.org>"}),
            (Reason.REJECTED_RECIPIENT, {"to": ("ann@example.com>\r\nDATA",)}),
            (Reason.REJECTED_RECIPIENT, {"bcc": ("ann@exam\0ple.com",)}),
            (Reason.REJECTED_RECIPIENT, {"to": ()}),
        ],
    )
    async def test_header_injection_and_unrenderable_content_are_refused_before_the_first_byte(
        self, place: Place, reason: Reason, changes: dict[str, Any]
    ) -> None:
        outcome, left = await send(place, an_email(**changes))

        assert isinstance(outcome, Rejected)
        assert outcome.reason is reason
        assert left == 0
        assert _HIDDEN not in (outcome.detail or "")
        assert not place.times()

    @pytest.mark.parametrize(
        "changes",
        [
            {"template_id": "welcome", "template_data": {"name": "Ann"}, "text": None},
            {"to": tuple(f"ann-{number}@example.com" for number in range(51))},
            {"to": ("zoë@example.com",)},
            {"to": ("ann..b@docomo.example.org",)},
            {"to": (), "bcc": ("ann@example.com", "bob@example.com")},
            {"subject": ""},
            {"attachments": (OutgoingAttachment("empty", "text/plain", b""),)},
        ],
        ids=["template", "51 recipients", "smtputf8", "dots before the @", "bcc only", "no subject", "empty file"],
    )
    async def test_the_adapter_accepts_and_refuses_emails_as_its_capabilities_say(
        self, place: Place, changes: dict[str, Any]
    ) -> None:
        email = an_email(**changes)
        is_able = place.provider.capabilities.unmet_requirement(email) is None

        outcome, left = await send(place, email)

        assert isinstance(outcome, Accepted if is_able else Rejected)
        assert place.times().total() == is_able
        # If the adapter itself refuses the email, the outcome must have no code: routing then tries the next provider.
        assert isinstance(outcome, Accepted) or (outcome.code, left) == (None, 0)

    async def test_an_email_sent_at_the_same_time_as_a_refused_one_arrives(self, place: Place) -> None:
        good = an_email()

        await asyncio.gather(send(place, an_email(subject="\r")), send(place, good))

        assert place.times() == {str(good.email_id): 1}


class ContentConformance(Conformance):
    """The tests for every provider of emails, and tests that compare the received content with the sent content."""

    async def test_an_email_that_is_sent_twice_is_rendered_identically(self, place: ContentPlace) -> None:
        email = an_email()

        await send(place, email)
        outcome, _ = await send(place, email)

        # If the second request differed from the first, a provider with idempotency keys would refuse it.
        assert isinstance(outcome, Accepted)
        assert len(set(place.contents())) == 1

    async def test_headers_arrive_decoded_in_every_script(self, place: ContentPlace) -> None:
        email = an_email(
            sender='"Müller, Söhne & Co." <shop@bücher.example>',
            to=("Zoë <zoe@example.com>", "bob@example.com"),
            cc=("Кирилл <kirill@example.com>",),
            reply_to=("Hilfe <hilfe@bücher.example>",),
            subject="Ihre Bestellung 🎉 ist unterwegs",
            headers={"X-Campaign": "Grüße", "List-Unsubscribe": "<https://example.org/u?x=1>"},
        )

        await send(place, email)

        message = parsed(place.contents()[0])
        assert message["From"] == '"Müller, Söhne & Co." <shop@xn--bcher-kva.example>'
        assert message["To"] == "Zoë <zoe@example.com>, bob@example.com"
        assert message["Cc"] == "Кирилл <kirill@example.com>"
        assert message["Reply-To"] == "Hilfe <hilfe@xn--bcher-kva.example>"
        assert message["Subject"] == "Ihre Bestellung 🎉 ist unterwegs"
        assert message["X-Campaign"] == "Grüße"
        assert message["List-Unsubscribe"] == "<https://example.org/u?x=1>"
        if "Message-ID" not in place.quirks.own_headers:
            assert message["Message-ID"] == f"<{email.email_id}@xn--bcher-kva.example>"
        if "Date" not in place.quirks.own_headers:
            assert message["Date"].datetime == email.created_at

    async def test_bcc_is_invisible(self, place: ContentPlace) -> None:
        await send(place, an_email(bcc=("Secret Person <secret@example.com>",)))

        content = place.contents()[0].lower()
        assert b"secret" not in content
        assert b"\nbcc:" not in content

    async def test_both_bodies_and_every_attachment_arrive_unchanged(self, place: ContentPlace) -> None:
        files = (
            OutgoingAttachment("Rechnung für März.pdf", "application/pdf", bytes(range(256)) * 700),
            OutgoingAttachment("data.csv", "text/csv", b"a;b\n1;2\r3\r\n.\r\n.."),
            *([OutgoingAttachment("empty", "application/octet-stream", b"")] if place.quirks.takes_empty_files else []),
            OutgoingAttachment("forwarded.eml", "message/rfc822", b"Subject: x\n\n\xff\n"),
        )

        await send(place, an_email(text=".\nHällo\n..\n", html="<p>Hällo</p>\n" * 3000, attachments=files))

        message = parsed(place.contents()[0])
        text, html = message.get_body(("plain",)), message.get_body(("html",))
        assert text is not None
        assert html is not None
        # In MIME, each line of a text ends with CRLF (RFC 2046, section 4.1.1), so compare the texts with LF.
        assert text.get_content().replace("\r\n", "\n") == ".\nHällo\n..\n"
        assert html.get_content().replace("\r\n", "\n") == "<p>Hällo</p>\n" * 3000
        arrived = [(part.get_filename(), part.get_payload(decode=True)) for part in message.iter_attachments()]
        assert arrived == [(file.filename, file.content) for file in files]
