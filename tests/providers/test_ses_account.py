"""The ses adapter reads its settings, posts once, logs nothing private, and reports on the account."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3.session
import pytest
import structlog

from dispatcher.config import load
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Uncertain
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.registry import check_provider, max_connections, open_provider
from dispatcher.providers.ses import SesProvider, SesSettings, region_of
from dispatcher.telemetry import log
from tests.providers.conftest import Authority
from tests.providers.emails import SOON_SECONDS, an_email, send
from tests.providers.listeners import listening
from tests.providers.ses_place import ACCESS_KEY, REGION, SECRET_KEY, aws_environment, ses_place, ses_provider
from tests.providers.test_ses_outcomes import aws_error

SECRETS = (ACCESS_KEY, SECRET_KEY, "ann@example.com", "shop@example.org", "Your order", "Thank you")
ECHO = aws_error(400, "MessageRejected", "ann@example.com <ann@example.com> is not ann%40example.com")
DENIED = aws_error(403, "AccessDeniedException", "arn:aws:ses:eu-west-1:1:identity/ann@example.com is not yours")


@pytest.mark.parametrize("mode", ["legacy", "standard", "adaptive"])
async def test_ses_gets_one_post_whatever_the_environment_sets(mode: str, tmp_path: Path) -> None:
    email = an_email()
    environment = {"AWS_MAX_ATTEMPTS": "5", "AWS_RETRY_MODE": mode}
    async with ses_place(tmp_path, Behaviour(Fault.CLOSE), environment=environment) as place:
        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Uncertain)
        assert place.double.requests == {str(email.email_id): 1}


async def test_boto3_by_default_posts_again(tmp_path: Path) -> None:
    """This is the reason why we do not send with boto3. The test also shows that the double counts repeated posts."""
    email = {"Content": {"Raw": {"Data": b"x"}}}
    async with ses_place(tmp_path, Behaviour(Fault.CLOSE)) as place:
        with aws_environment():
            client = boto3.session.Session(region_name=REGION).client("sesv2", endpoint_url=place.double.url)
            with pytest.raises(Exception, match="Connection was closed"):
                await asyncio.to_thread(client.send_email, **email)
            client.close()

        assert place.double.begun.total() == 3


@pytest.mark.parametrize(
    ("environment", "region"),
    [
        ({"AWS_REGION": "eu-north-1"}, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "us-east-1"}, "us-east-1"),
        ({"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "us-east-1"}, "eu-north-1"),
    ],
)
def test_the_region_comes_from_the_first_variable_that_is_set(environment: dict[str, str], region: str) -> None:
    with aws_environment(**environment):
        assert region_of(load(environment).of(SesSettings)) == region


def test_the_profiles_region_is_used(tmp_path: Path) -> None:
    profile = tmp_path / "config"
    profile.write_text("[default]\nregion = ap-south-1\n")
    with aws_environment(AWS_CONFIG_FILE=str(profile)):
        assert region_of(load({}).of(SesSettings)) == "ap-south-1"


def test_without_a_region_it_does_not_open() -> None:
    with aws_environment(), pytest.raises(ConfigurationError, match="AWS_REGION is not set"):
        open_provider("ses", load({}))


def test_a_missing_profile_is_an_error() -> None:
    with aws_environment(AWS_PROFILE="nobody"), pytest.raises(ConfigurationError, match="nobody"):
        open_provider("ses", load({}))


def test_every_setting_takes_effect() -> None:
    settings = load(
        {
            "AWS_REGION": REGION,
            "DISPATCHER_SES_ENDPOINT_URL": "http://127.0.0.1:4566",
            "DISPATCHER_SES_CONFIGURATION_SET": "news_1",
            "DISPATCHER_SES_CONNECTIONS": "4",
        }
    )

    assert settings.of(SesSettings) == SesSettings(
        region=REGION, endpoint_url="http://127.0.0.1:4566", configuration_set="news_1", connections=4
    )
    assert max_connections("ses", settings) == 4


@pytest.mark.parametrize(
    "setting",
    [
        {"AWS_REGION": "eu west 1"},
        {"AWS_REGION": "eu-west-1.example.com/"},
        {"DISPATCHER_SES_ENDPOINT_URL": "http://email.eu-west-1.amazonaws.com"},
        {"DISPATCHER_SES_ENDPOINT_URL": "email.eu-west-1.amazonaws.com"},
        {"DISPATCHER_SES_CONFIGURATION_SET": "no spaces"},
        {"DISPATCHER_SES_CONNECTIONS": "0"},
    ],
)
def test_invalid_settings_are_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(setting))):
        load(setting)


def test_a_ca_file_without_certificates_is_refused(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("no certificate")
    settings = replace(load({"AWS_REGION": REGION}), ca_file=ca_file)

    with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
        open_provider("ses", settings)


def test_boto3_is_imported_only_if_ses_is_configured() -> None:
    program = (
        "import sys; from dispatcher.config import load; from dispatcher.providers.registry import open_provider\n"
        "import dispatcher.cli.main, dispatcher.worker.process\n"
        "assert not {'boto3', 'botocore', 'urllib3'} & set(sys.modules)\n"
        "open_provider('ses', load({'AWS_REGION': 'eu-west-1'}))\n"
        "assert {'boto3', 'botocore'} <= sys.modules.keys()"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_opening_starts_no_thread_and_close_is_idempotent() -> None:
    """The parent creates an adapter to check the settings, and forks afterwards."""
    before = set(threading.enumerate())  # includes threads of earlier tests, which may end during this test
    provider = SesProvider(SesSettings(region=REGION))

    await provider.close()
    await provider.close()

    assert set(threading.enumerate()) <= before


@pytest.fixture
def debug_log() -> Iterator[None]:
    """Sets our own log to DEBUG for the test."""
    log.configure("debug", "json", worker="test")
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("debug_log")
@pytest.mark.parametrize(
    "act", [None, Fault.CLOSE, Fault.RESET, Fault.HANG, Fault.HALF, Fault.GARBAGE, Fault.HTML, Fault.REDIRECT, ECHO,
            DENIED, Reply(500, b"ann@example.com")], ids=str,
)  # fmt: skip
async def test_nothing_private_is_logged_or_raised(
    act: Fault | Reply | None, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(1)
    words = ""
    async with ses_place(tmp_path, Behaviour(act), tls=authority.server, ca_file=authority.ca_file) as place:
        try:
            sending = await send(place.provider, an_email(), seconds=SOON_SECONDS * 3)
            words = repr(sending.outcome)
        except ProviderFault as fault:
            words = "".join(traceback.format_exception(fault))

    told = "\n".join((words, caplog.text, *capfd.readouterr()))
    assert [secret for secret in SECRETS if secret in told] == []
    assert words


async def test_botocore_at_debug_would_log_the_access_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This is the reason why we silence botocore's log. It also proves that the test above would detect a leak."""
    async with ses_place(tmp_path) as place:
        for name in ("", "botocore", "urllib3"):
            caplog.set_level(logging.DEBUG, logger=name)
        await send(place.provider, an_email())

    assert "CanonicalRequest" in caplog.text


