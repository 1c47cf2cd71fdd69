"""The login understands what real servers ask and answer. The password goes only to a prompt for the password."""

from __future__ import annotations

import base64
from typing import Final

import pytest

from dispatcher.config import load
from dispatcher.domain.outcome import Accepted, Deferred, Outcome
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Provider
from dispatcher.providers.registry import open_provider
from tests.providers.emails import an_email, send
from tests.providers.listeners import closing, listening
from tests.providers.scripted_server import PASSWORD, PLAIN, USER, ScriptedServer, scripted


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


LOGIN: Final = f"\0{USER}\0{PASSWORD}"
WELCOME: Final = "235 welcome"
ASKS_USER: Final = f"334 {b64('Username:')}"
ASKS_PASSWORD: Final = f"334 {b64('Password:')}"
UNKNOWN: Final = "504 5.5.4 unrecognized authentication type"


def offering(methods: str, *login: str, **replies: str) -> ScriptedServer:
    """A server that offers these methods, and answers the lines of the login in this order."""
    return ScriptedServer({**PLAIN, "EHLO": f"250-hi\r\n250 AUTH {methods}", "AUTH": "", **replies}, login=[*login])


@pytest.mark.parametrize(
    ("offered", "replies", "lines"),
    [
        ("PLAIN LOGIN", [WELCOME], [f"AUTH PLAIN {LOGIN}"]),
        # The server ignores the initial response, and asks.
        ("PLAIN", ["334 ", WELCOME], [f"AUTH PLAIN {LOGIN}", LOGIN]),
        ("PLAIN", ["334", WELCOME], [f"AUTH PLAIN {LOGIN}", LOGIN]),
        ("PLAIN", ["334 Go on", WELCOME], [f"AUTH PLAIN {LOGIN}", LOGIN]),
        # The server refuses the initial response.
        ("PLAIN", ["501 5.5.2 no", "334 ", WELCOME], [f"AUTH PLAIN {LOGIN}", "AUTH PLAIN", LOGIN]),
        ("PLAIN", [UNKNOWN, "334 ", WELCOME], [f"AUTH PLAIN {LOGIN}", "AUTH PLAIN", LOGIN]),
        # The server offers PLAIN, but does not know it.
        (
            "PLAIN LOGIN",
            [UNKNOWN, UNKNOWN, ASKS_USER, ASKS_PASSWORD, WELCOME],
            [f"AUTH PLAIN {LOGIN}", "AUTH PLAIN", "AUTH LOGIN", USER, PASSWORD],
        ),
        # The server treats every method as LOGIN.
        (
            "PLAIN LOGIN",
            [ASKS_USER, "501 cancelled", ASKS_USER, ASKS_PASSWORD, WELCOME],
            [f"AUTH PLAIN {LOGIN}", "*", "AUTH LOGIN", USER, PASSWORD],
        ),
        *(
            ("LOGIN", [f"334 {user}".rstrip(), f"334 {password}".rstrip(), WELCOME], ["AUTH LOGIN", USER, PASSWORD])
            for user, password in [
                (b64("Username:"), b64("Password:")),
                (b64("User Name\0"), b64("Password\0")),
                (b64("Enter user name for mail"), b64("Enter password for the user name")),
                (b64("Benutzername:"), b64("Kennwort:")),
                (b64("ユーザー名"), b64("パスワード")),
                (b64("Anv\u00e4ndare"), b64("Hemlighet")),
                ("Username:", "Password:"),
                ("", ""),
            ]
        ),
    ],
)
async def test_each_dialogue_ends_with_a_login(offered: str, replies: list[str], lines: list[str]) -> None:
    server = offering(offered, *replies)

    assert isinstance(await sent(server), Accepted)
    assert server.lines[: len(lines)] == lines


