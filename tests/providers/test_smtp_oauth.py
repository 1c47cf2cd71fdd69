"""The smtp adapter logs in with access tokens (XOAUTH2), which the processes of a host share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, Step
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.domain.outcome import Accepted, Concern, Deferred, Outcome, Reason
from dispatcher.errors import ProviderFault
from dispatcher.host.access_tokens import AccessTokens
from dispatcher.providers.smtp import EXCHANGE_SCOPE, SmtpProvider, SmtpSettings
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.oauth import OAuthGrant, TokenUnavailable, request_token
from tests.providers.emails import SOON_SECONDS, an_email, send
from tests.providers.listeners import close_at_once, closing, listening
from tests.providers.token_endpoint import REFUSALS, SECRETS, TokenEndpoint, token_endpoint
from tests.waiting import until

USER = "billing@example.com"
SECRET, REFRESH, RENEWED, _ = SECRETS


@dataclass
class Place:
    endpoint: TokenEndpoint
    sink: SmtpSink
    own: SmtpSettings
    run_dir: Path

    @asynccontextmanager
    async def provider(self, **own: Any) -> AsyncIterator[SmtpProvider]:
        settings = replace(self.own, **own)
        async with closing(SmtpProvider(settings, run_dir=self.run_dir)) as provider:
            yield provider

    async def outcome(self, **own: Any) -> Outcome | ProviderFault:
        async with self.provider(**own) as provider:
            return await sent(provider)

    @property
    def requests(self) -> int:
        return len(self.endpoint.forms)


async def sent(provider: SmtpProvider) -> Outcome | ProviderFault:
    try:
        outcome = (await send(provider, an_email())).outcome
    except ProviderFault as fault:
        return fault
    assert outcome is not None
    return outcome


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with token_endpoint() as endpoint:
        behaviour = SmtpBehaviour(login=(USER, "never"), login_methods="LOGIN XOAUTH2", tokens=endpoint.issued)
        async with running_sink(tmp_path / "sink", behaviour) as sink:
            own = SmtpSettings(
                url=SmtpServer("127.0.0.1", sink.port, "none", USER),
                oauth_token_url=endpoint.url,
                oauth_client_id="app",
                oauth_client_secret=SECRET,
                emails_per_connection=1,
            )
            yield Place(endpoint, sink, own, tmp_path)


async def test_many_connections_of_several_processes_use_one_token(place: Place) -> None:
    async with place.provider() as first, place.provider() as second:
        outcomes = await asyncio.gather(*(sent(provider) for provider in (first, second) * 10))
        assert "logged in with an access token" in await second.check()

    assert all(isinstance(outcome, Accepted) for outcome in outcomes)
    assert place.endpoint.forms == [
        {"grant_type": "client_credentials", "client_id": "app", "client_secret": SECRET, "scope": EXCHANGE_SCOPE}
    ]
    stored = [path for path in place.run_dir.glob("oauth-*") if path.suffix in (".json", ".lock")]
    assert [path.stat().st_mode & 0o777 for path in stored] == [0o600] * 2


async def test_a_token_that_was_revoked_is_replaced_once(place: Place) -> None:
    async with place.provider() as provider:
        assert isinstance(await sent(provider), Accepted)
        place.endpoint.issued.clear()
        assert isinstance(await sent(provider), Accepted)
        assert place.requests == 2

        place.sink.behaviour.script = {Step.AUTH: "535 5.7.3 Authentication unsuccessful"}
        for _ in range(3):
            assert isinstance(await sent(provider), ProviderFault)
        assert place.requests == 3


async def test_a_refresh_token_that_the_server_replaces_is_replaced_until_the_server_refuses_it(place: Place) -> None:
    place.endpoint.renewed = RENEWED
    async with place.provider(oauth_refresh_token=REFRESH, oauth_client_secret="") as provider:
        for used in (REFRESH, RENEWED):
            assert isinstance(await sent(provider), Accepted)
            form = {"grant_type": "refresh_token", "client_id": "app", "refresh_token": used}
            assert place.endpoint.forms[-1] == form
            place.endpoint.issued.clear()
        place.endpoint.answer = REFUSALS["revoked"]
        assert isinstance(await sent(provider), ProviderFault)

    assert [form["refresh_token"] for form in place.endpoint.forms[2:]] == [RENEWED, REFRESH]


@pytest.mark.parametrize(
    ("refusal", "code", "remedy"),
    [
        ("tenant", "AADSTS90002", "Check the tenant in DISPATCHER_SMTP_OAUTH_TOKEN_URL"),
        ("app", "AADSTS700016", "The tenant does not have this app."),
        ("secret", "AADSTS7000215", "to the value of the client secret, not to its id"),
        ("expired secret", "AADSTS7000222", "The client secret has expired."),
        ("consent", "AADSTS65001", "SMTP.SendAsApp"),
        ("scope", "AADSTS70011", "DISPATCHER_SMTP_OAUTH_SCOPE"),
        ("revoked", "invalid_grant", "consent to the app again"),
        ("grant", "unauthorized_client", "Allow the app to request tokens in this way"),
        ("client", "invalid_client", "Check DISPATCHER_SMTP_OAUTH_CLIENT_ID and"),
        ("odd", "403", "Check DISPATCHER_SMTP_OAUTH_TOKEN_URL"),
        ("page", "200 without an access token", "Check DISPATCHER_SMTP_OAUTH_TOKEN_URL"),
    ],
)
async def test_a_refused_token_is_a_fault_of_the_provider_with_its_remedy_and_no_secret(
    refusal: str, code: str, remedy: str, place: Place
) -> None:
    place.endpoint.answer = REFUSALS[refusal]

    fault = await place.outcome()

    assert isinstance(fault, ProviderFault)
    assert code in fault.message
    assert remedy in str(fault.remedy)
    assert not [secret for secret in SECRETS if secret in str(fault)]
    assert place.sink.connections == 0


@pytest.mark.parametrize(
    ("reply", "remedy"),
    [
        (
            "535 5.7.139 SmtpClientAuthentication is disabled for the Mailbox.",
            "-SmtpClientAuthenticationDisabled $false",
        ),
        ("535 5.7.3 Authentication unsuccessful [AM0PR01.eurprd01.prod.outlook.com]", "Add-MailboxPermission"),
        (None, "the account that consented to the app"),
    ],
)
async def test_a_refused_login_names_the_permission_and_repeats_no_token(
    reply: str | None, remedy: str, place: Place
) -> None:
    place.sink.behaviour.script = {Step.AUTH: reply} if reply else {}
    place.sink.behaviour.login = (USER, "never") if reply else ("other@example.com", "never")

    fault = await place.outcome()

    assert isinstance(fault, ProviderFault)
    assert "refuses the login with OAuth (535" in fault.message
    assert reply or "(status 401)" in fault.message
    assert remedy in str(fault.remedy)
    assert USER not in str(fault)
    assert not [secret for secret in SECRETS if secret in str(fault)]
    assert place.requests == 1
    place.sink.behaviour.login_methods = "PLAIN LOGIN"
    assert "AUTH XOAUTH2" in str(await place.outcome())


@pytest.mark.parametrize("trouble", ["busy", "throttled", "closed", "refused"])
async def test_a_token_endpoint_that_fails_for_now_concerns_the_provider_and_no_email(
    trouble: str, place: Place
) -> None:
    statuses = {"busy": 503, "throttled": 429}
    reasons = {"busy": Reason.SERVER_ERROR, "throttled": Reason.THROTTLED}
    async with listening(close_at_once) as port:
        url = {"closed": f"http://127.0.0.1:{port}/token", "refused": "http://127.0.0.1:9/token"}
        place.endpoint.answer = (statuses.get(trouble, 200), {})

        outcome = await place.outcome(oauth_token_url=url.get(trouble, place.endpoint.url))

    assert isinstance(outcome, Deferred)
    assert outcome.concern is Concern.PROVIDER
    assert outcome.reason is reasons.get(trouble, Reason.CONNECTION_FAILED)
    assert "the token endpoint" in str(outcome.detail)


async def test_an_email_that_waits_too_long_for_a_token_was_not_tried_and_the_request_serves_the_next(
    place: Place,
) -> None:
    place.endpoint.open.clear()
    async with place.provider() as provider:
        late = (await send(provider, an_email(), seconds=SOON_SECONDS)).outcome
        place.endpoint.open.set()
        assert isinstance(await sent(provider), Accepted)

    assert isinstance(late, Deferred)
    assert (late.reason, late.concern) == (Reason.TIMEOUT_BEFORE_SEND, Concern.PROVIDER)
    assert place.requests == 1


class Host:
    """The processes of a host, whose steady clock the test moves."""

    def __init__(self, endpoint: TokenEndpoint, folder: Path | None) -> None:
        self.now = 1000.0
        self.grant = OAuthGrant(endpoint.url, "app", SECRET)
        self.folder = folder

    @asynccontextmanager
    async def process(self) -> AsyncIterator[AccessTokens]:
        async with closing(HttpTransport(connections=1)) as transport:
            request = partial(request_token, provider="smtp", transport=transport)
            tokens = AccessTokens(self.grant, request, folder=self.folder, clock=lambda: self.now)
            async with closing(tokens):
                yield tokens


async def test_one_process_renews_a_token_before_it_expires_and_meanwhile_all_use_the_old_one(place: Place) -> None:
    endpoint, host = place.endpoint, Host(place.endpoint, place.run_dir)
    async with host.process() as first, host.process() as second:
        old = (await first.get()).text
        host.now += 3299
        assert [(await tokens.get()).text for tokens in (first, second)] == [old] * 2
        host.now += 2
        endpoint.open.clear()
        assert [(await tokens.get()).text for tokens in (first, second, first)] == [old] * 3
        await until(lambda: len(endpoint.forms) == 2)
        endpoint.open.set()
        await until(lambda: len(endpoint.issued) == 2)
        await asyncio.gather(*(tokens._pending for tokens in (first, second) if tokens._pending))
        host.now += 31

        new = [(await tokens.get()).text for tokens in (first, second)]
        await asyncio.gather(*(tokens._pending for tokens in (first, second) if tokens._pending))

    assert old not in (new[0], (await first.get()).text, (await second.get()).text)
    assert len(endpoint.forms) == 2


async def test_a_renewal_that_fails_is_logged_and_repeated_while_the_token_is_valid(place: Place) -> None:
    endpoint, host = place.endpoint, Host(place.endpoint, None)
    async with host.process() as tokens:
        old = await tokens.get()
        endpoint.answer = (500, {})
        for seconds in (3301, 10, 10, 30):
            host.now += seconds
            assert await tokens.get() == old
            await until(lambda: tokens._pending is None)
        assert len(endpoint.forms) == 3  # the first, and two renewals

        host.now = old.expires_at
        with pytest.raises(TokenUnavailable):
            await tokens.get()


@pytest.mark.parametrize(
    ("life", "seconds"), [(3599, 3599), ("3599", 3599), (None, 300), ("soon", 300), (-5, 300), (1e9, 86400)]
)
async def test_the_life_of_a_token_counts_from_the_request_and_by_no_wall_clock(
    life: object, seconds: float, place: Place
) -> None:
    place.endpoint.life = life  # the endpoint's Date is of 1970
    host = Host(place.endpoint, None)
    async with host.process() as tokens:
        assert (await tokens.get()).expires_at == host.now + seconds


@pytest.mark.parametrize(
    ("was", "becomes", "requests"),
    [(b"", b"", 1), (b'"boot_id":"', b'"boot_id":"0', 2), (b"}", b"", 2)],
    ids=["intact", "of an earlier boot", "damaged"],
)
async def test_a_process_uses_the_token_in_the_file_unless_it_is_of_an_earlier_boot(
    was: bytes, becomes: bytes, requests: int, place: Place
) -> None:
    host = Host(place.endpoint, place.run_dir)
    async with host.process() as tokens:
        await tokens.get()
    (path,) = place.run_dir.glob("oauth-*.json")
    path.write_bytes(path.read_bytes().replace(was, becomes))

    async with host.process() as tokens:
        await tokens.get()

    assert place.requests == requests
