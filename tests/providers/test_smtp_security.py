"""The smtp adapter never downgrades TLS or the login, and no message contains a secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.errors import ProviderFault
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, an_email, send

LOGIN = ("shop-user", "correct horse")


@asynccontextmanager
async def secured(
    folder: Path, behaviour: SmtpBehaviour, ca_file: Path | None, **changes: str
) -> AsyncIterator[tuple[SmtpProvider, SmtpSink]]:
    """Run a sink with this behaviour, and an adapter for it; `changes` replace parts of the server's URL."""
    async with running_sink(folder, behaviour) as sink:
        server = SmtpServer("127.0.0.1", sink.port, behaviour.security, *(behaviour.login or ()))
        provider = SmtpProvider(SmtpSettings(url=replace(server, **changes)), ca_file=ca_file)  # type: ignore[arg-type]
        try:
            yield provider, sink
        finally:
            await provider.close()


@pytest.mark.parametrize("security", ["starttls", "tls"])
@pytest.mark.parametrize("text", ["Thank you.\n", "A long letter.\n" * 200_000], ids=["small", "large"])
async def test_a_server_with_a_trusted_certificate_gets_the_email(
    tmp_path: Path, authority: Authority, security: str, text: str
) -> None:
    behaviour = SmtpBehaviour(security=security, tls=authority.server)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        first = await send(provider, an_email(text=text))
        second = await send(provider, an_email(text=text))

        assert isinstance(first.outcome, Accepted)
        assert isinstance(second.outcome, Accepted)
        assert sink.connections == 1
        assert [len(email.content) > len(text) for email in sink.received] == [True, True]


@pytest.mark.parametrize("security", ["starttls", "tls"])
@pytest.mark.parametrize(
    ("act", "seconds", "reason"),
    [
        (SmtpFault.FREEZE, LATER_SECONDS, Reason.TIMEOUT_BEFORE_SEND),
        (SmtpFault.RESET, PATIENCE_SECONDS, Reason.CONNECTION_FAILED),
    ],
)
async def test_a_large_body_that_the_server_does_not_read_is_not_on_the_wire(
    tmp_path: Path, authority: Authority, security: str, act: SmtpFault, seconds: float, reason: Reason
) -> None:
    behaviour = SmtpBehaviour(script={Step.BODY: act}, security=security, tls=authority.server)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, _):
        sending = await send(provider, an_email(text="A long letter.\n" * 600_000), seconds=seconds)

        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is reason
        assert sending.left == 0


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_an_unknown_authority_is_a_fault(tmp_path: Path, authority: Authority, security: str) -> None:
    behaviour = SmtpBehaviour(security=security, tls=authority.server)
    async with secured(tmp_path, behaviour, None) as (provider, sink):
        with pytest.raises(ProviderFault, match="certificate cannot be trusted"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_certificate_for_another_host_is_a_fault(tmp_path: Path, authority: Authority, security: str) -> None:
    behaviour = SmtpBehaviour(security=security, tls=authority.elsewhere)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        with pytest.raises(ProviderFault, match="certificate cannot be trusted"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]


async def test_missing_starttls_is_a_fault_and_nothing_is_sent_unencrypted(tmp_path: Path) -> None:
    behaviour = SmtpBehaviour(login=LOGIN)
    async with secured(tmp_path, behaviour, None, security="starttls") as (provider, sink):
        with pytest.raises(ProviderFault, match="does not offer STARTTLS"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]
        assert not sink.commands["AUTH"]


async def test_a_temporary_refusal_of_starttls_is_deferred(tmp_path: Path, authority: Authority) -> None:
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server, script={Step.STARTTLS: "454 4.7.0 not now"})
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        sending = await send(provider, an_email())

        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.SERVER_ERROR
        assert not sink.commands["MAIL"]


async def test_an_unencrypted_reply_after_starttls_ends_the_connection(tmp_path: Path, authority: Authority) -> None:
    """Tests the client's side of CVE-2011-0411: an attacker on the network sends a reply before TLS starts."""
    injected = "220 go ahead\r\n250-evil.example\r\n250 SIZE 1"
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server, script={Step.STARTTLS: injected})
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        sending = await send(provider, an_email())

        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.SERVER_ERROR
        assert sink.commands["EHLO"] == 1  # none after STARTTLS