@pytest.mark.parametrize(
    "replies",
    [
        [ASKS_USER, ASKS_USER, "501 cancelled"],
        [f"334 {b64('Benutzer')}", f"334 {b64('Benutzer')}", "535 cancelled"],
        [f"334 {b64('Käyttäjä')}", f"334 {b64('Käyttäjä')}", "501 cancelled"],
        [ASKS_PASSWORD, "501 cancelled"],
        [ASKS_USER, f"334 {b64('User Name')}", "501 cancelled"],
        [ASKS_USER, f"334 {b64('Enter your account name again')}", "501 cancelled"],
        [UNKNOWN],
    ],
)
async def test_the_password_never_goes_to_a_prompt_for_something_else(replies: list[str]) -> None:
    server = offering("LOGIN", *replies)

    fault = await sent(server)

    assert isinstance(fault, ProviderFault)
    assert "refuses the login" in fault.message
    assert PASSWORD not in server.lines
    assert "does not complete a login method" in str(fault.remedy) or replies[-1].startswith("535")


OAUTH, APP, TLS = "Log in with OAuth", "Create an app password", "The server requires TLS"
LIMIT, TRANSITION, PLAIN_WRONG = "Raise the account's limit", "Set a new password", "Check the user and password"


@pytest.mark.parametrize(
    ("reply", "words", "remedy"),
    [
        ("550 5.7.30 Basic authentication is not supported for Client Submission.", "Basic authentication", OAUTH),
        ("535 5.7.139 Authentication unsuccessful, basic authentication is disabled.", "is disabled", OAUTH),
        ("535 5.7.139 SmtpClientAuthentication is disabled for the Tenant.", "disabled for the Tenant", OAUTH),
        ("535 5.7.8 Use OAuth 2.0 to sign in", "Use OAuth 2.0", OAUTH),
        ("534-5.7.9 Application-specific password required.\r\n534 5.7.9 See help", "Application-specific", APP),
        (
            "534-5.7.14 <https://accounts.example.com/x> Please\r\n534 5.7.14 log in with your web browser",
            "log in",
            APP,
        ),
        ("535 5.7.8 Error: app password required", "app password required", APP),
        ("530 5.7.0 Must issue a STARTTLS command first", "Must issue a STARTTLS", TLS),
        ("538 5.7.11 Encryption required for requested authentication mechanism", "Encryption required", TLS),
        ("535 5.7.8 Error: authentication failed: quota exceeded", "quota exceeded", LIMIT),
        ("432 4.7.12 A password transition is needed", "A password transition is needed", TRANSITION),
        ("432 A password transition is needed", "A password transition is needed", TRANSITION),
        ("535 5.7.8 Your password has expired", "has expired", TRANSITION),
        ("535 5.7.8 Error: authentication failed", "authentication failed", PLAIN_WRONG),
    ],
)
async def test_a_refused_login_keeps_its_words_and_has_a_remedy(reply: str, words: str, remedy: str) -> None:
    server = offering("PLAIN", reply)

    fault = await sent(server)

    assert isinstance(fault, ProviderFault)
    assert f"({reply[:3]}" in fault.message
    assert words in fault.message
    assert remedy in str(fault.remedy)
    assert len(server.lines) == 1


@pytest.mark.parametrize(
    ("reply", "detail", "remedy"),
    [
        (
            "451 Authentication failed: Maximum credits exceeded",
            "Authentication failed: Maximum credits exceeded",
            LIMIT,
        ),
        ("454 4.7.0 Temporary authentication failure", "Temporary authentication failure", "Wait"),
        ("421 4.7.0 Too many login attempts", "Too many login attempts", "Wait"),
    ],
)
async def test_a_login_refused_for_now_keeps_its_words_and_is_no_fault(reply: str, detail: str, remedy: str) -> None:
    async with scripted(offering("PLAIN", reply, reply)) as provider:
        outcome = (await send(provider, an_email())).outcome
        with pytest.raises(ProviderFault) as caught:
            await provider.check()

    assert isinstance(outcome, Deferred)
    assert outcome.detail == f"the server temporarily refuses the login: {detail}"
    assert outcome.code == reply[: -len(detail)].rstrip()
    assert remedy in str(caught.value.remedy)


async def test_a_server_that_offers_only_oauth_is_named() -> None:
    fault = await sent(offering("XOAUTH2"))

    assert isinstance(fault, ProviderFault)
    assert "no login that we support" in fault.message
    assert OAUTH in str(fault.remedy)


