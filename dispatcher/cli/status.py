"""`dispatcher status`: shows the state of emails, queues, workers and providers, once or repeatedly."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Age, Number, json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import columns_of, in_style, is_coloured, is_redrawable
from dispatcher.domain.text import printable
from dispatcher.errors import BrokerUnavailable, SchemaError, ServerUnavailable, TopologyError

if TYPE_CHECKING:
    from dispatcher.cli.status_page import Snapshot
    from dispatcher.config import Settings
    from dispatcher.config.values import Listener

_WATCH_SECONDS: Final = 2.0
_READINESS_SECONDS: Final = 1.0
_READINESS_OCTETS: Final = 65536
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a monitor may listen on all addresses
_LONGEST_SECONDS: Final = 400 * 86_400.0
_HOURS_UP_TO_SECONDS: Final = 2 * 86_400.0
"""A history of at most this length has one row per hour; a longer history has one row per day."""


@click.command("status")
@json_option("Print one line of JSON; with --watch, one line per refresh.")
@click.option(
    "--watch",
    "watch_seconds",
    type=Number(0.1, 86400),
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    metavar="[SECONDS]",
    help=f"Refresh every SECONDS until Ctrl-C.  [default: {_WATCH_SECONDS:g}]",
)
@click.option(
    "--history",
    "history_seconds",
    type=Age(),
    metavar="TIME",
    help="Instead of the status, show the attempts of the last TIME, by provider and outcome. TIME is a length such as "
    "24h or 7d.",
)
def command(as_json: bool, watch_seconds: float | None, history_seconds: float | None) -> int:
    """Count emails by status and messages by queue; list workers, faulty providers and vanished hosts.

    \b
    Examples:
      dispatcher status
      dispatcher status --watch
      dispatcher status --history 7d
      dispatcher status --json | jq .emails.pending

    \b
    Statuses of an email:
      pending    enqueued: it waits for a worker, or for its next attempt
      waiting    not due yet: it is scheduled, will be redelivered, or waits for the ceiling
                 of its recipient domain
      sending    leased by a worker
      sent       accepted by a provider
      failed     not sent, and not tried again: see `dispatcher dlq`
      held       it is unknown whether a provider accepted the email: see `dispatcher held`
      cancelled  cancelled or expired before it was sent

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL. If PostgreSQL is unreachable, the command fails. If RabbitMQ
    is unreachable, the command shows everything except the queues, stderr says why, and the exit code is 3. Queue
    counts do not include messages that workers have received but not acknowledged.

    The following paragraphs explain fields of the JSON. The end of this text shows an example. If RabbitMQ is
    unreachable, `queues` is null.

    `domains` lists the recipient domains whose ceilings make emails wait (see `dispatcher domains`). For each domain,
    `waiting` is the number of emails that wait, counted up to 10,000.

    `oldest_pending_seconds` is the longest time that a pending email has waited since it could first be sent.
    `longest_due_seconds` is the longest time that a due email has waited for the relay to publish it. These two figures
    leave out emails that wait because of a pause (see `pauses`).

    `latency_seconds` is the time from when an email could first be sent until a provider accepted it. The percentiles
    are computed from the newest emails that were sent in the last ten minutes, at most 1,000. `paces` has each host and
    each provider (the other is null): how many of these emails it sent per minute, and how long an attempt took.

    If `workers` is empty, no `dispatcher run` is running.

    `providers` lists a provider only while a worker cannot use it. The provider's state is `paused` (the provider
    throttles us), `open` (all requests fail), or `half_open` (one email tests the provider). Pauses by operators are
    listed in `pauses` instead.

    `vanished_hosts` lists a host in two cases: the host has leases, but no worker with a PostgreSQL session; or its
    monitor has not reported for DISPATCHER_ALERT_AFTER_SECONDS, and did not shut down cleanly.

    Within `settled_in_seconds`, another host marks the vanished host's emails `held`, or resends them (see
    DISPATCHER_ON_UNCERTAIN). `settled_in_seconds` is null if the vanished host has no leases. `silent_seconds` is the
    time since the monitor of the vanished host last reported. It is null if the monitor shut down cleanly, or if the
    monitor still reports and only the workers have vanished.

    `unready` is a text that says which processes of this host's `dispatcher run` do not work, and why. The text comes
    from the monitor at DISPATCHER_METRICS_ADDRESS. `unready` is null if all processes work, or if no monitor answers.

    `expiring` counts the undecided emails whose content will be deleted within a week. An email is undecided if it is
    failed or held, and no operator has resolved it. Its content is deleted after DISPATCHER_RETAIN_UNDECIDED_DAYS.
    `expiring` is null if this setting is 0, which keeps the content for ever.

    `kept_back` counts the failed emails that no host may send, because DISPATCHER_ALLOW_RECIPIENTS does not allow
    their recipients. `dispatcher dlq list --error-type kept_back` lists them.

    The table shows `oldest_pending_seconds` as "oldest pending", `longest_due_seconds` as "oldest unpublished", and
    `expiring` as "undecided, expiring".

    With --history, the command counts attempts by provider and outcome. The table has a row for each provider in each
    hour if TIME is at most 2d, otherwise in each day, in UTC. The first hour or day is counted as a whole, even if only
    a part of it lies within TIME. An email counts once per attempt: for example, an email that is deferred once and
    sent later counts twice. The history needs only DISPATCHER_DATABASE_URL. The JSON of --history has both lists,
    `hours` and `days`, for every TIME:

    \b
      {"hours": [{"begins_at": "2026-11-23T12:00:00Z", "provider": "smtp", "outcome": "accepted", "attempts": 4711}],
       "days": [{"begins_at": "2026-11-23T00:00:00Z", "provider": "smtp", "outcome": "accepted", "attempts": 98765}]}

    \b
    JSON:
      {"emails": {"pending": 0, "waiting": 0, "sending": 0, "sent": 0, "failed": 0, "held": 0,
                  "cancelled": 0},
       "kept_back": 0,
       "queues": {"email.dispatcher.send.urgent": 0, "email.dispatcher.send": 0, "email.dispatcher.send.bulk": 0,
                  "email.dispatcher.dlq": 0},
       "oldest_pending_seconds": null, "longest_due_seconds": null,
       "expiring": {"emails": 2, "first_in_seconds": 432000.0},
       "providers": {"smtp": {"state": "open", "workers": 2, "reason": "connection_failed", "seconds_left": 1.5}},
       "pauses": [{"scope": "tenant", "name": "acme", "until": "2026-11-23T14:00:00+00:00", "reason": "complaints",
                   "actor": "ann@ops-1", "began_at": "2026-11-23T12:00:00+00:00"}],
       "domains": [{"domain": "example.org", "per_second": 5.0, "concurrent": null, "waiting": 1234}],
       "vanished_hosts": [{"name": "host-2", "in_flight": 64, "settled_in_seconds": 27.5, "silent_seconds": null}],
       "unready": "worker 1 could not boot, 3 times in a row: ...",
       "workers": [{"name": "host-1:w0:4711:9f86d081", "age_seconds": 86400.0, "in_flight": 12}],
       "latency_seconds": {"p50": 0.021, "p95": 0.05, "p99": 0.11},
       "paces": [{"host": "host-1", "provider": null, "emails": 400, "per_minute": 41.5,
                  "p50_seconds": 0.04, "p99_seconds": 0.11}]}
    """
    if history_seconds is not None:
        _show_history(history_seconds, is_watching=watch_seconds is not None, as_json=as_json)
        return Exit.DONE
    settings = load_settings("database_url", "amqp_url")
    if watch_seconds is None:
        snapshot = take_snapshot(settings)
        _print(snapshot, as_json=as_json)
        return Exit.PARTLY if snapshot.queues_fault else Exit.DONE
    gc.enable()
    if is_redrawable(sys.stdout) and not as_json:
        _redraw(settings, watch_seconds)
    else:
        _repeat(settings, watch_seconds, as_json=as_json)
    return Exit.DONE


def _show_history(seconds: float, *, is_watching: bool, as_json: bool) -> None:
    if is_watching:
        raise click.UsageError("Give --history or --watch, not both.")
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise click.UsageError("--history needs a time of more than 0s and at most 400d.")
    from dispatcher.cli.status_page import history_json, history_table
    from dispatcher.store.connections import connected
    from dispatcher.store.figures import sum_attempts

    unit = "hour" if seconds <= _HOURS_UP_TO_SECONDS else "day"
    units = ("hour", "day") if as_json else (unit,)
    with connected(load_settings("database_url").database_url, name="dispatcher status") as connection:
        found = {unit: sum_attempts.sync(connection, unit, seconds) for unit in units}
    if as_json:
        print_json({f"{unit}s": history_json(found[unit]) for unit in units})
    elif found[unit]:
        history_table(found[unit], unit).show()
    else:
        print_data("No attempt ended in this time.")


def take_snapshot(settings: Settings) -> Snapshot:
    """The current state, read from PostgreSQL, which must be readable, RabbitMQ and this host's monitor."""
    from dispatcher.broker.topology import Topology, depths
    from dispatcher.cli.status_page import Snapshot
    from dispatcher.ops.hosts import hosts_of
    from dispatcher.store import figures
    from dispatcher.store.connections import connected
    from dispatcher.store.controls import list_pauses
    from dispatcher.store.domains import count_domain_waits
    from dispatcher.store.old_transactions import find_oldest_transaction
    from dispatcher.store.providers import find_troubles
    from dispatcher.store.retention import Retention, count_expiring

    undecided = Retention.of(settings).expiring
    with connected(settings.database_url, name="dispatcher status") as connection:
        workers = figures.list_workers.sync(connection)
        found = (
            figures.count_emails.sync(connection),
            figures.count_kept_back.sync(connection),
            *figures.find_oldest_pending.sync(connection),
            count_expiring.sync(connection, **undecided) if undecided else None,
            find_troubles.sync(connection),
            find_oldest_transaction.sync(connection),
            list_pauses.sync(connection),
            [each for each in count_domain_waits.sync(connection) if each.waiting],
            workers,
            hosts_of(workers, figures.list_host_reports.sync(connection), settings),
            figures.measure_latency.sync(connection),
            figures.measure_paces.sync(connection),
        )
    queues = fault = None
    try:
        queues = asyncio.run(depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))
    except (BrokerUnavailable, TopologyError) as error:
        fault = str(error)
    return Snapshot(*found, asyncio.run(fetch_unready(settings.metrics_address)), queues, fault, time.monotonic())


