"""After any failure, the API key and the email are in no log (even at DEBUG) and in no exception."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from sendgrid import SendGridAPIClient

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.errors import ProviderFault
from dispatcher.providers.sendgrid import SendGridSettings
from dispatcher.telemetry import log
from tests.providers.conftest import Authority
from tests.providers.emails import SOON_SECONDS, an_email, send
from tests.providers.sendgrid_place import KEY, sendgrid_place

SECRETS = (KEY, "ann@example.com", "shop@example.org", "Your order", "Thank you")
ECHO = sendgrid_error(400, "ann@example.com <ann@example.com> is not ann%40example.com", "from ann@example.com")


@pytest.fixture
def debug_log() -> Iterator[None]:
    """Sets our own log to DEBUG for the test."""
    log.configure("debug", "json", worker="test")
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("debug_log")
@pytest.mark.parametrize(
    "act",
    [None, Fault.CLOSE, Fault.RESET, Fault.HANG, Fault.HALF, Fault.GARBAGE, Fault.HTML, Fault.REDIRECT, ECHO,
     sendgrid_error(401, "The key is not ann@example.com's"), Reply(500, b"ann@example.com")],
    ids=str,
)  # fmt: skip
async def test_nothing_private_is_logged_or_raised(
    act: Fault | Reply | None, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(1)
    words = ""
    async with sendgrid_place(tmp_path, Behaviour(act), tls=authority.server, ca_file=authority.ca_file) as place:
        try:
            sending = await send(place.provider, an_email(), seconds=SOON_SECONDS * 3)
            words = repr(sending.outcome)
        except ProviderFault as fault:
            words = "".join(traceback.format_exception(fault))

    told = "\n".join((words, caplog.text, *capfd.readouterr()))
    assert [secret for secret in SECRETS if secret in told] == []


async def test_a_failed_connection_reports_nothing_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    async with sendgrid_place(tmp_path) as place:
        await place.double.close()
        sending = await send(place.provider, an_email())
        with pytest.raises(ProviderFault) as fault:
            await place.provider.check()

    told = "\n".join((repr(sending.outcome), "".join(traceback.format_exception(fault.value)), caplog.text))
    assert [secret for secret in SECRETS if secret in told] == []


async def test_python_sendgrids_own_client_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG, SendGrid's client logs the key and the whole email. We do not use this client, but an application in
    our process may use it."""
    caplog.set_level(logging.DEBUG)
    async with sendgrid_place(tmp_path) as place:
        client = SendGridAPIClient(KEY, place.double.url)
        email = {"personalizations": [{"to": [{"email": "ann@example.com"}]}]}
        answer = await asyncio.to_thread(client.send, email)

    assert answer.status_code == 202
    assert [secret for secret in SECRETS if secret in caplog.text] == []


def test_the_settings_do_not_show_the_key() -> None:
    assert KEY not in repr(SendGridSettings(api_key=KEY))