async def test_smtps_without_tls_is_a_fault_or_connection_failed(tmp_path: Path) -> None:
    async with secured(tmp_path, SmtpBehaviour(), None, security="tls") as (provider, sink):
        with pytest.raises(ProviderFault, match="TLS with the SMTP server failed"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]


async def test_a_hanging_handshake_ends_at_the_deadline(tmp_path: Path, authority: Authority) -> None:
    behaviour = SmtpBehaviour(script={Step.CONNECT: SmtpFault.HANG})
    async with secured(tmp_path, behaviour, authority.ca_file, security="tls") as (provider, _):
        sending = await send(provider, an_email(), seconds=SOON_SECONDS)

    assert isinstance(sending.outcome, Deferred)
    assert sending.outcome.reason is Reason.TIMEOUT_BEFORE_SEND


@pytest.mark.parametrize("methods", ["PLAIN LOGIN", "LOGIN"])
async def test_login_works_with_each_method(tmp_path: Path, authority: Authority, methods: str) -> None:
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server, login=LOGIN, login_methods=methods)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        sending = await send(provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert sink.commands["AUTH"] == 1


async def test_wrong_credentials_are_tried_once_and_raise_a_fault_without_secrets(
    tmp_path: Path, authority: Authority
) -> None:
    behaviour = SmtpBehaviour(security="tls", tls=authority.server, login=LOGIN)
    async with secured(tmp_path, behaviour, authority.ca_file, password="wrong horse") as (provider, sink):
        with pytest.raises(ProviderFault) as caught:
            await send(provider, an_email())

        assert "535 5.7.8" in str(caught.value)
        assert "horse" not in str(caught.value)
        assert "shop-user" not in str(caught.value)
        assert sink.commands["AUTH"] == 1
        assert not sink.commands["MAIL"]


async def test_a_temporarily_refused_login_is_not_a_wrong_password(tmp_path: Path, authority: Authority) -> None:
    down = {Step.AUTH: "454 4.7.0 Temporary authentication failure"}
    behaviour = SmtpBehaviour(security="tls", tls=authority.server, login=LOGIN, script=down)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, _):
        sending = await send(provider, an_email())

    assert isinstance(sending.outcome, Deferred)
    assert sending.outcome.code == "454 4.7.0"


async def test_a_server_without_login_is_a_fault(tmp_path: Path) -> None:
    async with secured(tmp_path, SmtpBehaviour(), None, username="someone", password="x") as (provider, sink):
        with pytest.raises(ProviderFault, match="no login that we support"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]


async def test_a_server_that_requires_missing_credentials_is_a_fault(tmp_path: Path) -> None:
    async with secured(tmp_path, SmtpBehaviour(login=LOGIN), None, username="", password="") as (provider, _):
        with pytest.raises(ProviderFault, match="requires credentials or TLS"):
            await send(provider, an_email())


async def test_the_adapter_recovers_once_the_fault_is_corrected(tmp_path: Path, authority: Authority) -> None:
    behaviour = SmtpBehaviour(security="tls", tls=authority.server, login=("shop-user", "another horse"))
    async with secured(tmp_path, behaviour, authority.ca_file, password="correct horse") as (provider, sink):
        with pytest.raises(ProviderFault):
            await send(provider, an_email())
        sink.behaviour.login = LOGIN

        sending = await send(provider, an_email())

    assert isinstance(sending.outcome, Accepted)


async def test_check_reports_the_connection(tmp_path: Path, authority: Authority) -> None:
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server, login=LOGIN, size_limit=1000)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        words = await provider.check()

        assert words == f"127.0.0.1:{sink.port} answers: STARTTLS, verified; logged in; accepts up to 1000 octets."
        assert sink.commands["QUIT"] == 1
        assert not sink.commands["MAIL"]


async def test_check_of_an_unreachable_server_is_a_fault(tmp_path: Path) -> None:
    async with secured(tmp_path, SmtpBehaviour(), None) as (provider, sink):
        await sink.close()

        with pytest.raises(ProviderFault, match="no connection to the server"):
            await provider.check()