async def fetch_unready(listener: Listener) -> str | None:
    """Which processes of this host are not ready, and why; None if all are ready, or if no monitor answers."""
    import orjson

    if not listener.host:
        return None
    try:
        async with asyncio.timeout(_READINESS_SECONDS):
            reader, writer = await asyncio.open_connection(_ANYWHERE.get(listener.host, listener.host), listener.port)
            with closing(writer):
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                reply = b""
                while len(reply) < _READINESS_OCTETS and (octets := await reader.read(4096)):
                    reply += octets
        reason: Any = orjson.loads(reply.partition(b"\r\n\r\n")[2])["checks"]["processes"]["reason"]
    except (OSError, TimeoutError, ValueError, LookupError, TypeError):
        return None
    # Another program may listen on this address, so the text is not trusted.
    return printable(reason) if isinstance(reason, str) else None


def _print(snapshot: Snapshot, *, as_json: bool) -> bool:
    """Prints one snapshot; returns False if the reader closed the pipe."""
    from dispatcher.cli.status_page import table

    is_read = (
        print_json(snapshot.to_json())
        if as_json
        else print_data("\n".join(table(snapshot, coloured=is_coloured(sys.stdout))))
    )
    if snapshot.queues_fault:
        say(snapshot.queues_fault)
    return is_read