@pytest.mark.parametrize("offer", ["AUTH CRAM-MD5", "AUTH=CRAM-MD5"])
async def test_a_challenge_is_answered_as_in_rfc_2195(offer: str) -> None:
    challenge = "334 PDE4OTYuNjk3MTcwOTUyQHBvc3RvZmZpY2UucmVzdG9uLm1jaS5uZXQ+"
    server = offering("", challenge, WELCOME, EHLO=f"250-hi\r\n250 {offer}")
    async with scripted(server, ("tim", "tanstaaftanstaaf")) as provider:
        assert isinstance((await send(provider, an_email())).outcome, Accepted)

    assert server.lines == ["AUTH CRAM-MD5", "tim b913a602c7eda7a495b4e6e7334d3890"]


@pytest.mark.parametrize(
    ("step", "echo"),
    [
        ("AUTH", f"535 5.7.8 AUTH PLAIN {b64(LOGIN)[:-4]} failed"),
        ("AUTH", f"535 5.7.8 user {USER}, password {PASSWORD}"),
        ("MAIL", f"530 5.7.0 no login for {b64(USER)} with {b64(PASSWORD)}"),
        ("RCPT", f"550 5.7.1 basic {b64(f'{USER}:{PASSWORD}')}"),
    ],
)
async def test_no_text_repeats_the_login(step: str, echo: str) -> None:
    async with listening(ScriptedServer({**PLAIN, step: echo}).talk) as port:
        url = f"smtp://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}?tls=none"
        settings = load({"DISPATCHER_PROVIDERS": "smtp", "DISPATCHER_SMTP_URL": url})
        async with closing(open_provider("smtp", settings)) as provider:
            end = await ended(provider)

    text = str(end) if isinstance(end, ProviderFault) else str(getattr(end, "detail", ""))
    assert "<credential>" in text
    for secret in (PASSWORD, b64(PASSWORD)[:8], b64(LOGIN)[:12]):
        assert secret not in text


NOT_FOUND: Final = "450 4.7.1 <host>: Helo command rejected: Host not found"


@pytest.mark.parametrize(
    ("step", "reply"),
    [
        ("EHLO", "504 5.5.2 <host>: Helo command rejected: need fully-qualified hostname"),
        ("EHLO", "550 Access denied - Invalid HELO name (See RFC2821 4.1.1.1)"),
        *((step, NOT_FOUND) for step in ("EHLO", "MAIL")),
        ("EHLO", "501 5.0.0 EHLO requires domain address"),
        ("RCPT", "550 5.7.1 HELO/EHLO does not resolve"),
    ],
)
async def test_a_refusal_of_our_name_is_the_servers_fault_with_a_remedy(step: str, reply: str) -> None:
    fault = await sent(ScriptedServer({**PLAIN, "HELO": reply, step: reply}))

    assert isinstance(fault, ProviderFault)
    assert "refuses our name in EHLO" in fault.message
    assert "DISPATCHER_SMTP_EHLO_NAME" in str(fault.remedy)


@pytest.mark.parametrize(
    "reply",
    [
        "550 5.1.1 <helo@example.com>: unknown user",
        "550 <ann+helo@example.com> unknown",
        "550 Domain helo.example not found",
        "550 5.1.1 no mailbox helo here",
    ],
)
async def test_an_address_that_contains_helo_is_not_our_name(reply: str) -> None:
    assert not isinstance(await sent(ScriptedServer({**PLAIN, "RCPT": reply})), Accepted | ProviderFault)


async def test_ehlo_contains_the_configured_name() -> None:
    server = ScriptedServer(PLAIN)
    async with scripted(server, ehlo_name="mail.example.com") as provider:
        await send(provider, an_email())

    assert server.hello == "mail.example.com"


async def sent(server: ScriptedServer) -> Outcome | ProviderFault | None:
    async with scripted(server) as provider:
        return await ended(provider)


async def ended(provider: Provider) -> Outcome | ProviderFault | None:
    try:
        return (await send(provider, an_email())).outcome
    except ProviderFault as fault:
        return fault
