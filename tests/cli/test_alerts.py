"""`dispatcher alerts test`: sends a test alert through every channel, and shows each result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.acceptance.harness import Sink
from tests.cli.commandline import CommandLine
from tests.monitor.receiver import SECRET, Receiver, receiving, write_ca


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """A webhook receiver with a certificate signed by `ca.pem`."""
    ca = trustme.CA()
    write_ca(ca, tmp_path)
    with receiving(ca, "127.0.0.1") as running:
        yield running


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Sink]:
    """The operators' SMTP server."""
    opened = Sink(tmp_path / "operators")
    yield opened
    opened.kill()


@pytest.fixture
def alerting(bare: CommandLine, receiver: Receiver, mailbox: Sink, tmp_path: Path) -> CommandLine:
    """`dispatcher` with both alert channels, without servers and providers."""
    return bare.having(
        DISPATCHER_ALERT_WEBHOOK_URL=receiver.url,
        DISPATCHER_ALERT_WEBHOOK_SECRET=SECRET,
        DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE="on",
        DISPATCHER_ALERT_SMTP_URL=mailbox.settings["SMTP_URL"],
        DISPATCHER_ALERT_EMAIL_FROM="a@example.com",
        DISPATCHER_ALERT_EMAIL_TO="ops@example.com",
        DISPATCHER_CA_FILE=str(tmp_path / "ca.pem"),
    )


def test_every_channel_gets_a_test_alert_and_its_result_is_shown(
    alerting: CommandLine, receiver: Receiver, mailbox: Sink
) -> None:
    ended = alerting("alerts", "test", "--json")

    assert ended.code == 0
    assert ended.json == {
        "ok": True,
        "channels": [
            {"channel": "webhook", "ok": True, "detail": "the receiver answered 204"},
            {"channel": "email", "ok": True, "detail": "the SMTP server accepted the alert for 1 of 1 recipients"},
        ],
    }
    (posted,) = receiver.posted
    assert (posted.is_signed, posted.json["type"]) == (True, "alert.test")


def test_a_failed_channel_is_named_and_the_other_still_gets_the_alert(
    alerting: CommandLine, receiver: Receiver, mailbox: Sink
) -> None:
    receiver.statuses = [403]

    some = alerting("alerts", "test")
    mailbox.kill()
    receiver.statuses = [403]
    none = alerting("alerts", "test")

    assert (some.code, none.code) == (3, 1)
    assert [line.split()[:2] for line in some.stdout.splitlines()] == [["✗", "webhook"], ["✓", "email"]]
    assert "the receiver answered 403" in none.stdout
    assert "no connection to the SMTP server" in none.stdout
    assert SECRET not in some.stdout + some.stderr


def test_without_a_channel_the_error_names_the_settings(bare: CommandLine) -> None:
    ended = bare("alerts", "test")

    assert ended.code == 78
    assert "DISPATCHER_ALERT_WEBHOOK_URL" in ended.stderr
    assert "DISPATCHER_ALERT_SMTP_URL" in ended.stderr


def test_an_incomplete_channel_is_a_configuration_error(bare: CommandLine) -> None:
    half = bare.having(DISPATCHER_ALERT_WEBHOOK_URL="https://a.example/", DISPATCHER_ALERT_EMAIL_FROM="a@example.com")

    ended = half("alerts", "test")

    assert ended.code == 78
    assert "DISPATCHER_ALERT_WEBHOOK_SECRET is not set" in ended.stderr
    assert "DISPATCHER_ALERT_SMTP_URL and DISPATCHER_ALERT_EMAIL_TO are not set" in ended.stderr
