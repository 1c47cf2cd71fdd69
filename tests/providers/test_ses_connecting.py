"""Tests the ses adapter's outcomes if no connection opens. The server's record of requests shows that no email was
sent."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from dispatcher.dev.http_double import running_double
from dispatcher.domain.outcome import Accepted, Deferred
from dispatcher.errors import ProviderFault
from tests.providers.conftest import Authority
from tests.providers.emails import SOON_SECONDS, an_email, send
from tests.providers.listeners import (
    Handler,
    close_at_once,
    full_listener,
    listening,
    proxy,
    reset_at_hello,
    speak_plain_http,
    stay_silent,
)
from tests.providers.outcome_table import FAULT, outcome_text
from tests.providers.ses_place import aws_environment, ses_place, ses_provider
from tests.providers.test_ses_outcomes import ELSEWHERE, LATE, NOT_CONNECTED, NOT_SIGNED


@pytest.mark.parametrize("handler", [close_at_once, reset_at_hello])
async def test_an_interrupted_handshake_is_a_definite_failure(handler: Handler, authority: Authority) -> None:
    async with (
        listening(handler) as port,
        ses_provider(f"https://127.0.0.1:{port}", ca_file=authority.ca_file) as provider,
    ):
        sending = await send(provider, an_email())

    assert (NOT_CONNECTED, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_a_hanging_handshake_is_a_definite_failure(authority: Authority) -> None:
    async with listening(stay_silent) as port:
        url = f"https://127.0.0.1:{port}"
        async with ses_provider(url, ca_file=authority.ca_file) as provider:
            sending = await send(provider, an_email(), seconds=SOON_SECONDS)

    assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_a_server_without_tls_is_a_fault(authority: Authority) -> None:
    async with (
        listening(speak_plain_http) as port,
        ses_provider(f"https://127.0.0.1:{port}", ca_file=authority.ca_file) as provider,
    ):
        with pytest.raises(ProviderFault, match="TLS with the endpoint failed"):
            await send(provider, an_email())


async def test_an_untrusted_certificate_is_a_fault(tmp_path: Path, authority: Authority) -> None:
    assert (NOT_SIGNED, FAULT) in ELSEWHERE
    async with ses_place(tmp_path / "a", tls=authority.server) as place:
        with pytest.raises(ProviderFault, match="cannot be trusted"):
            await send(place.provider, an_email())
        assert not place.double.begun
    async with ses_place(tmp_path / "b", tls=authority.elsewhere, ca_file=authority.ca_file) as place:
        with pytest.raises(ProviderFault, match="cannot be trusted"):
            await send(place.provider, an_email())
        assert not place.double.begun


async def test_a_closed_port_or_an_unknown_host_is_connection_failed(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        await place.double.close()
        refused = await send(place.provider, an_email())
    async with ses_provider("https://nowhere.invalid") as provider:
        unknown = await send(provider, an_email())

    for sending in (refused, unknown):
        assert (NOT_CONNECTED, outcome_text(sending.outcome)) in ELSEWHERE
        assert sending.left == 0


async def test_a_hanging_connection_attempt_is_a_definite_failure() -> None:
    with full_listener() as port:
        async with ses_provider(f"http://127.0.0.1:{port}") as provider:
            sending = await send(provider, an_email(), seconds=SOON_SECONDS)

    assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_without_credentials_nothing_is_sent_until_they_arrive(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        with (
            aws_environment(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY=""),
            pytest.raises(ProviderFault, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID"),
        ):
            await send(place.provider, an_email())
        begun = place.double.begun.total()
        sending = await send(place.provider, an_email())

    assert begun == 0
    assert isinstance(sending.outcome, Accepted)


async def test_requests_go_through_the_proxy(tmp_path: Path, authority: Authority) -> None:
    heads: list[bytes] = []
    async with (
        running_double(tmp_path, tls=authority.server) as double,
        proxy(b"HTTP/1.1 200 OK\r\n\r\n", double, heads) as url,
        ses_provider(
            double.url.replace("127.0.0.1", "localhost"),
            ca_file=authority.ca_file,
            environment={"HTTPS_PROXY": url.replace("://", "://ann:s%40fe@")},
        ) as provider,
    ):
        email = an_email()
        sending = await send(provider, email)
        again = await send(provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert isinstance(again.outcome, Accepted)
        assert sending.left == 1
        assert double.requests[str(email.email_id)] == 1
        (head,) = heads
        assert head.startswith(b"CONNECT localhost:%d HTTP/1.1\r\n" % double.port)
        assert b"\r\nProxy-Authorization: Basic %b\r\n" % base64.b64encode(b"ann:s@fe") in head


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 502 No\r\n\r\n",
        b"HTTP/1.1 407 No\r\n\r\n",
        b"",
        b"what?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nand more",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,
    ],
    ids=["502", "407", "nothing", "invalid HTTP", "more than its answer", "no end"],
)
async def test_a_proxys_refusal_is_a_definite_failure(answer: bytes, tmp_path: Path, authority: Authority) -> None:
    async with (
        running_double(tmp_path, tls=authority.server) as double,
        proxy(answer) as url,
        ses_provider(double.url, ca_file=authority.ca_file, environment={"HTTPS_PROXY": url}) as provider,
    ):
        sending = await send(provider, an_email())

        assert (NOT_CONNECTED, outcome_text(sending.outcome)) in ELSEWHERE
        assert isinstance(sending.outcome, Deferred)
        assert "the proxy answered" in (sending.outcome.detail or "")
        assert sending.left == 0
        assert not double.begun


async def test_a_silent_proxy_ends_at_the_deadline(tmp_path: Path, authority: Authority) -> None:
    async with (
        running_double(tmp_path, tls=authority.server) as double,
        listening(stay_silent) as port,
        ses_provider(
            double.url, ca_file=authority.ca_file, environment={"HTTPS_PROXY": f"http://127.0.0.1:{port}"}
        ) as provider,
    ):
        sending = await send(provider, an_email(), seconds=SOON_SECONDS)

    assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0
