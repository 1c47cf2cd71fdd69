"""The settings of the adapters: where they come from, what is refused, and that no secret is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from sendgrid.base_interface import region_host_dict

from dispatcher.cli.checks import CheckState, check_event_sources, check_providers
from dispatcher.config import every_setting, examine, load
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.registry import check_provider, max_connections, open_provider
from dispatcher.providers.sendgrid import SendGridSettings
from dispatcher.providers.ses import SesSettings
from tests.providers.http_places import ACCOUNT, TOKEN
from tests.providers.ses_place import REGION, aws_environment

SECRET: Final = "the-secret-of-at-least-32-characters"
BOUNCES: Final = {"SMTP_BOUNCE_ADDRESS": "bounces@example.net", "SMTP_BOUNCE_KEYS": SECRET}
COUNTRIES: Final = (
    "DISPATCHER_SMS_COUNTRIES must be two-letter codes of countries (ISO 3166), such as DE,AT,GB, or all."
)
OAUTH: Final = {
    "SMTP_OAUTH_TOKEN_URL": "https://id.example/token",
    "SMTP_OAUTH_CLIENT_ID": "app",
    "SMTP_OAUTH_CLIENT_SECRET": "secret@app",
}
TWILIO: Final = {"SMS_PROVIDERS": "twilio", "TWILIO_ACCOUNT_SID": ACCOUNT, "TWILIO_AUTH_TOKEN": TOKEN}


def named(variables: dict[str, str]) -> dict[str, str]:
    """The variables with our prefix, unless they have a name of the provider's own."""
    own = ("AWS_", "SENDGRID_API", "RESEND_API")
    return {name if name.startswith(own) else f"DISPATCHER_{name}": value for name, value in variables.items()}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PROVIDERS": "sendgrid"}, "SENDGRID_API_KEY is not set, but DISPATCHER_PROVIDERS lists sendgrid: set it"),
        ({"PROVIDERS": "resend"}, "RESEND_API_KEY is not set, but DISPATCHER_PROVIDERS lists resend: set it to a key."),
        ({**TWILIO, "TWILIO_ACCOUNT_SID": ""}, "lists twilio: set it to the account's SID."),
        ({**TWILIO, "TWILIO_AUTH_TOKEN": ""}, "lists twilio: set it to the account's auth token."),
        ({"PROVIDERS": "twilio"}, "list it in DISPATCHER_SMS_PROVIDERS"),
        ({"SMS_PROVIDERS": "smtp"}, "list it in DISPATCHER_PROVIDERS"),
        ({"SENDGRID_API_KEY": "SG.a b"}, "SENDGRID_API_KEY has a space"),
        ({"SENDGRID_API_KEY": "SG.ключ"}, "SENDGRID_API_KEY has a space"),
        ({"SENDGRID_API_KEY": "SG.a\nX-Other: 1"}, "SENDGRID_API_KEY has a space"),
        ({"SENDGRID_HOST": "http://api.sendgrid.com"}, "without encryption"),
        ({"SENDGRID_HOST": "https://api.sendgrid.com/v3"}, "DISPATCHER_SENDGRID_HOST must have only"),
        ({"SENDGRID_HOST": "https://user:secret@api.sendgrid.com"}, "must have only"),
        ({"SENDGRID_HOST": "https://api.sendgrid.com?x=1"}, "must have only"),
        ({"SENDGRID_HOST": "api.sendgrid.com"}, "begins with https://"),
        ({"SENDGRID_SANDBOX": "perhaps"}, "DISPATCHER_SENDGRID_SANDBOX must be on or off."),
        ({"AWS_REGION": "eu west 1"}, "AWS_REGION"),
        ({"AWS_REGION": "eu-west-1.example.com/"}, "AWS_REGION"),
        ({"SES_ENDPOINT_URL": "http://email.eu-west-1.amazonaws.com"}, "DISPATCHER_SES_ENDPOINT_URL"),
        ({"SES_ENDPOINT_URL": "email.eu-west-1.amazonaws.com"}, "DISPATCHER_SES_ENDPOINT_URL"),
        ({"SES_CONFIGURATION_SET": "no spaces"}, "DISPATCHER_SES_CONFIGURATION_SET"),
        ({"SES_CONNECTIONS": "0"}, "DISPATCHER_SES_CONNECTIONS"),
        ({"SMTP_BOUNCE_ADDRESS": "bounces@example.net"}, "DISPATCHER_SMTP_BOUNCE_KEYS is not set"),
        ({"BOUNCE_MAILDIR": "/var/mail/bounces"}, "DISPATCHER_SMTP_BOUNCE_ADDRESS is not set"),
        ({**BOUNCES, "SMTP_BOUNCE_KEYS": "short"}, "at least 32 characters"),
        ({**BOUNCES, "SMTP_BOUNCE_ADDRESS": "returned.messages@example.net"}, "at most 15 characters"),
        ({**BOUNCES, "SMTP_BOUNCE_ADDRESS": "a+b@example.net"}, "no + before the @"),
        ({"SMTP_OAUTH_CLIENT_ID": "app"}, "DISPATCHER_SMTP_OAUTH_TOKEN_URL is not set, but other settings"),
        ({"SMTP_OAUTH_TOKEN_URL": "http://id.example/token"}, "without encryption; use https://"),
        ({**OAUTH, "SMTP_OAUTH_CLIENT_ID": ""}, "DISPATCHER_SMTP_OAUTH_CLIENT_ID is not set"),
        ({**OAUTH, "SMTP_OAUTH_CLIENT_SECRET": ""}, "set one of them"),
        ({**OAUTH, "SMTP_URL": "smtp://me:secret@smtp.example"}, "the user, and no password"),
        ({**OAUTH, "SMTP_URL": "smtp://smtp.example"}, "the mailbox's address as the user"),
        ({**OAUTH, "SMTP_URL": "smtp://me@smtp.example?tls=none"}, "send the access token without encryption"),
        ({"TWILIO_ACCOUNT_SID": "SK" + "0" * 32}, "must be AC followed by 32 hexadecimal digits"),
        ({"TWILIO_SENDER": "a name of many words"}, "DISPATCHER_TWILIO_SENDER must be a number"),
        ({"TWILIO_CALLBACK_URL": "http://mail.example.org/"}, "use https://"),
        ({"TWILIO_CALLBACK_URL": "https://mail.example.org/?a=1"}, "must have no ?query"),
        ({"TWILIO_CALLBACK_URL": "https://mail.example.org/#a"}, "or #fragment"),
        *(({"SMS_COUNTRIES": text}, COUNTRIES) for text in ("UK", "DE,+1", "Germany", "001", ",")),
    ],
)  # fmt: skip
def test_a_setting_that_is_missing_or_cannot_work_is_named_with_the_remedy(environ: dict[str, str], words: str) -> None:
    has_providers = any("PROVIDERS" in name for name in environ)
    _, _, mistakes = examine(named(environ), needs=["providers"] if has_providers else ())

    assert any(words in mistake for mistake in mistakes), mistakes
    assert len(mistakes) == 1 or has_providers
    with pytest.raises(ConfigurationError, check=lambda error: tuple(error.mistakes) == mistakes):
        load(named(environ), needs=["providers"] if has_providers else ())
    assert not [value for value in ("secret@", "SG.a", "ключ", "'short") if value in str(mistakes)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smtp", "DISPATCHER_SMTP_URL is not set"),
        ("capture", "DISPATCHER_CAPTURE_DIR is not set"),
        ("ses", "nobody"),
        ("pigeon", "has an unknown provider: 'pigeon'"),
    ],
)
def test_an_adapter_does_not_open_without_its_settings(name: str, words: str) -> None:
    with aws_environment(AWS_PROFILE="nobody"), pytest.raises(ConfigurationError, match=words):
        open_provider(name, load({}))


