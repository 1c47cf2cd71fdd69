"""`dispatcher demo`: the whole chain on private servers, before your eyes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.acting import json_option
from dispatcher.cli.exits import Exit, end_by_sigterm
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Table
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from dispatcher.dev.demo_play import Report, Scene

_LINE_SECONDS: Final = 1.0
_COLUMNS: Final = 96


@click.command("demo")
@click.option("--emails", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Another seed, other emails.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("var/demo"),
    show_default="var/demo below the current folder",
    help="For the mail, the ledger and the logs; the next demo there replaces them.",
)
@json_option("One line of JSON instead of the table.")
def command(emails: int, seed: int, workers: int, folder: Path, as_json: bool) -> int:
    """Watch a thousand emails travel the whole chain.

    Starts servers of its own, a local SMTP server that keeps a ledger, and `dispatcher run`; enqueues varied emails,
    some twice, some to recipients that do not exist; puts a message on the queue that is none of ours; kills a worker
    half-way with SIGKILL; and counts in the end, by the database and by the SMTP server's ledger. Sends nothing to
    anybody, and leaves no process behind. On servers that DISPATCHER_DATABASE_URL or DISPATCHER_AMQP_URL name it works
    in a database and on queues of its own, and deletes them.

    \b
    Examples:
      dispatcher demo
      dispatcher demo --emails 10000 --workers 4
      dispatcher demo --json | jq .lost

    Exit codes: 0 the books balance, 1 they do not, or the demo could not be played.
    """
    from dispatcher.dev.demo_play import Wishes, play

    end_by_sigterm()
    is_terminal = sys.stderr.isatty()
    bar = click.progressbar(
        length=emails, label="finished", show_pos=True, show_eta=False, item_show_func=_describe, file=sys.stderr
    )
    with bar if is_terminal else nullcontext():
        report = play(Wishes(emails, seed, workers, folder.expanduser()), _DemoScreen(bar if is_terminal else None))
    if as_json:
        print_json(report.to_json())
    else:
        book_table(report).show()
        print_data(f"\n{explain(report)}")
    return Exit.DONE if report.balances else Exit.FAILED


class _DemoScreen:
    """The demo as it goes on, on stderr: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._seconds = 0.0

    def say(self, words: str) -> None:
        """One line, above the bar."""
        if self._bar is not None:
            sys.stderr.write("\r\x1b[K")
        say(words)

    def show(self, scene: Scene) -> None:
        """Moves the bar, or writes a line once a second."""
        if self._bar is not None:
            self._bar.update(scene.finished - self._bar.pos, scene)
        elif scene.seconds - self._seconds >= _LINE_SECONDS:
            self._seconds = scene.seconds
            say(f"{scene.finished} of {scene.emails}: {_describe(scene)}")


def _describe(scene: Scene | None) -> str:
    """The statuses that any email has."""
    counts = scene.counts if scene else {}
    return ", ".join(f"{counts[status]} {status}" for status in reversed(Status) if counts.get(status))


def book_table(report: Report) -> Table:
    """What each witness says."""
    dead = f"{report.failed} failed, {report.held} held, {report.poison} poison message"
    witnesses = {
        "application": [
            ("enqueued", report.emails, f"in {report.transactions} transactions"),
            ("already known", report.known, "enqueued again with the same key and payload: nothing new"),
            ("rolled back", report.rolled_back, "with the application's transaction: never existed"),
        ],
        "dispatcher": [
            ("sent", report.sent, ""),
            ("failed", report.failed, "the server refused the recipient (550)"),
            ("held", report.held, "on the wire when a worker was killed" if report.held else ""),
            ("pending", report.pending, ""),
            ("retried", report.retried, "the server deferred them once (451)"),
            ("dead letters", report.dlq, dead),
        ],
        "SMTP server": [
            ("delivered", report.delivered, f"{report.held_delivered} of them held" if report.held else ""),
            ("duplicates", report.duplicates, ""),
        ],
        "all together": [("lost", report.lost, "")],
    }
    table = Table("", "", "emails", "", right=[2])
    for number, (witness, rows) in enumerate(witnesses.items()):
        if number:
            table.add_gap()
        for row, (name, figure, words) in enumerate(rows):
            table.add("" if row else witness, name, f"{figure:,}", words)
    return table


def explain(report: Report) -> str:
    """What the figures mean, and where to look; paragraphs."""
    paragraphs = []
    if kill := report.killed:
        waited = f"{report.recovered} waited for a lease" if report.recovered else "Nothing waited for a lease"
        paragraphs.append(
            f"Worker {kill.worker} was killed with SIGKILL after {kill.finished} emails. Its in-flight ledger "
            f"lists what it had under way. Not sent yet, so given back at once: {kill.released}. Answered, so "
            f"recorded: {kill.recorded}. On the wire: {kill.uncertain}. {waited} to run out."
        )
    if kill and report.held:
        paragraphs.append(
            "Held: the email had left and no answer came back, so the dispatcher cannot know whether it was accepted. "
            "It neither sends the email again nor counts it as sent; an operator decides. The server's ledger shows: "
            f"{report.held_delivered} of {report.held} had arrived."
        )
    paragraphs.append(
        f"{report.seconds:.1f} s from the first enqueue to the last result, that is {report.emails_per_second:.0f} "
        f"emails/s, with {report.workers} workers, the kill, the retries, and a server that takes "
        f"{report.smtp_latency_ms} ms to answer (benchmarks/ measures speed)."
    )
    verdict = ["The books balance: none lost, none duplicated.\n"]
    if not report.balances:
        verdict = ["THE BOOKS DO NOT BALANCE:", *(f"  - {difference}" for difference in report.differences), ""]
    places = [
        "Where to look:",
        f"  {report.folder}/smtp/mail          an .eml for each delivery",
        f"  {report.folder}/smtp/ledger.jsonl  the SMTP server's ledger",
        f"  {report.folder}/log/run.log        every attempt, and how the killed worker was settled",
    ]
    return "\n".join([*(fill(words, _COLUMNS) + "\n" for words in paragraphs), *verdict, *places])
