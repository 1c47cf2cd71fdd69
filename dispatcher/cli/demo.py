"""`dispatcher demo`: the whole chain on private servers, before your eyes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json

if TYPE_CHECKING:
    from dispatcher.dev.demo_report import Report


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
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
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
    from dispatcher.cli.demo_screen import open_screen
    from dispatcher.dev.demo import Wishes, play

    signal.signal(signal.SIGTERM, _interrupt)
    with open_screen(emails) as screen:
        report = play(Wishes(emails, seed, workers, folder.expanduser()), screen)
    _tell(report, as_json=as_json)
    return Exit.DONE if report.balances else Exit.FAILED


def _tell(report: Report, *, as_json: bool) -> None:
    from dispatcher.cli.demo_table import book_table, explain

    if as_json:
        print_json(report.to_json())
        return
    book_table(report).show()
    print_data(f"\n{explain(report)}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
