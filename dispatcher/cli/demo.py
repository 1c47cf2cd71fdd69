"""`dispatcher demo`: sends emails through the whole system on private servers, and checks the result."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.exits import Exit, end_by_sigterm
from dispatcher.cli.options import json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.table import Table
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from dispatcher.dev.demo_run import DemoProgress, Report

_LINE_SECONDS: Final = 1.0
_COLUMNS: Final = 96


@click.command("demo")
@click.option(
    "--emails",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    default=1000,
    show_default=True,
    help="Number of emails.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="The seed of the generated emails: the same seed generates the same emails.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    default=2,
    show_default=True,
    help="Number of worker processes.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("var/demo"),
    help="Folder for emails, the SMTP server's record of deliveries, and logs. The next demo replaces these files.  "
    "[default: var/demo in the current folder]",
)
@json_option("Print one line of JSON instead of the table.")
def command(emails: int, seed: int, workers: int, folder: Path, as_json: bool) -> int:
    """Send a thousand emails through the whole system, kill a worker, and check that no email is lost or duplicated.

    \b
    Examples:
      dispatcher demo
      dispatcher demo --emails 10000 --workers 4
      dispatcher demo --json | jq .lost

    \b
    The demo
      1. starts PostgreSQL, RabbitMQ, a local SMTP server that records every delivery, and `dispatcher run`;
      2. enqueues varied emails, some of them twice, some to recipients that do not exist;
      3. publishes a poison message to the queue: a message that points to no email;
      4. kills a worker with SIGKILL when half of the emails are finished;
      5. compares the database with the SMTP server's records.

    No email leaves this machine. At its end, the demo stops every process that it has started. If
    DISPATCHER_DATABASE_URL or DISPATCHER_AMQP_URL is set, the demo uses that server: it creates its own database or
    queues there, and deletes them at the end.

    Exit codes: 0 no email was lost or duplicated; 1 the counts do not match, or the demo could not run.
    """
    from dispatcher.dev.demo_run import DemoOptions, run_demo

    end_by_sigterm()
    is_terminal = sys.stderr.isatty()
    bar = click.progressbar(
        length=emails, label="finished", show_pos=True, show_eta=False, item_show_func=_describe, file=sys.stderr
    )
    with bar if is_terminal else nullcontext():
        report = run_demo(
            DemoOptions(emails, seed, workers, folder.expanduser()), _ProgressDisplay(bar if is_terminal else None)
        )
    if as_json:
        print_json(report.to_json())
    else:
        counts_table(report).show()
        print_data(f"\n{explain(report)}")
    return Exit.DONE if report.balances else Exit.FAILED


class _ProgressDisplay:
    """Shows the demo's progress on stderr: a progress bar on a terminal, otherwise one line per second."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._seconds = 0.0

    def say(self, text: str) -> None:
        """Prints one line, above the progress bar."""
        if self._bar is not None:
            sys.stderr.write("\r\x1b[K")
        say(text)

    def show(self, progress: DemoProgress) -> None:
        """Updates the progress bar. Without a progress bar, prints a line, at most one per second."""
        if self._bar is not None:
            self._bar.update(progress.finished - self._bar.pos, progress)
        elif progress.seconds - self._seconds >= _LINE_SECONDS:
            self._seconds = progress.seconds
            say(f"{progress.finished} of {progress.emails}: {_describe(progress)}")


def _describe(progress: DemoProgress | None) -> str:
    """The number of emails with each status, such as "12 sent, 3 pending"."""
    counts = progress.counts if progress else {}
    return ", ".join(f"{counts[status]} {status}" for status in reversed(Status) if counts.get(status))


def counts_table(report: Report) -> Table:
    """The counts of the application, the dispatcher and the SMTP server."""
    dead = f"{report.failed} failed, {report.held} held, {counted(report.poison, 'poison message')}"
    sources = {
        "application": [
            ("enqueued", report.emails, f"in {report.transactions} transactions"),
            ("already known", report.known, "enqueued a second time with the same key and content: no second email"),
            ("rolled back", report.rolled_back, "with the application's transaction: not enqueued"),
        ],
        "dispatcher": [
            ("sent", report.sent, ""),
            ("failed", report.failed, "the server refused the recipient (550)"),
            ("held", report.held, "being transmitted when a worker was killed" if report.held else ""),
            ("pending", report.pending, ""),
            ("retried", report.retried, "the server deferred each email once (451)"),
            ("dead letters", report.dlq, dead),
        ],
        "SMTP server": [
            ("delivered", report.delivered, f"{report.held_delivered} of them held" if report.held else ""),
            ("duplicates", report.duplicates, ""),
        ],
        "total": [("lost", report.lost, "")],
    }
    table = Table("", "", "emails", "", right=[2])
    for number, (source, rows) in enumerate(sources.items()):
        if number:
            table.add_gap()
        for row, (name, figure, note) in enumerate(rows):
            table.add("" if row else source, name, f"{figure:,}", note)
    return table


def explain(report: Report) -> str:
    """Paragraphs that explain the counts and list the files to read."""
    paragraphs = []
    if kill := report.killed:
        waited = (
            f"{counted(report.recovered, 'email')} had to wait for a lease to expire."
            if report.recovered
            else "No email had to wait for a lease to expire."
        )
        paragraphs.append(
            f"Worker {kill.worker} was killed with SIGKILL after {counted(kill.finished, 'email')}. Its in-flight "
            f"ledger lists the emails that it was processing. Not sent yet, so released immediately: {kill.released}. "
            f"Answered, so recorded: {kill.recorded}. Being transmitted: {kill.uncertain}. {waited}"
        )
    if kill and report.held:
        paragraphs.append(
            "Held: the email was being transmitted and got no answer. The dispatcher cannot know whether the server "
            "accepted the email. So it neither sends the email again nor counts it as sent; an operator confirms or "
            "releases the email. The SMTP server's record of deliveries "
            f"shows that {report.held_delivered} of {report.held} had arrived."
        )
    paragraphs.append(
        f"{report.seconds:.1f} s from the first enqueue to the last result, that is {report.emails_per_second:.0f} "
        f"emails/s, with {counted(report.workers, 'worker')}, the kill, the retries, and an SMTP server that answers "
        f"after {report.smtp_latency_ms} ms. (To measure speed, use benchmarks/.)"
    )
    verdict = ["The counts match: no email is lost, none is duplicated.\n"]
    if not report.balances:
        verdict = ["THE COUNTS DO NOT MATCH:", *(f"  - {difference}" for difference in report.differences), ""]
    files = [
        "Files:",
        f"  {report.folder}/smtp/mail          one .eml file per delivery",
        f"  {report.folder}/smtp/ledger.jsonl  the SMTP server's record of deliveries",
        f"  {report.folder}/log/run.log        every attempt, and the recovery of the killed worker's emails",
    ]
    return "\n".join([*(fill(paragraph, _COLUMNS) + "\n" for paragraph in paragraphs), *verdict, *files])
