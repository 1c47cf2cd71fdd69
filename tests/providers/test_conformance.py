"""What every adapter promises, whichever it is: judged by what arrived at its far end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Accepted, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.capabilities import CAPABILITIES
from dispatcher.setting_values import KNOWN_PROVIDERS
from tests.providers.emails import MANY_SECONDS, an_email, parsed, send
from tests.providers.places import PLACES, Place


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """An adapter and its far end."""
    async with PLACES[request.param](tmp_path) as opened:
        yield opened


def test_every_adapter_is_here() -> None:
    assert set(PLACES) == set(KNOWN_PROVIDERS)


async def test_an_accepted_email_arrives_once(place: Place) -> None:
    email = an_email()

    sending = await send(place.provider, email)

    assert isinstance(sending.outcome, Accepted)
    assert sending.left == 1
    assert place.times() == {str(email.email_id): 1}


async def test_a_second_sending_of_the_same_email_shows(place: Place) -> None:
    email = an_email()

    await send(place.provider, email)
    await send(place.provider, email)

    assert place.times() == {str(email.email_id): 2}
    first, second = place.contents()
    assert first == second


async def test_many_at_once_arrive_once_each(place: Place) -> None:
    emails = [an_email() for _ in range(200)]

    sendings = await asyncio.gather(*(send(place.provider, email, seconds=MANY_SECONDS) for email in emails))

    assert all(isinstance(sending.outcome, Accepted) for sending in sendings)
    assert place.times() == Counter(str(email.email_id) for email in emails)


async def test_readers_get_every_header_in_their_own_letters(place: Place) -> None:
    email = an_email(
        sender='"Müller, Söhne & Co." <shop@bücher.example>',
        to=("Zoë <zoe@example.com>", "bob@example.com"),
        cc=("Кирилл <kirill@example.com>",),
        reply_to=("Hilfe <hilfe@bücher.example>",),
        subject="Ihre Bestellung 🎉 ist unterwegs",
        headers={"X-Campaign": "Grüße", "List-Unsubscribe": "<https://example.org/u?x=1>"},
    )

    await send(place.provider, email)

    message = parsed(place.contents()[0])
    assert message["From"] == '"Müller, Söhne & Co." <shop@xn--bcher-kva.example>'
    assert message["To"] == "Zoë <zoe@example.com>, bob@example.com"
    assert message["Cc"] == "Кирилл <kirill@example.com>"
    assert message["Reply-To"] == "Hilfe <hilfe@xn--bcher-kva.example>"
    assert message["Subject"] == "Ihre Bestellung 🎉 ist unterwegs"
    assert message["X-Campaign"] == "Grüße"
    assert message["List-Unsubscribe"] == "<https://example.org/u?x=1>"
    if "Message-ID" not in place.habits.own_headers:
        assert message["Message-ID"] == f"<{email.email_id}@xn--bcher-kva.example>"
    if "Date" not in place.habits.own_headers:
        assert message["Date"].datetime == email.created_at


async def test_bcc_is_invisible(place: Place) -> None:
    await send(place.provider, an_email(bcc=("Secret Person <secret@example.com>",)))

    content = place.contents()[0].lower()
    assert b"secret" not in content
    assert b"\nbcc:" not in content


async def test_both_bodies_and_every_attachment_arrive_unchanged(place: Place) -> None:
    files = (
        OutgoingAttachment("Rechnung für März.pdf", "application/pdf", bytes(range(256)) * 700),
        OutgoingAttachment("data.csv", "text/csv", b"a;b\n1;2\r3\r\n.\r\n.."),
        *([OutgoingAttachment("empty", "application/octet-stream", b"")] if place.habits.takes_empty_files else []),
        OutgoingAttachment("forwarded.eml", "message/rfc822", b"Subject: x\n\n\xff\n"),
    )

    await send(place.provider, an_email(text=".\nHällo\n..\n", html="<p>Hällo</p>\n" * 3000, attachments=files))

    message = parsed(place.contents()[0])
    text, html = message.get_body(("plain",)), message.get_body(("html",))
    assert text is not None
    assert html is not None
    # MIME's line end is CRLF, whatever the encoding (RFC 2046, section 4.1.1).
    assert text.get_content().replace("\r\n", "\n") == ".\nHällo\n..\n"
    assert html.get_content().replace("\r\n", "\n") == "<p>Hällo</p>\n" * 3000
    arrived = [(part.get_filename(), part.get_payload(decode=True)) for part in message.iter_attachments()]
    assert arrived == [(file.filename, file.content) for file in files]


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
async def test_what_could_inject_headers_or_cannot_be_built_is_refused_before_it_leaves(
    place: Place, reason: Reason, changes: dict[str, Any]
) -> None:
    sending = await send(place.provider, an_email(**changes))

    assert isinstance(sending.outcome, Rejected)
    assert sending.outcome.reason is reason
    assert sending.left == 0
    assert "victim" not in (sending.outcome.detail or "")
    assert not place.times()


def test_an_adapter_has_the_capabilities_that_are_declared_for_its_name(place: Place) -> None:
    assert place.provider.capabilities is CAPABILITIES[place.provider.name]


@pytest.mark.parametrize(
    "changes",
    [
        {"template_id": "welcome", "template_data": {"name": "Ann"}, "text": None},
        {"to": tuple(f"ann-{number}@example.com" for number in range(51))},
        {"to": ("zoë@example.com",)},
    ],
    ids=["template", "51 recipients", "smtputf8"],
)
async def test_an_adapter_itself_accepts_and_refuses_as_its_capabilities_say(
    place: Place, changes: dict[str, Any]
) -> None:
    email = an_email(**changes)
    is_able = place.provider.capabilities.lacks(email) is None

    sending = await send(place.provider, email)

    assert isinstance(sending.outcome, Accepted if is_able else Rejected)
    assert place.times().total() == is_able
    # Routing takes a refusal without a code for the adapter's own, and tries the next provider.
    assert isinstance(sending.outcome, Accepted) or (sending.outcome.code, sending.left) == (None, 0)


async def test_an_email_beside_a_refused_one_arrives(place: Place) -> None:
    good = an_email()

    await asyncio.gather(send(place.provider, an_email(subject="\r")), send(place.provider, good))

    assert place.times() == {str(good.email_id): 1}


async def test_nothing_of_an_id_but_itself_is_told(place: Place) -> None:
    email = an_email(email_id=new_email_id())

    await send(place.provider, email)

    assert place.times() == {str(email.email_id): 1}
    if "Message-ID" not in place.habits.own_headers:
        assert str(email.email_id) in str(parsed(place.contents()[0])["Message-ID"])


async def test_closing_twice_is_harmless(place: Place) -> None:
    await send(place.provider, an_email())

    await place.provider.close()
    await place.provider.close()


def test_the_name_is_the_providers_word(tmp_path: Path) -> None:
    async def names() -> set[str]:
        found = set()
        for word, open_place in PLACES.items():
            async with open_place(tmp_path / word) as opened:
                assert opened.provider.name == word
                found.add(opened.provider.name)
        return found

    assert asyncio.run(names()) == set(PLACES)
