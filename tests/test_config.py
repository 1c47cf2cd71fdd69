"""All invalid settings are reported together, each with its variable and the remedy. No secret is ever shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispatcher.config import EMAIL_PROVIDERS, every_setting, examine, load, suspicious_settings
from dispatcher.config.values import SmtpServer
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import ConfigurationError
from dispatcher.providers.capture import CaptureSettings
from dispatcher.providers.smtp import SmtpSettings

SEVERAL_HOSTS = "postgresql://app:pg-secret@a:5432,[::1]:5433/db?target_session_attrs=read-write"
DATABASE = "postgresql://app:pg-secret@db.example:5432/dispatcher"
WEBHOOK_SECRET = "whsec_" + "c2VjcmV0" * 4
PUBLIC_KEY = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE" + "BA" * 43 + "=="
BROKER = "amqp://app:mq-secret@mq.example:5672/%2F"


def mistakes_of(environ: dict[str, str], *needs: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as raised:
        load(environ, needs=needs)
    return raised.value.mistakes


def test_defaults_suit_a_first_run_and_pass_their_own_parsers() -> None:
    settings, origins, mistakes = examine({})

    assert (settings.queue, settings.dlq) == ("email.dispatcher.send", "email.dispatcher.dlq")
    assert (settings.lease_seconds, settings.send_timeout_seconds, settings.max_attempts) == (60.0, 30.0, 8)
    assert (settings.on_uncertain, settings.providers, settings.database_url) == (OnUncertain.HOLD, (), "")
    assert settings.workers >= 1
    assert (settings.of(SmtpSettings).url, settings.of(CaptureSettings).dir, mistakes) == (None, None, ())
    assert {origin.source for origin in origins.values()} == {"default"}
    assert load({"DISPATCHER_PREFETCH": "", "DISPATCHER_DATABASE_URL": ""}) == settings, (
        "empty variables count as unset"
    )


def test_each_setting_has_its_own_variable_and_a_help_text() -> None:
    variables = [each.variable for each in every_setting()]

    assert len(set(variables)) == len(variables)
    assert all(each.about.endswith(".") for each in every_setting())


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("DISPATCHER_WORKERS", "3", "workers", 3),
        ("DISPATCHER_PREFETCH", "1", "prefetch", 1),
        ("DISPATCHER_LEASE_SECONDS", "1.5", "lease_seconds", 1.5),
        ("DISPATCHER_ON_UNCERTAIN", "Resend", "on_uncertain", OnUncertain.RESEND),
        ("DISPATCHER_PROVIDERS", " smtp ", "providers", ("smtp",)),
        ("DISPATCHER_QUEUE_TYPE", "CLASSIC", "queue_type", "classic"),
        ("DISPATCHER_DATABASE_URL", "host=db dbname=mail", "database_url", "host=db dbname=mail"),
        ("DISPATCHER_DATABASE_URL", SEVERAL_HOSTS, "database_url", SEVERAL_HOSTS),
        ("DISPATCHER_AMQP_URL", "amqp://a/m,amqps://b/m", "amqp_url", "amqp://a/m,amqps://b/m"),
        ("DISPATCHER_RUN_DIR", "~/run", "run_dir", Path.home() / "run"),
    ],
)
def test_a_text_is_parsed(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(load({variable: text}), field) == value


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("smtp://mx", SmtpServer("mx", 587, "starttls")),
        ("smtps://mx", SmtpServer("mx", 465, "tls")),
        ("smtp://mx?tls=none", SmtpServer("mx", 25, "none")),
        ("smtp://[::1]:2525/?tls=none", SmtpServer("::1", 2525, "none")),
        ("smtps://us%40er:p%3A%2Fw@mx:2465", SmtpServer("mx", 2465, "tls", "us@er", "p:/w")),
        ("smtp://u:a@b:c@mx:25", SmtpServer("mx", 25, "starttls", "u", "a@b:c")),
    ],
)
def test_an_smtp_url_is_parsed(text: str, server: SmtpServer) -> None:
    assert load({"DISPATCHER_SMTP_URL": text}).of(SmtpSettings).url == server


@pytest.mark.parametrize(
    ("uid", "home", "state", "folder"),
    [
        (0, "/root", "/root/state", "/var/lib/email-dispatcher"),
        (1000, "/home/ann", None, "/home/ann/.local/state/email-dispatcher"),
        (1000, "/home/ann", "/home/ann/state", "/home/ann/state/email-dispatcher"),
    ],
)
def test_the_default_run_directory_is_not_a_temporary_folder(
    uid: int, home: str, state: str | None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: uid)
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state:
        monkeypatch.setenv("XDG_STATE_HOME", state)

    assert load({}).run_dir == Path(folder)


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        *(("DISPATCHER_WORKERS", text, "must be a whole number from 1 to 256") for text in ("many", "0")),
        *(("DISPATCHER_WORKERS", text, "must be a whole number") for text in ("٣", "1.0")),
        *(("DISPATCHER_PREFETCH", text, "must be a whole number from 1 to 5000") for text in ("5001", "9" * 5000)),
        ("DISPATCHER_LEASE_SECONDS", "0.5", "must be a number of seconds from 1 to 3600"),
        *(("DISPATCHER_LEASE_SECONDS", text, "must be a number of seconds") for text in ("nan", "inf", "1m")),
        ("DISPATCHER_ON_UNCERTAIN", "retry", "must be one of: hold, resend"),
        ("DISPATCHER_PROVIDERS", "carrier-pigeon", "has an unknown provider: 'carrier-pigeon'. Choose from"),
        (
            "DISPATCHER_PROVIDERS",
            "smtp://ann:secret@mx",
            "has an account of smtp whose name is not valid",
        ),
        ("DISPATCHER_ALLOWED_PROVIDER_HEADERS", "X-MC-*", "may have only the characters"),
        ("DISPATCHER_ALLOWED_PROVIDER_HEADERS", "X-MC-Tags,bcc", "has bcc, a header that an email may never set"),
        ("DISPATCHER_PROVIDERS", "smtp,smtp", "must list at least one provider, and each provider only once"),
        (
            "DISPATCHER_DATABASE_URL",
            "mysql://app:secret@db/x",
            "must be a URL that begins with postgresql:// or postgres://",
        ),
        ("DISPATCHER_DATABASE_URL", "postgresql://a:1,b:x/db", "is not a URL"),
        ("DISPATCHER_AMQP_URL", "amqp://a/m,http://b/m", "must be a URL that begins with amqp:// or amqps://"),
        ("DISPATCHER_AMQP_URL", "amqp://a,b/m", "has several hosts in one URL"),
        *(("DISPATCHER_AMQP_URL", text, "is not a URL") for text in ("amqp://app:secret@mq:port", "amqp://mq:99999")),
        ("DISPATCHER_SMTP_URL", "smtp://mx:0", "is not a URL"),
        ("DISPATCHER_QUEUE", "amq.mine", "not begin with `amq.`"),
        ("DISPATCHER_DLQ", "email.dispatcher.send", "has the same name as the send queue"),
        ("DISPATCHER_RETAIN_AUDIT_DAYS", "90", "is shorter"),
        ("DISPATCHER_RETAIN_CONTENT_DAYS", "3650", "is longer"),
        ("DISPATCHER_SMTP_URL", "smtp://mx?starttls=no", "must have no path and no option except"),
        ("DISPATCHER_SMTP_URL", "smtp://app:secret@mx/path", "must have no path"),
        ("DISPATCHER_SMTP_URL", "smtps://mx?tls=none", "contradicts"),
        ("DISPATCHER_SMTP_URL", "smtp://user:secret@mx.example?tls=none", "would send the password without encryption"),
        ("DISPATCHER_SMTP_URL", "smtp://mx#x", "no #fragment"),
        ("DISPATCHER_SMTP_URL", "smtp://u:a#b@127.0.0.1:25", "has a # in the user or password; write it as %23"),
        ("DISPATCHER_ALERT_SMTP_URL", "smtp://u:a#b@mx", "has a # in the user or password; write it as %23"),
        ("DISPATCHER_AMQP_URL", "amqp://u:a#b@mq/v", "has a # in the user or password; write it as %23"),
        ("DISPATCHER_SMTP_EHLO_NAME", "web1", "must be the full name of this host in DNS"),
        ("DISPATCHER_SMTP_EHLO_NAME", "192.0.2.1", "must be the full name of this host in DNS"),
        ("DISPATCHER_SMTP_EHLO_NAME", "a.example.com\r\nX", "must be the full name of this host in DNS"),
        ("DISPATCHER_CA_FILE", "/no/such/file", "is the path of a file that does not exist"),
        ("DISPATCHER_CA_FILE", "/" + "x" * 300, "is the path of a file that cannot be read: file name too long"),
        ("DISPATCHER_CA_FILE", "~no-such-user/ca.pem", "begins with the home folder of a user who does not exist"),
        ("DISPATCHER_CA_FILE", __file__, "is the path of a file without PEM certificates"),
    ],
)
def test_an_invalid_value_is_reported_by_its_variable_without_a_secret(variable: str, text: str, sentence: str) -> None:
    (mistake,) = mistakes_of({variable: text})

    assert mistake.startswith(f"{variable} ")
    assert sentence in mistake
    assert "secret" not in mistake
    assert mistake.endswith(".")


def test_every_mistake_is_reported_at_once_and_a_missing_setting_with_the_remedy() -> None:
    wrong = {"WORKERS": "many", "AMQP_URL": "nonsense", "LEASE_SECONDS": "0", "PROVIDERS": "pigeon"}
    needs = ("database_url", "amqp_url", "providers")

    mistakes = mistakes_of({f"DISPATCHER_{name}": text for name, text in wrong.items()}, *needs)
    *missing, providers = mistakes_of({}, *needs)

    assert {mistake.split()[0] for mistake in mistakes} == {f"DISPATCHER_{name}" for name in (*wrong, "DATABASE_URL")}
    assert len(mistakes) == 5
    assert [mistake.split(":")[0] for mistake in (*missing, providers)] == [
        *("DISPATCHER_DATABASE_URL is not set", "DISPATCHER_AMQP_URL is not set", "DISPATCHER_PROVIDERS is not set")
    ]
    assert all(name in providers for name in EMAIL_PROVIDERS)


def test_only_commands_that_send_need_the_settings_of_the_provider() -> None:
    environ = {"DISPATCHER_PROVIDERS": "smtp"}

    (mistake,) = mistakes_of(environ, "providers")

    assert "DISPATCHER_SMTP_URL is not set, but DISPATCHER_PROVIDERS lists smtp" in mistake
    assert load(environ).providers == ("smtp",)


@pytest.mark.parametrize(
    ("name", "seconds", "is_suspicious"),
    [
        *(("DISPATCHER_HANG_SECONDS", seconds, True) for seconds in ("60", "70")),  # a lease is not longer
        *(("DISPATCHER_HANG_SECONDS", seconds, False) for seconds in ("59", "0")),
        *(("DISPATCHER_RETRY_CAP_SECONDS", seconds, False) for seconds in ("60", "600")),
        *(("DISPATCHER_RETRY_CAP_SECONDS", seconds, True) for seconds in ("601", "3600")),  # a wait of many leases
    ],
)
def test_settings_that_do_not_suit_the_lease_are_suspicious(name: str, seconds: str, is_suspicious: bool) -> None:
    words = " ".join(suspicious_settings(load({"DISPATCHER_LEASE_SECONDS": "60", name: seconds})))

    assert ("DISPATCHER_LEASE_SECONDS" in words and name in words) is is_suspicious


def test_a_host_that_sends_reads_only_the_settings_of_the_providers_that_it_uses_and_of_smtp_for_bounces(
    tmp_path: Path,
) -> None:
    environ = {"DISPATCHER_DATABASE_URL": DATABASE, "DISPATCHER_AMQP_URL": BROKER, "DISPATCHER_PROVIDERS": "capture"}
    environ |= {"DISPATCHER_CAPTURE_DIR": str(tmp_path)}
    invalid = environ | {"DISPATCHER_SMTP_URL": "not a URL"}
    needs = ("database_url", "amqp_url", "providers")

    settings, _, mistakes = examine(invalid, needs=needs, reads_own=False)
    _, _, all_mistakes = examine(invalid, needs=needs)
    _, _, of_bounces = examine(environ | {"DISPATCHER_BOUNCE_MAILDIR": str(tmp_path)}, needs=needs, reads_own=False)

    assert (list(settings.own), mistakes) == (["capture"], ())
    assert all_mistakes[0].startswith("DISPATCHER_SMTP_URL ")
    assert any("DISPATCHER_SMTP_BOUNCE_ADDRESS" in mistake for mistake in of_bounces)


SECRETS = {
    "DISPATCHER_DATABASE_URL": DATABASE,
    "DISPATCHER_AMQP_URL": BROKER,
    "DISPATCHER_RABBITMQ_MANAGEMENT_URL": "http://app:mq-secret@mq.example:15672",
    "DISPATCHER_SMTP_URL": "smtps://app:smtp-secret@mx.example",
    "SENDGRID_API_KEY": "SG.api-secret",
    "RESEND_API_KEY": "re_api_secret",
    "DISPATCHER_TWILIO_AUTH_TOKEN": "a-token-of-the-secret-account",
    "DISPATCHER_TWILIO_API_SECRET": "a-secret-of-an-api-key",
    "DISPATCHER_TWILIO_WEBHOOK_SECRETS": "a-secret-of-a-shared-key",
    "DISPATCHER_TWILIO_CALLBACK_URL": "https://app:secret@mail.example/v1/events/twilio",
    "DISPATCHER_SMTP_BOUNCE_KEYS": "a-secret-key-of-at-least-32-characters",
    "DISPATCHER_SMTP_OAUTH_CLIENT_SECRET": "a-secret-of-the-app",
    "DISPATCHER_SMTP_OAUTH_REFRESH_TOKEN": "a-refresh-token",
    "DISPATCHER_ALERT_WEBHOOK_SECRET": WEBHOOK_SECRET,
    "DISPATCHER_ALERT_WEBHOOK_URL": "https://hooks.example/services/secret-token",
    "DISPATCHER_ALERT_SMTP_URL": "smtps://app:smtp-secret@mx.example",
    "DISPATCHER_SENDGRID_EVENTS_KEYS": PUBLIC_KEY,
    "DISPATCHER_RESEND_EVENTS_SECRETS": WEBHOOK_SECRET,
    "DISPATCHER_OPS_OIDC_CLIENT_SECRET": "oidc-secret",
}
OAUTH = {
    "DISPATCHER_SMTP_OAUTH_TOKEN_URL": "https://id.example/token",
    "DISPATCHER_SMTP_OAUTH_CLIENT_ID": "app",
}
COMPANIES = {
    "DISPATCHER_SMTP_OAUTH_CLIENT_SECRET": OAUTH,
    "DISPATCHER_SMTP_OAUTH_REFRESH_TOKEN": OAUTH,
    "DISPATCHER_ALERT_SMTP_URL": {
        "DISPATCHER_ALERT_EMAIL_FROM": "a@b.example",
        "DISPATCHER_ALERT_EMAIL_TO": "b@b.example",
    },
    "DISPATCHER_ALERT_WEBHOOK_URL": {"DISPATCHER_ALERT_WEBHOOK_SECRET": WEBHOOK_SECRET},
}


class TestSecrets:
    """A secret may be in a file, and is never shown."""

    @pytest.mark.parametrize("variable", [each.variable for each in every_setting() if each.secret])
    def test_every_secret_may_be_in_a_file(self, tmp_path: Path, variable: str) -> None:
        company = COMPANIES.get(variable, {})
        (tmp_path / "secret").write_text(f"{SECRETS[variable]}\n")  # with a line end, as orchestrators mount it

        settings = load({f"{variable}_FILE": str(tmp_path / "secret"), **company})

        assert settings == load({variable: SECRETS[variable], **company})
        assert settings != load({})

    def test_a_secret_that_is_given_twice_is_a_mistake(self) -> None:
        (mistake,) = mistakes_of({"DISPATCHER_DATABASE_URL": DATABASE, "DISPATCHER_DATABASE_URL_FILE": "/run/secret"})

        assert "cannot be combined with DISPATCHER_DATABASE_URL_FILE" in mistake
        assert "pg-secret" not in mistake

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (None, "cannot be read from the file in DISPATCHER_DATABASE_URL_FILE: FileNotFoundError"),
            (b"", "contains no text"),
            (b" \n", "contains no text"),
            (b"\xff\xfe", "UnicodeDecodeError"),
            (b"not-a-url-but-secret", "must be a URL"),
        ],
    )
    def test_an_unusable_secret_file_is_reported_without_its_content(
        self, tmp_path: Path, content: bytes | None, sentence: str
    ) -> None:
        path = tmp_path / "secret"
        if content is not None:
            path.write_bytes(content)

        (mistake,) = mistakes_of({"DISPATCHER_DATABASE_URL_FILE": str(path)}, "database_url")

        assert sentence in mistake
        assert "secret" not in mistake.replace(str(path), "")

    def test_printed_settings_show_no_secret(self) -> None:
        secrets = {name: text for name, text in SECRETS.items() if "SMTP_OAUTH" not in name}  # instead of a password
        settings = load(secrets | COMPANIES["DISPATCHER_ALERT_SMTP_URL"])

        shown = f"{settings!r} {settings} {settings.of(SmtpSettings).url!r}"
        assert "secret" not in shown.replace("_secret", "")


def test_a_host_is_named_after_its_machine_and_long_names_stay_different(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for machine in ("männlein", "a" * 28, "email-dispatcher-6d4cf56db6-x7k2p", "email-dispatcher-6d4cf56db6-9qhlm"):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        names.append(load({}).host_name)

    assert names[:2] == ["m-nnlein", "a" * 28]
    assert names[2] != names[3]
    assert {(name[:19], len(name)) for name in names[2:]} == {("email-dispatcher-6d", 28)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WEBHOOK_URL", "http://alerts.example/x"),
        ("WEBHOOK_URL", "https://user:secret-word@alerts.example/x"),
        *(("WEBHOOK_URL", text) for text in ("https://alerts.example:port/x", "https://alerts.example:0/x")),
        *(("WEBHOOK_URL", text) for text in ("https:///x", "https://alerts.example/a b")),
        *(("WEBHOOK_SECRET", text) for text in ("secret-word", "whsec_c2hvcnQ=", "whsec_not/base64!")),
        *(("EMAIL_FROM", text) for text in ("secret-word", "Alerts <alerts@example.com>")),
        ("EMAIL_TO", "a@example.com,,secret-word"),
        ("SMTP_URL", "smtp://user:secret-word@mx.example?tls=none"),
    ],
)
def test_an_unsafe_alert_channel_is_a_mistake(name: str, text: str) -> None:
    (mistake,) = mistakes_of({f"DISPATCHER_ALERT_{name}": text})

    assert mistake.startswith(f"DISPATCHER_ALERT_{name} ")
    assert "secret-word" not in mistake