@pytest.mark.parametrize("host", ["http://127.0.0.1:8080", "http://localhost:1/", "https://api.eu.sendgrid.com/"])
def test_a_valid_host_is_accepted(host: str) -> None:
    assert load({"DISPATCHER_SENDGRID_HOST": host}).of(SendGridSettings).host == host.rstrip("/")


def test_the_default_host_and_its_help_name_python_sendgrids_regions() -> None:
    assert load({}).of(SendGridSettings).host == region_host_dict["global"]
    about = next(each.about for each in every_setting() if each.variable == "DISPATCHER_SENDGRID_HOST")
    assert all(host in about for host in region_host_dict.values())


def test_every_setting_of_ses_takes_effect() -> None:
    url = "http://127.0.0.1:4566"
    environ = {"SES_ENDPOINT_URL": url, "SES_CONFIGURATION_SET": "news_1", "SES_CONNECTIONS": "4"}

    settings = load(named({"AWS_REGION": REGION, **environ}))

    own = SesSettings(region=REGION, endpoint_url=url, configuration_set="news_1", connections=4)
    assert settings.of(SesSettings) == own
    assert max_connections("ses", settings) == 4


@pytest.mark.parametrize(
    ("environ", "countries"),
    [
        ({"TWILIO_SENDER": "+4915112345678"}, {"DE"}),
        ({"TWILIO_SENDER": "+14165550100"}, {"CA"}),
        ({"TWILIO_SENDER": "+14165550100", "SMS_COUNTRIES": "us, CA"}, {"US", "CA"}),
        ({"TWILIO_SENDER": "+14165550100", "SMS_COUNTRIES": "all"}, None),
        ({"TWILIO_SENDER": "Example", "SMS_COUNTRIES": "AT"}, {"AT"}),
        ({"SMS_PROVIDERS": "sms-capture", "SMS_CAPTURE_DIR": "/tmp"}, None),
        ({"SMS_PROVIDERS": "sms-capture,twilio", "SMS_CAPTURE_DIR": "/tmp", "TWILIO_SENDER": "+4915112345678"}, {"DE"}),
        ({"PROVIDERS": "smtp", "SMTP_URL": "smtp://localhost", "SMS_PROVIDERS": "", "TWILIO_SENDER": "Example"}, None),
    ],
)
def test_the_countries_of_sms_are_those_of_the_senders_unless_they_are_set(
    environ: dict[str, str], countries: set[str] | None
) -> None:
    settings, _, mistakes = examine(named({**TWILIO, **environ}), needs=["providers"])

    assert mistakes == ()
    assert settings.sms_countries == countries


