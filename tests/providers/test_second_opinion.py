"""What aiosmtpd makes of the smtp adapter: our sink and our adapter could share a misunderstanding, it does not."""

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
class Judge:
    """aiosmtpd's handler: notes what it is given."""

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
def judge() -> Judge:
    return Judge()


@pytest.fixture
async def provider(judge: Judge) -> AsyncIterator[SmtpProvider]:
    """The adapter, sending to aiosmtpd."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SMTP(judge, hostname="second.test", enable_SMTPUTF8=True, loop=loop), "127.0.0.1", 0
    )
    own = SmtpSettings(url=SmtpServer("127.0.0.1", server.sockets[0].getsockname()[1], "none"), connections=1)
    adapter = SmtpProvider(own)
    yield adapter
    await adapter.close()
    server.close()
    await server.wait_closed()


async def test_it_reads_what_we_rendered(provider: SmtpProvider, judge: Judge) -> None:
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

    assert [envelope.content for envelope in judge.envelopes] == [render(email).content for email in emails]
    assert [envelope.mail_from for envelope in judge.envelopes] == ["shop@example.org"] * 5
    assert judge.envelopes[3].rcpt_tos == ["юзер@example.com"]


async def test_it_agrees_on_refusals_and_the_email_after(provider: SmtpProvider, judge: Judge) -> None:
    refused = await send(provider, an_email(to=("refused@example.com",)))
    partly = await send(provider, an_email(to=("refused@example.com", "ann@example.com")))

    assert isinstance(refused.outcome, Rejected)
    assert refused.outcome.code == "550 5.1.1"
    assert isinstance(partly.outcome, Accepted)
    assert [envelope.rcpt_tos for envelope in judge.envelopes] == [["ann@example.com"]]