def _repeat(settings: Settings, seconds: float, *, as_json: bool) -> None:
    """Prints a snapshot every `seconds` seconds, as a line of JSON or a table, until the reader closes the pipe."""
    is_read = True
    while is_read:
        try:
            is_read = _print(take_snapshot(settings), as_json=as_json)
        except (ServerUnavailable, SchemaError) as error:
            say(str(error))
        if is_read:
            time.sleep(seconds)


def _redraw(settings: Settings, seconds: float) -> None:
    """Draws the page of `--watch`, and redraws it in place every `seconds` seconds.

    The first page begins below the terminal's earlier output, so it overwrites nothing.
    """
    from dispatcher.cli.status_page import page

    before: Snapshot | None = None
    coloured = is_coloured(sys.stdout)
    drawn = 0
    sys.stdout.write("\x1b[?25l")  # hides the cursor
    try:
        while True:
            width, height = shutil.get_terminal_size()
            try:
                snapshot = take_snapshot(settings)
            except (ServerUnavailable, SchemaError) as error:
                lines = [in_style(printable(str(error)), "red" if coloured else "")]
            else:
                lines, before = page(snapshot, before, width, coloured=coloured), snapshot
            footer = f"refreshed every {seconds:g} s; stop with Ctrl-C"
            lines = [*lines, in_style(footer, "dim" if coloured else "")]
            rows = sum(max(1, -(-columns_of(line) // width)) for line in lines)
            # Move the cursor to the first line of the page that was drawn before, and clear the screen from there.
            upward = f"\x1b[{min(drawn, height - 1)}A" if drawn else ""
            if not print_data(f"{upward}\r\x1b[J" + "\n".join(lines)):
                return
            drawn = rows
            time.sleep(seconds)
    finally:
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
