"""`dispatcher status`: where the emails stand, once or again and again."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import console_for, plain_table, print_json, print_table, say
from dispatcher.errors import BrokerUnavailable, SchemaError, ServerUnavailable, TopologyError

if TYPE_CHECKING:
    from rich.table import Table

    from dispatcher.config import Settings
    from dispatcher.store.counts import Counts
    from dispatcher.store.providers import Trouble

_WATCH_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Standing:
    """The books and the queues at about one instant.

    Attributes:
        troubles: Providers that some worker cannot use now.
        queues: Waiting messages by queue; None if RabbitMQ did not tell.
        queues_fault: Why it did not.
    """

    counts: Counts
    troubles: list[Trouble]
    queues: dict[str, int] | None
    queues_fault: str | None

    def to_json(self) -> dict[str, Any]:
        """The form that scripts rely on."""
        return {
            "emails": {status.value: count for status, count in self.counts.emails.items()},
            "queues": self.queues,
            "oldest_pending_seconds": self.counts.oldest_pending_seconds,
            "longest_due_seconds": self.counts.longest_due_seconds,
            "providers": {
                trouble.provider: {
                    "state": trouble.state,
                    "workers": trouble.workers,
                    "reason": trouble.reason,
                    "seconds_left": trouble.seconds_left,
                }
                for trouble in self.troubles
            },
        }


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON; with --watch, one per look.")
@click.option(
    "--watch",
    "watch_seconds",
    type=click.FloatRange(0.1, 86400),
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    metavar="[SECONDS]",
    help=f"Look again every so many seconds ({_WATCH_SECONDS:g} if not said) until Ctrl-C.",
)
def command(as_json: bool, watch_seconds: float | None) -> int:
    """Count emails by status and messages by queue; tell how long the oldest pending email has been waiting, and which
    providers cannot be used.

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL. PostgreSQL is the truth: without it the command fails.
    Without RabbitMQ it tells the emails, `queues` is null, the reason stands on stderr, and it exits with 3. Messages
    that workers hold are not counted: their emails are `sending`, or about to be. A provider is named only while some
    worker cannot use it: `paused` (it throttles us), `open` (it fails as a whole), `half_open` (one email probes it).

    \b
    Examples:
      dispatcher status
      dispatcher status --watch
      dispatcher status --json | jq .emails.pending

    \b
    JSON:
      {"emails": {"pending": 0, "sending": 0, "sent": 0, "failed": 0, "held": 0},
       "queues": {"email.dispatcher.send": 0, "email.dispatcher.dlq": 0},
       "oldest_pending_seconds": null, "longest_due_seconds": null,
       "providers": {"smtp": {"state": "open", "workers": 2, "reason": "connection_failed", "seconds_left": 1.5}}}
    """
    settings = load_settings("database_url", "amqp_url")
    if watch_seconds is None:
        return _show(look(settings), as_json=as_json)
    if sys.stdout.isatty() and not as_json:
        _redraw(settings, watch_seconds)
    else:
        _repeat(settings, watch_seconds, as_json=as_json)
    return Exit.DONE


def look(settings: Settings) -> Standing:
    """How everything stands now.

    Raises:
        StoreUnavailable, SchemaError: the books cannot be read.
    """
    from dispatcher.broker.topology import Topology, depths
    from dispatcher.store.connections import connected
    from dispatcher.store.counts import count_emails
    from dispatcher.store.providers import find_trouble

    with connected(settings.database_url, name="dispatcher status") as connection:
        counts = count_emails(connection)
        troubles = find_trouble(connection)
    try:
        queues = asyncio.run(depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))
    except (BrokerUnavailable, TopologyError) as error:
        return Standing(counts, troubles, None, str(error))
    return Standing(counts, troubles, queues, None)


def _show(standing: Standing, *, as_json: bool) -> Exit:
    """Prints one look."""
    if as_json:
        print_json(standing.to_json())
    else:
        print_table(_table(standing))
    if standing.queues_fault:
        say(standing.queues_fault)
        return Exit.PARTLY
    return Exit.DONE


def _repeat(settings: Settings, seconds: float, *, as_json: bool) -> None:
    """Prints look after look, one line or one table each, until nobody reads any more."""
    is_read = True
    while is_read:
        try:
            standing = look(settings)
        except (ServerUnavailable, SchemaError) as error:
            say(str(error))
        else:
            is_read = print_json(standing.to_json()) if as_json else print_table(_table(standing))
            if standing.queues_fault:
                say(standing.queues_fault)
        if is_read:
            time.sleep(seconds)


def _redraw(settings: Settings, seconds: float) -> None:
    """Keeps one table on the terminal up to date."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console_for(sys.stdout), auto_refresh=False, transient=False) as live:
        while True:
            footer = f"every {seconds:g} s, Ctrl-C ends"
            try:
                standing = look(settings)
            except (ServerUnavailable, SchemaError) as error:
                live.update(Group(Text(str(error), style="red"), Text(footer, style="dim")), refresh=True)
            else:
                fault = [Text(standing.queues_fault, style="red")] if standing.queues_fault else []
                live.update(Group(_table(standing), *fault, Text(footer, style="dim")), refresh=True)
            time.sleep(seconds)


def _table(standing: Standing) -> Table:
    from rich.text import Text

    table = plain_table("", "", show_header=False)
    table.columns[1].justify = "right"
    for status, count in standing.counts.emails.items():
        table.add_row(status.value, f"{count:,}", style=_style(status.value, count))
    table.add_section()
    table.add_row("oldest pending", _duration(standing.counts.oldest_pending_seconds))
    table.add_row("longest due", _duration(standing.counts.longest_due_seconds))
    table.add_section()
    if standing.queues is None:
        table.add_row("queues", "unknown")
    for queue, depth in (standing.queues or {}).items():
        table.add_row(queue, f"{depth:,}")
    table.add_section()
    for trouble in standing.troubles:
        # A Text, because a provider's words may hold what rich takes for markup.
        table.add_row(trouble.provider, Text(_words(trouble)), style="yellow" if trouble.state == "paused" else "red")
    return table


def _words(trouble: Trouble) -> str:
    workers = f"{trouble.workers} worker{'' if trouble.workers == 1 else 's'}"
    left = f", {_duration(trouble.seconds_left)} left" if trouble.seconds_left else ""
    reason = f"\n{trouble.reason}" if trouble.reason else ""
    return f"{trouble.state.replace('_', ' ')} ({workers}{left}){reason}"


def _style(status: str, count: int) -> str | None:
    """Colour only for what a person has to look at."""
    return {"failed": "red", "held": "yellow"}.get(status) if count else None


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
