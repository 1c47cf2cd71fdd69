"""The demo's report, as JSON and as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from dispatcher.cli.demo import explain
from dispatcher.dev.demo_run import Kill, Report

REPORT: Final = Report(
    emails=1000,
    sent=978,
    failed=15,
    held=7,
    pending=0,
    delivered=984,
    held_delivered=6,
    duplicates=0,
    lost=0,
    dlq=23,
    transactions=53,
    known=33,
    rolled_back=5,
    poison=1,
    retried=12,
    recovered=0,
    killed=Kill(worker="w0", finished=500, released=56, recorded=1, uncertain=7),
    seconds=2.0,
    seed=1,
    workers=2,
    smtp_latency_ms=15,
    folder=Path("/var/demo"),
    differences=(),
)
REQUIRED_FIELDS: Final = frozenset(
    {
        *("emails", "sent", "failed", "held", "pending", "delivered", "duplicates", "lost", "dlq"),
        *("seconds", "emails_per_second"),
    }
)


def test_json_has_every_field_that_scripts_rely_on() -> None:
    document = REPORT.to_json()

    assert document.keys() >= REQUIRED_FIELDS
    assert document["emails"] == document["sent"] + document["failed"] + document["held"]
    assert document["emails_per_second"] == 500
    assert document["balances"] is True


def test_text_says_how_many_held_emails_arrived() -> None:
    text = " ".join(explain(REPORT).split())

    assert "6 of 7 had arrived" in text
    assert "Being transmitted: 7. No email had to wait for a lease to expire." in text
    assert "The counts match" in text


def test_text_explains_held_only_if_an_email_is_held() -> None:
    assert "Held:" not in explain(replace(REPORT, held=0))


def test_text_says_that_emails_waited_for_a_lease() -> None:
    text = " ".join(explain(replace(REPORT, recovered=3)).split())

    assert "3 emails had to wait for a lease to expire." in text


def test_each_difference_is_named() -> None:
    report = replace(REPORT, differences=("1 not finished: x", "nothing moved"))

    assert not report.balances
    assert report.to_json()["differences"] == ("1 not finished: x", "nothing moved")
    assert "DO NOT MATCH" in explain(report)
    assert "  - 1 not finished: x\n  - nothing moved" in explain(report)
