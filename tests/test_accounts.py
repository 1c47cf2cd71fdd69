"""Several accounts of one provider: their names, settings, rules and adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from dispatcher.cli.environment import unknown_variables
from dispatcher.config import Settings, every_setting, examine, load
from dispatcher.dev.smtp_behaviour import SmtpBehaviour
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.domain.accounts import parse_rules
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from dispatcher.providers.registry import check_provider, open_provider
from dispatcher.providers.resend import ResendSettings
from dispatcher.providers.sendgrid import SendGridSettings
from dispatcher.providers.ses import SesSettings
from dispatcher.providers.smtp import SmtpSettings
from tests.events.requests import SendGridKey
from tests.providers.emails import an_email, send
from tests.providers.listeners import closing

TWO: Final = {"DISPATCHER_PROVIDERS": "sendgrid:acme,sendgrid:default"}
KEYS: Final = {"SENDGRID_ACME_API_KEY": "SG.acme", "SENDGRID_DEFAULT_API_KEY": "SG.default"}
RULES: Final = "tenant=acme -> sendgrid:acme; sender=Billing.example lane=bulk -> smtp:billing , ses; lane=bulk->ses"


def mistakes_of(environ: dict[str, str]) -> tuple[str, ...]:
    return examine(environ, needs=["providers"])[2]


def test_an_account_has_its_own_logins_and_the_other_settings_of_its_provider(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("SG.file\n")
    settings, origins, mistakes = examine(
        {
            "DISPATCHER_PROVIDERS": "sendgrid:acme,resend:x_1,ses:bulk,smtp:a,sendgrid",
            "SENDGRID_API_KEY": "SG.provider",
            "SENDGRID_ACME_API_KEY_FILE": str(tmp_path / "key"),
            "DISPATCHER_SENDGRID_HOST": "https://api.eu.sendgrid.com",
            "DISPATCHER_SENDGRID_MAX_PER_SECOND": "50",
            "DISPATCHER_SENDGRID_ACME_MAX_PER_SECOND": "5",
            "RESEND_X_1_API_KEY": "re_1",
            "AWS_REGION": "eu-west-1",
            "AWS_BULK_REGION": "us-east-1",
            "DISPATCHER_SES_PROFILE": "main",
            "DISPATCHER_SES_BULK_CONFIGURATION_SET": "bulk",
            "DISPATCHER_SMTP_A_URL": "smtp://mx.example",
            "DISPATCHER_SMTP_URL": "smtp://me:secret@other.example",
            "DISPATCHER_SMTP_CONNECTIONS": "3",
            "DISPATCHER_SMTP_BOUNCE_ADDRESS": "bounces@example.net",
            "DISPATCHER_SMTP_BOUNCE_KEYS": "a-key-of-at-least-32-characters-1234",
        },
        needs=["providers"],
    )

    acme, resend, bulk, smtp = (settings.own[name] for name in settings.providers[:4])
    assert mistakes == ()
    assert acme == SendGridSettings(api_key="SG.file", host="https://api.eu.sendgrid.com", max_per_second=5.0)
    assert (settings.ceiling_of("sendgrid"), settings.of(SendGridSettings).api_key) == (50.0, "SG.provider")
    assert resend == ResendSettings(api_key="re_1")
    assert bulk == SesSettings(region="us-east-1", configuration_set="bulk")
    assert isinstance(smtp, SmtpSettings)
    assert smtp.url is not None
    assert (smtp.url.host, smtp.url.username, smtp.connections) == ("mx.example", "", 3)
    assert smtp.bounces() is not None
    sources = {name: origins[f"DISPATCHER_SENDGRID_ACME_{name}"].source for name in ("HOST", "SANDBOX")}
    assert sources == {"HOST": "provider", "SANDBOX": "default"}
    assert origins["SENDGRID_ACME_API_KEY"].source == "file"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DISPATCHER_PROVIDERS": "pigeon:a"}, "has an unknown provider: 'pigeon'"),
        *(
            ({"DISPATCHER_PROVIDERS": f"smtp:{name}"}, "such as smtp:billing")
            for name in ("", "1", "a-b", "a:b", "x" * 20)
        ),
        (
            {"DISPATCHER_PROVIDERS": "smtp:oauth_token"},
            "smtp and smtp:oauth_token would both read",
        ),
        ({"DISPATCHER_SMS_PROVIDERS": "twilio:a"}, "only providers of email have several accounts"),
        ({"DISPATCHER_SMS_PROVIDERS": "smtp:a"}, "list it in DISPATCHER_PROVIDERS instead"),
        ({**TWO, "SENDGRID_API_KEY": "SG.x"}, "SENDGRID_ACME_API_KEY is not set, but DISPATCHER_PROVIDERS lists"),
        ({**TWO, **KEYS, "DISPATCHER_SENDGRID_ACME_SANDBOX": "no!"}, "DISPATCHER_SENDGRID_ACME_SANDBOX must be on or"),
        ({**TWO, **KEYS, "DISPATCHER_SENDGRID_ACME_EVENTS_KEYS": "x"}, "DISPATCHER_SENDGRID_ACME_EVENTS_KEYS has a"),
        (
            {"DISPATCHER_PROVIDERS": "smtp:a", "DISPATCHER_SMTP_A_OAUTH_CLIENT_ID": "app"},
            "DISPATCHER_SMTP_A_OAUTH_TOKEN_URL is not set",
        ),
        *(
            ({**TWO, **KEYS, "DISPATCHER_ACCOUNT_RULES": rules}, words)
            for rules, words in (
                ("tenant=acme -> sendgrid:amce", "names sendgrid:amce, but DISPATCHER_PROVIDERS lists: sendgrid:acme"),
                ("lane=bluk -> sendgrid:acme", "names the lane bluk"),
                ("tenant=a -> sendgrid:acme; lane=bulk -> sendgrid:default", "names every provider"),
                ("tenant=acme", "must have rules such as"),
                ("-> sendgrid:acme", "must have rules such as"),
                ("tenant=acme ->", "must have rules such as"),
                ("tenant=a tenant=b -> sendgrid:acme", "a condition in rule 1"),
                ("lane=bulk -> sendgrid:acme; to=a -> sendgrid:acme", "a condition in rule 2"),
                ("sender=@ -> sendgrid:acme", "a condition in rule 1"),
            )
        ),
    ],
)
def test_an_account_or_a_rule_that_cannot_work_is_refused_at_the_start(environ: dict[str, str], words: str) -> None:
    mistakes = mistakes_of(environ)

    assert words in " ".join(mistakes), mistakes
    assert "SG." not in str(mistakes)


@pytest.mark.parametrize(
    ("email", "allowed"),
    [
        (("acme", "a@x.example", "normal"), "sendgrid:acme"),
        (("acme", "a@billing.example", "bulk"), "sendgrid:acme"),
        (("b", "Ann <a@BILLING.example>", "bulk"), "smtp:billing ses"),
        (("b", "a@mail.billing.example", "bulk"), "ses"),
        (("b", "a@billing.example", "normal"), "sendgrid:default"),
        ((None, "a@x.example", "normal"), "sendgrid:acme sendgrid:default"),
        (("b", "a@x.example", None), "ses sendgrid:default"),
        (("b", "a@billing.example", None), "smtp:billing ses sendgrid:default"),
        ((None, "a@x.example", "bulk"), "sendgrid:acme ses"),
    ],
)
def test_the_first_rule_that_applies_chooses_the_accounts_and_what_is_unknown_may_be_anything(
    email: tuple[str | None, str, str | None], allowed: str
) -> None:
    rules = parse_rules(RULES)
    tenant, sender, lane = email
    names = ["sendgrid:acme", "smtp:billing", "ses", "sendgrid:default"]

    assert list(rules.allowed(names, tenant=tenant, sender=sender, lane=lane)) == allowed.split()
    assert parse_rules(str(rules)) == rules


def test_the_sender_of_a_rule_may_be_an_address_or_an_international_domain() -> None:
    rules = parse_rules("sender=Otp@x.example -> smtp:otp; sender=münchen.example -> smtp:m")
    senders = ("otp@x.example", "b@x.example", "a@münchen.example", "a@xn--mnchen-3ya.example")

    found = [rules.allowed(["smtp:otp", "smtp:m", "smtp"], tenant="a", sender=each, lane="normal") for each in senders]

    assert found == [["smtp:otp"], ["smtp"], ["smtp:m"], ["smtp:m"]]


def test_enqueue_refuses_what_the_accounts_of_the_rule_cannot_send() -> None:
    configured = capabilities_of(["smtp:billing", "sendgrid"])
    email = an_email(template_id="d-1", text=None, sender="a@billing.example")

    why = capability_gap(email, configured, parse_rules("sender=billing.example -> smtp:billing"))

    assert "configured: smtp:billing." in str(why)
    assert "to DISPATCHER_PROVIDERS and to the email's rule" in str(why)
    assert capability_gap(email, configured, parse_rules("sender=x.example -> smtp:billing")) is None


def test_the_variables_of_accounts_are_known_and_shown() -> None:
    environ = {**TWO, "DISPATCHER_SENDGRID_ACME_SANDBOX": "on", "DISPATCHER_SENDGRID_ACME_EVENTS_KEYS_FILE": "x"}
    assert unknown_variables({**environ, "DISPATCHER_SENDGRID_AMCE_SANDBOX": "on"}) == {
        "DISPATCHER_SENDGRID_AMCE_SANDBOX": "DISPATCHER_SENDGRID_ACME_SANDBOX"
    }
    shown = {each.variable for each in every_setting(["sendgrid:acme"])}
    assert {"SENDGRID_ACME_API_KEY", "DISPATCHER_SENDGRID_ACME_EVENTS_KEYS"} <= shown


def test_the_keys_of_an_account_verify_only_its_events_and_those_of_the_provider_all() -> None:
    one, other = SendGridKey().public, SendGridKey().public
    environ = {**TWO, "DISPATCHER_SENDGRID_ACME_EVENTS_KEYS": one}
    assert load(environ).verifies_events("sendgrid") == {"sendgrid:acme": (one,)}
    both = load({**environ, "DISPATCHER_SENDGRID_EVENTS_KEYS": other}).verifies_events("sendgrid")
    assert list(both.items()) == [("sendgrid", (other,)), ("sendgrid:acme", (one,))]


@pytest.fixture
async def sinks(tmp_path: Path) -> AsyncIterator[tuple[SmtpSink, SmtpSink]]:
    async with (
        running_sink(tmp_path / "a", SmtpBehaviour(login=("ann", "secret-of-a"))) as first,
        running_sink(tmp_path / "b") as second,
    ):
        yield first, second


def settings_of(sinks: tuple[SmtpSink, SmtpSink], password: str) -> Settings:
    first, second = (f"127.0.0.1:{sink.port}?tls=none" for sink in sinks)
    urls = {"DISPATCHER_SMTP_A_URL": f"smtp://ann:{password}@{first}", "DISPATCHER_SMTP_B_URL": f"smtp://{second}"}
    return load({"DISPATCHER_PROVIDERS": "smtp:a,smtp:b", **urls}, needs=["providers"])


async def test_each_account_has_its_own_adapter_name_server_and_secrets(sinks: tuple[SmtpSink, SmtpSink]) -> None:
    settings = settings_of(sinks, "secret-of-a")
    first, second = (open_provider(name, settings) for name in settings.providers)
    async with closing(first), closing(second):
        for provider, count in ((first, 1), (second, 2)):
            for _ in range(count):
                assert isinstance((await send(provider, an_email())).outcome, Accepted)

    assert [first.name, second.name] == ["smtp:a", "smtp:b"]
    assert [sink.ledger().delivered for sink in sinks] == [1, 2]
    assert scrub("the password is secret-of-a") == "the password is <credential>"


async def test_errors_name_the_variables_of_the_account(sinks: tuple[SmtpSink, SmtpSink]) -> None:
    settings = settings_of(sinks, "wrong-secret")
    with pytest.raises(ProviderFault) as caught:
        await check_provider("smtp:a", settings)

    assert "in DISPATCHER_SMTP_A_URL" in str(caught.value)
    assert (caught.value.provider, "wrong-secret" in str(caught.value)) == ("smtp:a", False)
    with pytest.raises(ConfigurationError, match="DISPATCHER_SMTP_C_URL is not set"):
        open_provider("smtp:c", examine({"DISPATCHER_PROVIDERS": "smtp:c"})[0])
