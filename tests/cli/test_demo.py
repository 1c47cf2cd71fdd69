"""What the demo tells in the end, as data and in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from dispatcher.cli.demo import explain
from dispatcher.dev.demo_play import Kill, Report

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
WORDS_OF_BOOKS: Final = frozenset(
    {
        *("emails", "sent", "failed", "held", "pending", "delivered", "duplicates", "lost", "dlq"),
        *("seconds", "emails_per_second"),
    }
)


def test_json_has_every_figure_that_scripts_rely_on() -> None:
    told = REPORT.to_json()

    assert told.keys() >= WORDS_OF_BOOKS
    assert told["emails"] == told["sent"] + told["failed"] + told["held"]
    assert told["emails_per_second"] == 500
    assert told["balances"] is True


def test_words_say_how_many_held_emails_arrived() -> None:
    words = " ".join(explain(REPORT).split())

    assert "6 of 7 had arrived" in words
    assert "On the wire: 7. Nothing waited for a lease to run out." in words
    assert "The books balance" in words


def test_words_do_not_explain_held_where_none_is() -> None:
    assert "Held:" not in explain(replace(REPORT, held=0))


def test_words_admit_that_a_lease_was_waited_for() -> None:
    assert "3 waited for a lease to run out" in " ".join(explain(replace(REPORT, recovered=3)).split())


def test_each_difference_is_named() -> None:
    report = replace(REPORT, differences=("1 not finished: x", "nothing moved"))

    assert not report.balances
    assert report.to_json()["differences"] == ("1 not finished: x", "nothing moved")
    assert "DO NOT BALANCE" in explain(report)
    assert "  - 1 not finished: x\n  - nothing moved" in explain(report)