ACCOUNT = {
    "SendingEnabled": True,
    "ProductionAccessEnabled": True,
    "SendQuota": {"Max24HourSend": 50000.0, "MaxSendRate": 14.0, "SentLast24Hours": 12.0},
}


async def checked(answer: Reply) -> str:
    """The report of `check` for this response to GetAccount."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /v2/email/account HTTP/1.1\r\n")
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(f"HTTP/1.1 {answer.status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async with listening(serve) as port, ses_provider(f"http://127.0.0.1:{port}") as provider:
        return await provider.check()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Reply(200, ACCOUNT), "SES in eu-west-1 answers: 14 emails per second, 12 of 50,000 sent in 24 hours."),
        (
            Reply(200, {**ACCOUNT, "ProductionAccessEnabled": False}),
            "sandbox: SES delivers to verified addresses only.",
        ),
        (Reply(200, {"SendingEnabled": True, "ProductionAccessEnabled": True}), "answers: quota unknown."),
        (aws_error(403, "AccessDeniedException", "no"), "may not read the account's state (ses:GetAccount)."),
    ],
)
async def test_check_reports_an_account_that_may_send(answer: Reply, words: str) -> None:
    assert (await checked(answer)).endswith(words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Reply(200, {**ACCOUNT, "SendingEnabled": False}), "disabled sending"),
        (Reply(200, {**ACCOUNT, "SendQuota": {"Max24HourSend": 200, "SentLast24Hours": 200}}), "quota of 200 emails"),
        (aws_error(403, "InvalidClientTokenId", "ann@example.com"), "Check AWS's credentials"),
        (aws_error(429, "TooManyRequestsException", "slow"), "slow"),
        (Reply(500, b"<html>"), "SES"),
        (Reply(200, b"<html>"), "not SES v2. Check DISPATCHER_SES_ENDPOINT_URL"),
        (Reply(200, ["?"]), "SES"),
    ],
)
async def test_check_reports_each_problem(answer: Reply, words: str) -> None:
    with pytest.raises(ProviderFault, match=re.escape(words)) as fault:
        await checked(answer)

    assert "ann@example.com" not in "".join(traceback.format_exception(fault.value))


async def test_check_of_an_unreachable_server_is_a_fault(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        settings = load({"AWS_REGION": REGION, "DISPATCHER_SES_ENDPOINT_URL": place.double.url})
        await place.double.close()

        with aws_environment(), pytest.raises(ProviderFault, match=r"no connection.*AWS_REGION"):
            await check_provider("ses", settings)
