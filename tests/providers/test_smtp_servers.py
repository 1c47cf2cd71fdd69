"""The smtp adapter sends to a server that is not ours, and past a silent address; the envelope sender has a token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_sink import running_sink
from dispatcher.domain.bounce_address import BounceAddress
from dispatcher.domain.outcome import Accepted, Reason
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import RequestNotSent
from dispatcher.transport.mime import render
from tests.providers.emails import Sending, an_email, outcome_text, parsed, send
from tests.providers.listeners import closing

KEY = b"a-key-of-at-least-32-characters-one"
HOST = "mail.example.com"
SILENT = "127.0.0.2"


@dataclass
class RecordingHandler:
    envelopes: list[Envelope] = field(default_factory=list)

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        self.envelopes.append(envelope)
        return "250 OK"


@pytest.fixture
async def aiosmtpd() -> AsyncIterator[tuple[SmtpProvider, RecordingHandler]]:
    """An adapter that sends to aiosmtpd, because our sink and our adapter could have the same mistake."""
    loop, handler = asyncio.get_running_loop(), RecordingHandler()
    server = await loop.create_server(
        lambda: SMTP(handler, hostname="second.test", enable_SMTPUTF8=True, loop=loop), "127.0.0.1", 0
    )
    async with closing(_provider(server.sockets[0].getsockname()[1], connections=1)) as adapter:
        yield adapter, handler
    server.close()
    await server.wait_closed()


def _provider(port: int, host: str = "127.0.0.1", **changes: object) -> SmtpProvider:
    return SmtpProvider(SmtpSettings(url=SmtpServer(host, port, "none"), **changes))  # type: ignore[arg-type]


async def test_aiosmtpd_reads_what_we_rendered(aiosmtpd: tuple[SmtpProvider, RecordingHandler]) -> None:
    provider, handler = aiosmtpd
    emails = [
        an_email(text=".\n..\n.leading\nFrom here\n"),
        an_email(text="x" * 5000, html="<p>" + "ü" * 5000),
        an_email(attachments=(OutgoingAttachment("a.bin", "application/octet-stream", bytes(range(256)) * 1000),)),
        an_email(to=("юзер@example.com",), subject="Привет"),
        an_email(text=""),
    ]

    for email in emails:
        assert isinstance((await send(provider, email)).outcome, Accepted)

    assert [envelope.content for envelope in handler.envelopes] == [render(email).content for email in emails]
    assert [envelope.mail_from for envelope in handler.envelopes] == ["shop@example.org"] * 5
    assert handler.envelopes[3].rcpt_tos == ["юзер@example.com"]


@contextmanager
def swallowing(port: int) -> Iterator[None]:
    """Makes an address swallow packets: its queue of new connections is full, so the kernel answers no further SYN."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind((SILENT, port))
        full.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex((SILENT, port))
        yield


async def test_an_address_that_swallows_packets_does_not_stop_smtp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        addresses = (SILENT, "127.0.0.1") if host == HOST else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    async with running_sink(tmp_path) as sink:
        with swallowing(sink.port):
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            async with closing(_provider(sink.port, HOST)) as provider:
                sending = await send(provider, an_email())

    assert isinstance(sending.outcome, Accepted)


async def test_a_host_without_an_address_and_a_closed_port_are_named() -> None:
    host = "smtp.example.invalid"
    over_smtp = await send(_provider(25, host), an_email())
    with pytest.raises(RequestNotSent) as over_http:
        await HttpTransport(connections=1).post(f"https://{host}/", {}, b"", Sending())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = await send(_provider(closed.getsockname()[1]), an_email())

    assert over_http.value.outcome.reason is Reason.CONNECTION_FAILED
    assert f"the host name {host} cannot be resolved" in str(over_http.value.outcome.detail)
    assert f"the host name {host} cannot be resolved" in str(getattr(over_smtp.outcome, "detail", None))
    for sending in (over_smtp, refused):
        assert (outcome_text(sending.outcome), sending.left) == ("deferred connection_failed", 0)


async def test_with_an_address_for_bounces_the_envelope_sender_has_the_emails_token(tmp_path: Path) -> None:
    email = an_email(sender="Shop <shop@example.com>")
    bounces: dict[str, Any] = {"bounce_address": "bounces@example.net", "bounce_keys": (KEY,)}
    async with running_sink(tmp_path) as sink:
        for provider in (_provider(sink.port), _provider(sink.port, **bounces)):
            async with closing(provider):
                await send(provider, email)

    plain, received = sink.received
    assert plain.sender == "shop@example.com"
    assert BounceAddress("bounces@example.net", [KEY]).find(received.sender) == email.email_id
    assert received.content == plain.content
    assert parsed(received.content)["From"] == "Shop <shop@example.com>"
