"""`dispatcher dlq list`, `discard`, `replays`, `stop` and `reconcile`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.actions.dlq import DiscardDead, ListDead, ListReplays, StopReplay
from dispatcher.cli.batch_face import batch_command
from dispatcher.cli.exits import Exit
from dispatcher.cli.face import command, print_csv, read_options
from dispatcher.cli.options import audit_options, confirm, json_option
from dispatcher.cli.output import counted, examples, print_json, say
from dispatcher.cli.sessions import run_with_dlq, run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.failures import GROUPINGS, Selection
from dispatcher.domain.poison_id import is_poison_id

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.ops.acts import Act
    from dispatcher.ops.reconcile import Differences
    from dispatcher.store.connections import AsyncSession

_EXAMPLES_SHOWN: Final = 5

_LIST: Final = command(ListDead)
_DISCARD: Final = batch_command(DiscardDead)
replays: Final = command(ListReplays)
stop: Final = command(StopReplay)


def _list(by: str | None, poison: bool, as_csv: bool, **given: Any) -> int:
    """List failed and held emails, newest first, or count them by cause.

    \b
    Examples:
      dispatcher dlq list --by error_type --newer-than 1d
      dispatcher dlq list --by domain --error-type timeout_before_send
      dispatcher dlq list --provider ses --text "not verified" --limit 200
      dispatcher dlq list --poison
      dispatcher dlq list --json | jq -r '.emails[].email_id'

    \b
    JSON: {"emails": [{"email_id": …, "status": …, "error_type": …, …}], "next": null}
    JSON with --by: {"by": "error_type", "groups": [{"value": …, "emails": …, "oldest_at": …, "newest_at": …, …}]}
    JSON with --poison: {"poison": [{"poison_id": …, "octets": …, "problem": …, "x_death": …}], "total": 2}

    `--by error_type` groups by cause, such as outcome_unknown. `--by error` groups by the text of the last error.

    With `--by domain`, an email counts once for each domain of its recipients. Emails whose content was deleted have no
    recipients any more: they are in the group `-`.

    The command reads only the database. With --poison it reads the DLQ instead; it does not remove or reorder messages.
    """
    if as_csv and (poison or by):
        raise click.UsageError("--csv lists emails. Leave out --by and --poison.")
    if poison:
        return _list_poison(read_options(ListDead, _without_json(given)).limit, as_json=given["as_json"])
    if by:
        return _list_groups(read_options(ListDead, _without_json(given)).selected(), by, as_json=given["as_json"])
    return print_csv(ListDead, given) if as_csv else _call(_LIST, **given)


list_: Final = click.Command(
    "list",
    callback=_list,
    help=inspect.getdoc(_list),
    params=[
        *_LIST.params,
        click.Option(
            ["--by"], type=click.Choice(GROUPINGS), help="Count the emails by this field instead of listing them."
        ),
        click.Option(
            ["--poison"], is_flag=True, help="List the poison messages: messages on the DLQ that point to no email."
        ),
    ],
)


def _call(command: click.Command, **given: Any) -> int:
    assert command.callback is not None
    return int(command.callback(**given))


def _without_json(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "as_json"}


def _discard(names: tuple[str, ...], **given: Any) -> int:
    poison = tuple(name for name in names if is_poison_id(name))
    if not poison:
        return _call(_DISCARD, names=names, **given)
    from dispatcher.ops.acts import Act
    from dispatcher.ops.poison import discard_poison

    if len(poison) < len(names):
        raise click.UsageError("Discard poison messages and dead letters of emails with two commands.")
    asked = read_options(DiscardDead, {name: given[name] for name in DiscardDead.fields if name in given})
    if asked.is_selecting() or asked.tenant_id:
        raise click.UsageError("Poison messages are discarded by their ids alone.")
    if not (given["reason"] or asked.dry_run):
        raise click.UsageError("--reason is missing. Give a few words for the audit log.")

    async def discard_all(session: AsyncSession, dlq: DeadLetterQueue) -> int:
        return sum([await discard_poison(session, dlq, name, act) for name in poison])

    say(f"This discards {counted(len(poison), 'poison message')}: {', '.join(poison)}.")
    if asked.dry_run:
        say("Nothing was changed.")
        return Exit.DONE
    act = Act.of(given["actor"], given["reason"])
    confirm("Discard them?", yes=given["yes"])
    discarded = run_with_dlq("dlq", discard_all)
    if given["as_json"]:
        print_json({"discarded": discarded})
    say(f"Discarded {counted(discarded, 'poison message')}.")
    return Exit.DONE


discard: Final = click.Command("discard", callback=_discard, params=_DISCARD.params, help=_DISCARD.help)


def _list_groups(selection: Selection, by: str, *, as_json: bool) -> int:
    from dispatcher.store.failures import group_dead

    groups = run_with_session("dlq", lambda session: group_dead(session, selection, by))
    if as_json:
        print_json({"by": by, "groups": groups})
        return Exit.DONE
    # The group is the last column, because an error's text may be long.
    table = Table("emails", "first enqueued", "last enqueued", by.replace("_", " "), right=[0])
    for group in groups:
        table.add(f"{group.emails:,}", group.oldest_at, group.newest_at, group.value)
    if groups:
        table.show()
    say(f"{counted(sum(group.emails for group in groups), 'email')} in total.")
    return Exit.DONE


def _list_poison(limit: int, *, as_json: bool) -> int:
    from dispatcher.ops.poison import glimpse, list_poison

    found = run_with_dlq("dlq", list_poison)
    shown = found[:limit]
    if as_json:
        documents = [
            {
                "poison_id": each.poison_id,
                "position": each.position,
                "octets": len(each.body),
                "problem": each.problem,
                "beginning": glimpse(each.body),
                "headers": each.headers,
                "x_death": each.x_death,
            }
            for each in shown
        ]
        print_json({"poison": documents, "total": len(found)})
        return Exit.DONE
    table = Table("message", "position", "bytes", "dead-lettered", "problem", "first bytes", right=[1, 2])
    for each in shown:
        died = each.x_death[0].get("time", "-") if each.x_death else "published to the DLQ"
        table.add(each.poison_id, each.position + 1, f"{len(each.body):,}", died, each.problem, glimpse(each.body))
    if not found:
        say("There is no poison message: every message on the DLQ belongs to an email.")
        return Exit.DONE
    table.show()
    first = found[0].poison_id
    say(f"{len(shown)} of {counted(len(found), 'poison message')}. `dispatcher show {first}` shows the first.")
    return Exit.DONE


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
        print_json(found)
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
            more = ["…"] if ids[_EXAMPLES_SHOWN:] else []
            about = f"{len(ids):,} {name}{f', {done}' if found.fixed else ''}:"
            say(about + examples([*ids[:_EXAMPLES_SHOWN], *more]))
    if found.poison:
        say(f"{counted(len(found.poison), 'poison message')}: `dispatcher dlq list --poison` lists them.")
    if not found.count:
        say("The DLQ and the database agree.")
    elif not found.fixed:
        say('`dispatcher dlq reconcile --fix --reason "…"` repairs the differences.')
