"""A silent address of a host does not delay an email. A failed connection names its cause."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_sink import running_sink
from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import RequestNotSent
from tests.providers.attempts import FakeAttempt
from tests.providers.emails import PATIENCE_SECONDS, an_email, send

HOST = "mail.example.com"
SILENT = "127.0.0.2"


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
            provider = SmtpProvider(SmtpSettings(url=SmtpServer(HOST, sink.port, "none")))
            sending = await send(provider, an_email())
            await provider.close()

    assert isinstance(sending.outcome, Accepted)


async def test_a_host_without_an_address_is_named() -> None:
    host = "smtp.example.invalid"
    over_smtp = await send(SmtpProvider(SmtpSettings(url=SmtpServer(host, 25, "none"))), an_email())
    call = FakeAttempt(1, asyncio.get_running_loop().time() + PATIENCE_SECONDS, lambda: None)
    with pytest.raises(RequestNotSent) as over_http:
        await HttpTransport(connections=1).post(f"https://{host}/", {}, b"", call)

    assert isinstance(over_smtp.outcome, Deferred)
    for outcome in (over_smtp.outcome, over_http.value.outcome):
        assert outcome.reason is Reason.CONNECTION_FAILED
        assert f"the host name {host} cannot be resolved" in (outcome.detail or "")
