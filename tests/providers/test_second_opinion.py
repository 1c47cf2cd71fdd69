"""The smtp adapter sends to aiosmtpd, because our sink and our adapter could have the same mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session

from dispatcher.config.values import SmtpServer
from dispatcher.domain.outcome import Accepted, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.mime import render
from tests.providers.emails import an_email, send


@dataclass
class RecordingHandler:
    """A handler for aiosmtpd that records the emails."""

    envelopes: list[Envelope] = field(default_factory=list)

    async def handle_RCPT(  # noqa: N802
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if address.startswith("refused"):
            return "550 5.1.1 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        self.envelopes.append(envelope)
        return "250 OK"


@pytest.fixture
def handler() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
async def provider(handler: RecordingHandler) -> AsyncIterator[SmtpProvider]:
    """An adapter that sends to aiosmtpd."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SMTP(handler, hostname="second.test", enable_SMTPUTF8=True, loop=loop), "127.0.0.1", 0
    )
    own = SmtpSettings(url=SmtpServer("127.0.0.1", server.sockets[0].getsockname()[1], "none"), connections=1)
    adapter = SmtpProvider(own)
    yield adapter
    await adapter.close()
    server.close()
    await server.wait_closed()


async def test_aiosmtpd_reads_what_we_rendered(provider: SmtpProvider, handler: RecordingHandler) -> None:
    emails = [
        an_email(text=".\n..\n.leading\nFrom here\n"),
        an_email(text="x" * 5000, html="<p>" + "ü" * 5000),
        an_email(attachments=(OutgoingAttachment("a.bin", "application/octet-stream", bytes(range(256)) * 1000),)),
        an_email(to=("юзер@example.com",), subject="Привет"),
        an_email(text=""),
    ]

    for email in emails:
        sending = await send(provider, email)
        assert isinstance(sending.outcome, Accepted)

    assert [envelope.content for envelope in handler.envelopes] == [render(email).content for email in emails]
    assert [envelope.mail_from for envelope in handler.envelopes] == ["shop@example.org"] * 5
    assert handler.envelopes[3].rcpt_tos == ["юзер@example.com"]


async def test_aiosmtpd_refuses_the_same_and_accepts_the_next_email(
    provider: SmtpProvider, handler: RecordingHandler
) -> None:
    refused = await send(provider, an_email(to=("refused@example.com",)))
    partly = await send(provider, an_email(to=("refused@example.com", "ann@example.com")))

    assert isinstance(refused.outcome, Rejected)
    assert refused.outcome.code == "550 5.1.1"
    assert isinstance(partly.outcome, Accepted)
    assert [envelope.rcpt_tos for envelope in handler.envelopes] == [["ann@example.com"]]