@pytest.mark.parametrize("sender", ["", "Example", "12345", "MG" + 32 * "0", "+15551234567"])
def test_a_sender_that_shows_no_country_needs_the_countries(sender: str) -> None:
    environ = named({**TWILIO, "TWILIO_SENDER": sender})

    (mistake,) = examine(environ, needs=["providers"])[2]

    assert mistake.startswith("DISPATCHER_SMS_COUNTRIES is not set, and no default sender of SMS is a number")
    # A process that only accepts SMS starts, and leaves the countries to the hosts that send.
    settings, _, mistakes = examine(environ)
    assert (mistakes, settings.sms_countries) == ((), None)


@pytest.mark.parametrize("name", ["smtp", "sendgrid", "resend", "ses", "twilio"])
async def test_an_adapter_opens_without_connections_and_threads_and_refuses_a_file_without_certificates(
    name: str, tmp_path: Path
) -> None:
    """The parent opens each adapter to check the settings, and forks afterwards."""
    (tmp_path / "ca.pem").write_text("no certificate")
    keys = dict.fromkeys(("SENDGRID_API_KEY", "RESEND_API_KEY"), SECRET)
    others = {"AWS_REGION": REGION, "SMTP_URL": "smtps://127.0.0.1:1", "TWILIO_SENDER": "+4915112345678"}
    settings = load(named({**TWILIO, **keys, **others}))
    threads = _threads()  # includes threads of earlier tests, which may end during this test
    with aws_environment():
        provider = open_provider(name, settings)
        await provider.close()
        with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
            open_provider(name, replace(settings, ca_file=tmp_path / "ca.pem"))

    assert provider.name == name
    assert _threads() <= threads


def _threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


async def test_checking_a_provider_returns_a_report_or_raises_a_fault(tmp_path: Path) -> None:
    settings = load(named({"SMTP_URL": "smtp://127.0.0.1:1", "CAPTURE_DIR": str(tmp_path / "maildir")}))
    open_provider("capture", settings)
    assert not (tmp_path / "maildir").exists()

    assert "writable" in await check_provider("capture", settings)
    with pytest.raises(ProviderFault, match=r"127\.0\.0\.1:1: no connection"):
        await check_provider("smtp", settings)


@pytest.mark.parametrize(
    ("host", "name", "server", "warns"),
    [
        ("web1", "", "mx.example.invalid", True),
        ("localhost.localdomain", "", "mx.example.invalid", True),
        ("web1.example.com", "", "mx.example.invalid", False),
        ("web1", "mail.example.com", "mx.example.invalid", False),
        ("web1", "[192.0.2.1]", "mx.example.invalid", False),
        ("web1", "", "127.0.0.1:1", False),
    ],
)
def test_doctor_warns_of_an_ip_address_in_ehlo_unless_the_server_is_on_this_host(
    host: str, name: str, server: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)

    *warnings, _ = check_providers(
        load(named({"PROVIDERS": "smtp", "SMTP_URL": f"smtp://{server}", "SMTP_EHLO_NAME": name}))
    )

    assert [finding.state for finding in warnings] == [CheckState.WARNING] * warns
    assert all("DISPATCHER_SMTP_EHLO_NAME" in finding.detail for finding in warnings)


def test_doctor_reports_whether_the_maildir_of_bounces_can_be_used(tmp_path: Path) -> None:
    def states() -> dict[str, CheckState]:
        return {each.subject: each.state for each in check_event_sources(settings)}

    settings = load(named({**BOUNCES, "BOUNCE_MAILDIR": str(tmp_path)}))
    assert states()["Maildir of bounces"] is CheckState.FAILED
    assert "does not exist" in next(check_event_sources(settings)).detail
    (tmp_path / "new").mkdir()
    assert states()["Maildir of bounces"] is CheckState.OK
    assert states()["event sources"] is CheckState.OK
