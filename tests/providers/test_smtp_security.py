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
from dispatcher.domain.outcome import Accepted
from dispatcher.errors import ProviderFault
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, an_email, outcome_text, send
from tests.providers.listeners import closing

LOGIN = ("shop-user", "correct horse")
INJECTED = "220 go ahead\r\n250-evil.example\r\n250 SIZE 1"
each_security = pytest.mark.parametrize("security", ["starttls", "tls"])


@asynccontextmanager
async def secured(
    folder: Path, behaviour: SmtpBehaviour, ca_file: Path | None, **changes: str
) -> AsyncIterator[tuple[SmtpProvider, SmtpSink]]:
    """Run a sink with this behaviour, and an adapter for it; `changes` replace parts of the server's URL."""
    async with running_sink(folder, behaviour) as sink:
        server = SmtpServer("127.0.0.1", sink.port, behaviour.security, *(behaviour.login or ()))
        own = SmtpSettings(url=replace(server, **changes))  # type: ignore[arg-type]
        async with closing(SmtpProvider(own, ca_file=ca_file)) as provider:
            yield provider, sink


@each_security
@pytest.mark.parametrize("text", ["Thank you.\n", "A long letter.\n" * 20_000], ids=["small", "large"])
async def test_a_server_with_a_trusted_certificate_gets_the_email(
    tmp_path: Path, authority: Authority, security: str, text: str
) -> None:
    behaviour = SmtpBehaviour(security=security, tls=authority.server)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        for _ in range(2):
            assert isinstance((await send(provider, an_email(text=text))).outcome, Accepted)

        assert sink.connections == 1
        assert [len(email.content) > len(text) for email in sink.received] == [True, True]


@each_security
@pytest.mark.parametrize(
    ("act", "seconds", "reason"),
    [
        (SmtpFault.FREEZE, LATER_SECONDS, "timeout_before_send"),
        (SmtpFault.RESET, PATIENCE_SECONDS, "connection_failed"),
    ],
)
async def test_a_large_body_that_the_server_does_not_read_is_not_on_the_wire(
    tmp_path: Path, authority: Authority, security: str, act: SmtpFault, seconds: float, reason: str
) -> None:
    behaviour = SmtpBehaviour(script={Step.BODY: act}, security=security, tls=authority.server)
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, _):
        sending = await send(provider, an_email(text="A long letter.\n" * 600_000), seconds=seconds)

    assert (outcome_text(sending.outcome), sending.left) == (f"deferred {reason}", 0)


@pytest.mark.parametrize("why", ["unknown authority", "another host"])
async def test_a_certificate_that_cannot_be_trusted_is_a_fault_after_starttls_too(
    tmp_path: Path, authority: Authority, why: str
) -> None:
    is_unknown = why == "unknown authority"
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server if is_unknown else authority.elsewhere)
    async with secured(tmp_path, behaviour, None if is_unknown else authority.ca_file) as (provider, sink):
        with pytest.raises(ProviderFault, match="certificate cannot be trusted"):
            await send(provider, an_email())

        assert not sink.commands["MAIL"]


@pytest.mark.parametrize(
    ("behaviour", "url", "words"),
    [
        (SmtpBehaviour(login=LOGIN), {"security": "starttls"}, "does not offer STARTTLS"),
        (SmtpBehaviour(login=LOGIN), {"username": "", "password": ""}, "requires credentials or TLS"),
    ],
    ids=["no STARTTLS", "no credentials"],
)
async def test_what_the_server_does_not_offer_is_a_fault_and_nothing_is_sent_without_it(
    behaviour: SmtpBehaviour, url: dict[str, str], words: str, tmp_path: Path
) -> None:
    async with secured(tmp_path, behaviour, None, **url) as (provider, sink):
        with pytest.raises(ProviderFault, match=words):
            await send(provider, an_email())

        assert not sink.commands["AUTH"]
        assert sink.commands["MAIL"] == (words == "requires credentials or TLS")


@pytest.mark.parametrize("reply", ["454 4.7.0 not now", INJECTED], ids=["refused", "CVE-2011-0411"])
async def test_a_refusal_of_starttls_or_an_unencrypted_reply_after_it_ends_the_connection(
    reply: str, tmp_path: Path, authority: Authority
) -> None:
    """CVE-2011-0411, the client's side: an attacker on the network sends a reply before TLS starts."""
    behaviour = SmtpBehaviour(security="starttls", tls=authority.server, script={Step.STARTTLS: reply})
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        sending = await send(provider, an_email())

        assert outcome_text(sending.outcome) == "deferred server_error"
        assert (sink.commands["EHLO"], sink.commands["MAIL"]) == (1, 0)  # no EHLO after STARTTLS


async def test_a_login_is_deferred_or_tried_once_and_the_adapter_recovers_once_it_is_corrected(
    tmp_path: Path, authority: Authority
) -> None:
    down = {Step.AUTH: "454 4.7.0 Temporary authentication failure"}
    behaviour = SmtpBehaviour(security="tls", tls=authority.server, login=LOGIN, script=down)
    async with secured(tmp_path, behaviour, authority.ca_file, password="wrong horse") as (provider, sink):
        assert getattr((await send(provider, an_email())).outcome, "code", None) == "454 4.7.0"
        down.clear()
        with pytest.raises(ProviderFault, match=r"535 5\.7\.8") as caught:
            await send(provider, an_email())
        assert "horse" not in str(caught.value)
        assert "shop-user" not in str(caught.value)
        assert (sink.commands["AUTH"], sink.commands["MAIL"]) == (2, 0)
        behaviour.login = ("shop-user", "wrong horse")

        assert isinstance((await send(provider, an_email())).outcome, Accepted)


async def test_check_reports_the_connection(tmp_path: Path, authority: Authority) -> None:
    behaviour = SmtpBehaviour(
        security="starttls", tls=authority.server, login=LOGIN, login_methods="LOGIN", size_limit=1000
    )
    async with secured(tmp_path, behaviour, authority.ca_file) as (provider, sink):
        words = await provider.check()

        assert words == f"127.0.0.1:{sink.port} answers: STARTTLS, verified; logged in; accepts up to 1000 octets."
        assert (sink.commands["QUIT"], sink.commands["MAIL"]) == (1, 0)
