"""What the ses adapter says where no connection comes about; judged by what was posted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher.domain.outcome import Accepted
from dispatcher.errors import ProviderFault
from tests.providers.conftest import Authority
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.listeners import (
    Handler,
    close_at_once,
    full_house,
    listening,
    proxy,
    reset_at_hello,
    say_nothing,
    speak_plain_http,
)
from tests.providers.ses_place import aws_environment, ses_place, ses_provider
from tests.providers.test_ses_outcomes import ELSEWHERE, FAULT, LATE, NOT_CONNECTED, NOT_SIGNED, words_for


@pytest.mark.parametrize("handler", [close_at_once, reset_at_hello])
async def test_tls_that_breaks_off_is_a_definite_no(handler: Handler, authority: Authority) -> None:
    async with (
        listening(handler) as port,
        ses_provider(f"https://127.0.0.1:{port}", ca_file=authority.ca_file) as provider,
    ):
        sending = await send(provider, an_email())

    assert (NOT_CONNECTED, words_for(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_tls_that_never_ends_is_a_definite_no(authority: Authority) -> None:
    async with listening(say_nothing) as port:
        url = f"https://127.0.0.1:{port}"
        async with ses_provider(url, ca_file=authority.ca_file, timeout_seconds=PATIENCE_SECONDS) as provider:
            at_the_deadline = await send(provider, an_email(), seconds=SOON_SECONDS)
        async with ses_provider(url, ca_file=authority.ca_file, timeout_seconds=SOON_SECONDS) as provider:
            at_boto3s_timeout = await send(provider, an_email())

    assert (LATE, words_for(at_the_deadline.outcome)) in ELSEWHERE
    assert (NOT_CONNECTED, words_for(at_boto3s_timeout.outcome)) in ELSEWHERE
    assert at_the_deadline.left == at_boto3s_timeout.left == 0


async def test_a_server_without_tls_is_a_fault(authority: Authority) -> None:
    async with (
        listening(speak_plain_http) as port,
        ses_provider(f"https://127.0.0.1:{port}", ca_file=authority.ca_file) as provider,
    ):
        with pytest.raises(ProviderFault, match="TLS with the endpoint failed"):
            await send(provider, an_email())


async def test_a_certificate_that_is_not_trusted_is_a_fault(tmp_path: Path, authority: Authority) -> None:
    assert (NOT_SIGNED, FAULT) in ELSEWHERE
    async with ses_place(tmp_path / "a", tls=authority.server) as place:
        with pytest.raises(ProviderFault, match="cannot be trusted"):
            await send(place.provider, an_email())
        assert not place.double.begun
    async with ses_place(tmp_path / "b", tls=authority.elsewhere, ca_file=authority.ca_file) as place:
        with pytest.raises(ProviderFault, match="cannot be trusted"):
            await send(place.provider, an_email())
        assert not place.double.begun


async def test_nobody_listens_or_has_the_name(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        await place.double.close()
        refused = await send(place.provider, an_email())
    async with ses_provider("https://nowhere.invalid") as provider:
        unknown = await send(provider, an_email())

    for sending in (refused, unknown):
        assert (NOT_CONNECTED, words_for(sending.outcome)) in ELSEWHERE
        assert sending.left == 0


async def test_a_connect_that_hangs_is_a_definite_no() -> None:
    with full_house() as port:
        async with ses_provider(f"http://127.0.0.1:{port}") as provider:
            at_the_deadline = await send(provider, an_email(), seconds=SOON_SECONDS)
        async with ses_provider(f"http://127.0.0.1:{port}", timeout_seconds=SOON_SECONDS) as provider:
            at_boto3s_timeout = await send(provider, an_email())

    assert (LATE, words_for(at_the_deadline.outcome)) in ELSEWHERE
    assert (NOT_CONNECTED, words_for(at_boto3s_timeout.outcome)) in ELSEWHERE
    assert at_the_deadline.left == at_boto3s_timeout.left == 0


async def test_without_credentials_nothing_leaves(tmp_path: Path) -> None:
    async with ses_place(tmp_path, is_warm=False) as place:
        with (
            aws_environment(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY=""),
            pytest.raises(ProviderFault, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID"),
        ):
            await send(place.provider, an_email())

        assert not place.double.begun


async def test_through_a_proxy(tmp_path: Path, authority: Authority) -> None:
    async with ses_place(tmp_path, tls=authority.server, ca_file=authority.ca_file, is_warm=False) as place:
        async with proxy(b"HTTP/1.1 200 OK\r\n\r\n", place.double) as url:
            with aws_environment(HTTPS_PROXY=url):
                email = an_email()
                sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert sending.left == 1
        assert place.double.requests == {str(email.email_id): 1}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 502 No\r\n\r\n", b"HTTP/1.1 407 No\r\n\r\n", b"", b"what?\r\n\r\n"])
async def test_a_proxy_that_refuses_is_a_definite_no(answer: bytes, tmp_path: Path, authority: Authority) -> None:
    async with ses_place(tmp_path, tls=authority.server, ca_file=authority.ca_file, is_warm=False) as place:
        async with proxy(answer) as url:
            with aws_environment(HTTPS_PROXY=url):
                sending = await send(place.provider, an_email())

        assert (NOT_CONNECTED, words_for(sending.outcome)) in ELSEWHERE
        assert sending.left == 0
        assert not place.double.begun
