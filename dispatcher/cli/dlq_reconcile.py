"""`dispatcher dlq reconcile`: compares the DLQ with the database and repairs the DLQ; no email changes its status."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.options import audit_options, json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_dlq

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.reconcile import Differences

_EXAMPLES_SHOWN: Final = 5


@click.command("reconcile")
@click.option("--fix", is_flag=True, help="Repair the differences; needs --reason.")
@audit_options(is_required=False)
@json_option("Print one line of JSON: every difference with its ids.")
def reconcile(fix: bool, act: Act | None, as_json: bool) -> int:
    """Compare the DLQ with the failed and held emails. With --fix, repair the differences.

    \b
    Examples:
      dispatcher dlq reconcile
      dispatcher dlq reconcile --fix --reason "RabbitMQ was rebuilt"

    The database is the source of truth. Without --fix, the command only reports the differences. With --fix, the
    relay publishes missing dead letters again, and the command removes superfluous dead letters.

    A dead letter is missing if an email is failed or held, but the DLQ has no dead letter for it. (Emails that an
    operator discarded, and emails whose recipients are all suppressed, need no dead letter.)

    A dead letter is superfluous in three cases: its email was sent, replayed or discarded; an earlier dead letter on
    the DLQ reports the same failure; or its email does not exist (it was pruned, or is missing in a restored backup).

    Poison messages, which point to no email, are reported and stay on the DLQ: see `dlq list --poison`.

    Exit codes: 0 the DLQ and the database agree, or --fix has made them agree; 3 they differ.
    """
    from dispatcher.ops.reconcile import reconcile as compare

    if fix and not act:
        raise click.UsageError("--fix needs --reason. Give a few words for the audit log.")
    found = run_with_dlq("dlq", partial(compare, act=act if fix else None))
    if as_json:
        print_json(asdict(found))
    _report(found)
    return Exit.DONE if found.fixed or not found.count else Exit.PARTLY


def _report(found: Differences) -> None:
    parts = {
        "missing": (found.missing, "published again"),
        "stale": (found.stale, "removed"),
        "duplicate": (found.duplicates, "removed"),
        "without an existing email": (found.orphans, "removed"),
    }
    say(f"{counted(found.depth, 'message')} on the DLQ; {found.dead_letters:,} of them match a failed or held email.")
    for name, (ids, done) in parts.items():
        if ids:
            examples = ", ".join(map(str, ids[:_EXAMPLES_SHOWN]))
            more = "…" if ids[_EXAMPLES_SHOWN:] else ""
            say(f"{len(ids):,} {name}{f', {done}' if found.fixed else ''}: {examples}{more}")
    if found.poison:
        say(f"{counted(len(found.poison), 'poison message')}: `dispatcher dlq list --poison` lists them.")
    if not found.count:
        say("The DLQ and the database agree.")
    elif not found.fixed:
        say('`dispatcher dlq reconcile --fix --reason "…"` repairs the differences.')
