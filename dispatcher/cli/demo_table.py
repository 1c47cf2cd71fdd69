"""The demo's report for a person: a table of the books, and sentences about what the figures mean."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Final, NamedTuple

from dispatcher.cli.table import Table

if TYPE_CHECKING:
    from dispatcher.dev.demo_report import Kill, Report

_COLUMNS: Final = 96


class _Row(NamedTuple):
    witness: str
    name: str
    figure: int
    words: str = ""


def book_table(report: Report) -> Table:
    """What each witness says."""
    table = Table("", "", "emails", "", right=[2])
    witness = ""
    for row in _rows(report):
        if witness and row.witness != witness:
            table.add_gap()
        table.add("" if row.witness == witness else row.witness, row.name, f"{row.figure:,}", row.words)
        witness = row.witness
    return table


def _rows(report: Report) -> list[_Row]:
    books = report.books
    dead = f"{books.failed} failed, {books.held} held, {report.poison} poison message"
    return [
        _Row("application", "enqueued", books.emails, f"in {report.transactions} transactions"),
        _Row("application", "already known", report.known, "enqueued again with the same key and payload: nothing new"),
        _Row("application", "rolled back", report.rolled_back, "with the application's transaction: never existed"),
        _Row("dispatcher", "sent", books.sent),
        _Row("dispatcher", "failed", books.failed, "the server refused the recipient (550)"),
        _Row("dispatcher", "held", books.held, "on the wire when a worker was killed" if books.held else ""),
        _Row("dispatcher", "pending", books.pending),
        _Row("dispatcher", "retried", report.retried, "the server deferred them once (451)"),
        _Row("dispatcher", "dead letters", books.dlq, dead),
        _Row("SMTP server", "delivered", books.delivered, f"{books.held_delivered} of them held" if books.held else ""),
        _Row("SMTP server", "duplicates", books.duplicates),
        _Row("all together", "lost", books.lost),
    ]


def explain(report: Report) -> str:
    """What the figures mean, and where to look; paragraphs."""
    paragraphs = [*_kill_words(report), _speed_words(report), *_verdict(report), *_places(report)]
    return "\n".join(paragraphs)


def _kill_words(report: Report) -> list[str]:
    if report.kill is None:
        return []
    waited = f"{report.rescued} waited for a lease" if report.rescued else "Nothing waited for a lease"
    told = [_wrap(f"{_kill_story(report.kill)} {waited} to run out.")]
    if report.books.held:
        told.append(
            _wrap(
                "Held: the email had left and no answer came back, so nobody on our side can know whether it was "
                "accepted. It is neither repeated nor called sent; a person decides. Here the server's ledger knows: "
                f"{report.books.held_delivered} of {report.books.held} had arrived."
            )
        )
    return told


def _kill_story(kill: Kill) -> str:
    return (
        f"Worker {kill.worker} was killed with SIGKILL after {kill.finished} emails. Its in-flight ledger outlived it "
        f"and told what it had under way. Not left, so given back at once: {kill.released}. Answered, so recorded: "
        f"{kill.recorded}. On the wire: {kill.uncertain}."
    )


def _speed_words(report: Report) -> str:
    return _wrap(
        f"{report.seconds:.1f} s from the first enqueue to the last result, that is {report.emails_per_second:.0f} "
        f"emails/s, with {report.workers} workers, the kill, the retries, and a server that takes "
        f"{report.latency_ms} ms to answer (benchmarks/ measures speed)."
    )


def _verdict(report: Report) -> list[str]:
    if report.balances:
        return ["The books balance: none lost, none duplicated.\n"]
    return ["THE BOOKS DO NOT BALANCE:", *(f"  - {difference}" for difference in report.differences), ""]


def _places(report: Report) -> list[str]:
    folder = report.folder
    return [
        "Where to look:",
        f"  {folder}/smtp/mail          an .eml for each delivery",
        f"  {folder}/smtp/ledger.jsonl  the SMTP server's ledger",
        f"  {folder}/log/run.log        every attempt, and how the killed worker was settled",
    ]


def _wrap(words: str) -> str:
    return fill(words, _COLUMNS) + "\n"
