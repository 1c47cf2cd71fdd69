"""`dispatcher dlq replay`, `replays` and `stop`: send failed emails again, each once, at a limited rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import filter_options, require_names_or_filter, select_by_names
from dispatcher.cli.options import Number, audit_options, confirm, json_option, progress
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import open_dlq, run_with_dlq, run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import DispatcherError, ServerUnavailable

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replaying import Ended, Preview
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection
    from dispatcher.store.replays import ItemOutcome, OverlappingReplay, Replay

_SKIPPED_SHOWN: Final = 1000
_OUTCOME_TEXTS: Final = {
    "replayed": "can be sent again",
    "already_sent": "already sent",
    "under_way": "already pending, waiting or being sent",
    "cancelled": "cancelled",
    "expired": "cannot be sent again: expired",
    "discarded": "discarded; `dispatcher dlq replay ID` can still send a discarded email again",
    "may_have_arrived": "may have arrived: held, or an attempt got no answer; add --held to replay these, too",
    "content_pruned": "cannot be sent again: content was deleted",
    "unknown": "no such email",
}


@click.command("replay")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@filter_options()
@click.option("--all", "everything", is_flag=True, help="Select every failed email, and with --held every held email.")
@click.option("--from-queue", is_flag=True, help="Select the emails whose dead letters are on the DLQ.")
@click.option(
    "--held",
    "include_held",
    is_flag=True,
    help="Also replay selected emails that may have arrived: held emails, and emails with an attempt that got no "
    "answer. Without --held, these emails are skipped, even with --status held.",
)
@click.option(
    "--rate",
    type=Number(min=0),
    metavar="N",
    help="Emails per second: 0.01 or more, or 0 for no limit.  [default: 50]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Keep this replay's own rate even if a running replay includes some of the same emails.",
)
@click.option(
    "--reason",
    metavar="TEXT",
    help="The reason, for the audit log: a few words, without addresses. Required without --dry-run or --resume.",
)
@click.option(
    "--actor", metavar="NAME", help="The operator's name for the audit log.  [default: the system's user@host]"
)
@click.option("--dry-run", is_flag=True, help="Only show the number of emails and the ids of a few; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@click.option(
    "--resume",
    type=int,
    metavar="REPLAY",
    help="Continue a replay that was stopped or interrupted. `dlq replays` shows its number.",
)
@click.option(
    "--body",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with a corrected message, to publish in place of the poison message p-….",
)
@json_option("Print one line of JSON: the result, and each skipped email with its reason.")
def replay(
    names: tuple[str, ...],
    selection: Selection,
    everything: bool,
    from_queue: bool,
    include_held: bool,
    rate: float | None,
    force: bool,
    reason: str | None,
    actor: str | None,
    dry_run: bool,
    yes: bool,
    resume: int | None,
    body: Path | None,
    as_json: bool,
) -> int:
    """Send failed emails again. No email with the status `sent` is sent again.

    \b
    Examples:
      dispatcher dlq replay --error-type server_error --dry-run
      dispatcher dlq replay --error-type server_error --rate 20 --reason "SES is back"
      dispatcher dlq replay order-17-receipt --tenant shop --reason "address corrected at the provider" --yes
      dispatcher dlq replay --resume 7
      dispatcher dlq replay p-3fa9c1d2e0b4 --body repaired.json --reason "key was misspelt"

    Select emails by ids or message keys, by a filter, by --from-queue, or with --all. The command first shows the
    number of selected emails and the ids of a few, and asks for confirmation. Without a terminal (in a script or a
    pipe) the command changes nothing unless --yes is given.

    Each email becomes pending and due in its own transaction, at the rate given by --rate. The email gets all its
    attempts again, and its dead letter is removed from the DLQ. Ctrl-C, a crash and `dispatcher dlq stop` lose nothing:
    --resume continues the replay.

    If two replays select the same email, the email is sent once. Before the replay starts, the command lists the
    running replays that include some of the same emails. The new replay and the listed replays share one rate, the
    lowest of all their rates. With --force, the new replay keeps its own rate.

    A poison message (p-…) points to no email, so there is no email to send. With --body, the command publishes a
    corrected message in its place.

    Exit codes: 0 all selected emails were replayed, or no email matches; 1 emails match, but none was replayed; 2
    confirmation needs a terminal or --yes; 3 only some were replayed. The command prints how many emails it skipped for
    each reason; --json lists them.
    """
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replaying import DEFAULT_PER_SECOND, MIN_PER_SECOND, create

    _refuse(rate and rate < MIN_PER_SECOND, f"--rate must be at least {MIN_PER_SECOND} emails per second, or 0.")
    if body or any(map(is_poison_id, names)):
        return _repair(names, body, reason, actor)
    if resume is not None:
        _refuse(names or selection.filters or from_queue or everything, "--resume takes no ids and no filter.")
        resumed_by = {"actor": actor, "reason": reason, "per_second": rate, "force": force}
        return run_replay(load_settings("database_url", "amqp_url"), resume, as_json=as_json, resumed_by=resumed_by)
    ways = "ids or message keys, a filter such as --error-type, --from-queue, or --all"
    require_names_or_filter(names, selection, ways, is_chosen=from_queue or everything)
    _refuse(names and from_queue, "Give ids and message keys, or --from-queue, but not both.")
    _refuse(
        not dry_run and not reason,
        "--reason is missing. Give a few words for the audit log. (--dry-run needs no reason.)",
    )
    act = None if dry_run else Act.of(actor, reason or "")
    settings = load_settings("database_url", "amqp_url")
    found = run_with_session("dlq", partial(_find, settings, selection, names, from_queue, include_held), settings)
    _show(found, as_json=as_json and dry_run, force=force)
    if act is None or not (found.preview.total or found.others):
        return Exit.DONE
    confirm(f"Replay {counted(found.preview.replayable, 'email')}?", yes=yes)
    made = run_with_session(
        "dlq",
        partial(
            create,
            selection=found.selection,
            act=act,
            include_held=include_held,
            per_second=DEFAULT_PER_SECOND if rate is None else rate or None,
            source="queue" if from_queue else "ids" if names else "filter",
            force=force,
        ),
        settings,
    )
    return run_replay(settings, made.replay_id, as_json=as_json)


def _refuse(is_mistake: object, text: str) -> None:
    if is_mistake:
        raise click.UsageError(text)


class _Replayable(NamedTuple):
    """The emails that a replay selects.

    Attributes:
        selection: Selects the emails by their ids, so that an email that fails later is not included.
        others: How many of the ids on the command line belong to emails that are not failed or held.
        overlapping: Running replays that include some of the same emails.
    """

    selection: Selection
    preview: Preview
    others: int
    overlapping: list[OverlappingReplay]


async def _find(
    settings: Settings,
    selection: Selection,
    names: tuple[str, ...],
    from_queue: bool,
    include_held: bool,
    session: AsyncSession,
) -> _Replayable:
    from dispatcher.ops.dead_letters import list_dead_letter_ids
    from dispatcher.ops.replaying import overlaps, preview
    from dispatcher.store.failures import find_dead_ids

    selection = await select_by_names(session, selection, names)
    if from_queue:
        async with open_dlq(settings, "dlq") as dlq:
            selection = replace(selection, email_ids=tuple(await list_dead_letter_ids(session, dlq)))
    given = selection.email_ids
    ids = tuple(await find_dead_ids(session, selection)) if given is None else given
    found = await preview(session, selection, include_held=include_held)
    others = 0 if given is None or selection.filters else len(set(given)) - found.total
    return _Replayable(replace(selection, email_ids=ids), found, others, await overlaps(session, selection))


def _show(found: _Replayable, *, as_json: bool, force: bool) -> None:
    _, preview, others, overlapping = found
    if as_json:
        document = {"emails": preview.counts, "samples": preview.samples, "not_failed_or_held": others}
        print_json({**document, "overlaps": [asdict(each) for each in overlapping]})
        return
    for outcome, count in preview.counts.items():
        examples = ", ".join(map(str, preview.samples[outcome]))
        say(f"{counted(count, 'email')}: {_OUTCOME_TEXTS[outcome.value]}. For example {examples}")
    if others:
        say(f"{counted(others, 'email')}: not failed or held. The replay skips them.")
    if not preview.total and not others:
        say("No failed or held email matches.")
    _say_overlaps(overlapping, force=force)


def _say_overlaps(overlapping: list[OverlappingReplay], *, force: bool) -> None:
    for each in overlapping:
        rate = f"{each.per_second:g}/s" if each.per_second else "no rate limit"
        running = f"Replay {each.replay_id} by {each.actor} ({each.reason}; {rate}) is running"
        say(f"{running} and still has to replay {each.emails:,} of these emails.")
    if overlapping:
        say(
            "This replay keeps its own rate."
            if force
            else "All these replays share one rate, the lowest of their rates. To keep your own rate, add --force."
        )


def run_replay(
    settings: Settings, replay_id: int, *, as_json: bool, resumed_by: Mapping[str, Any] | None = None
) -> int:
    """Runs a replay until it ends, is stopped, or is interrupted; returns the exit code.

    Args:
        resumed_by: The options given with `--resume`: who resumes the replay (None: this user) and why, the new rate
            (None: the earlier rate), and `force`. None for a new replay.
    """
    try:
        ended, skipped = run_with_dlq("dlq", partial(_run_replay, replay_id, resumed_by), settings)
    except (KeyboardInterrupt, ServerUnavailable) as error:
        how = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Connection lost"
        say(f"{how}; no email is lost. To continue: dispatcher dlq replay --resume {replay_id}")
        raise
    if as_json:
        counts = {
            **_replay_json(ended.replay),
            "locked": ended.locked,
            "dead_letters_removed": ended.dead_letters_removed,
        }
        print_json({**counts, "skipped_emails": {str(email_id): why for email_id, why in skipped}})
    return _report(ended)


async def _run_replay(
    replay_id: int, resumed_by: Mapping[str, Any] | None, session: AsyncSession, dlq: DeadLetterQueue
) -> tuple[Ended, list[tuple[UUID, ItemOutcome]]]:
    from dispatcher.ops.acts import this_user
    from dispatcher.ops.replaying import find, overlaps_of, resume, run
    from dispatcher.store.replays import list_skipped

    if resumed_by:
        await resume(session, replay_id, **{**resumed_by, "actor": resumed_by["actor"] or this_user()})
        _say_overlaps(await overlaps_of(session, replay_id), force=resumed_by["force"])
    begun = await find(session, replay_id)
    if begun is None:
        raise _unknown(replay_id)
    rate = f" at {begun.per_second:g}/s" if begun.per_second else ""
    say(f"Replay {replay_id}: {counted(begun.waiting, 'email')}{rate}.")
    with progress("replaying", total=begun.total, done=begun.total - begun.waiting) as advance:
        ended = await run(session, dlq, replay_id, on_email=lambda _email_id, _outcome: advance())
    return ended, await list_skipped(session, replay_id, limit=_SKIPPED_SHOWN)


def _unknown(replay_id: int) -> DispatcherError:
    return DispatcherError(f"There is no replay {replay_id}.", remedy="`dispatcher dlq replays` lists all replays.")


def _report(ended: Ended) -> int:
    found = ended.replay
    say(
        f"Replay {found.replay_id} is {_state(found)}: {found.replayed:,} of {found.total:,} replayed, "
        f"{sum(found.skipped.values()):,} skipped, {found.waiting:,} remaining; "
        f"removed {counted(ended.dead_letters_removed, 'dead letter')} from the DLQ."
    )
    for outcome, count in found.skipped.items():
        say(f"skipped {count:,}: {_OUTCOME_TEXTS[outcome.value]}")
    if ended.locked:
        remaining = counted(ended.locked, "remaining email")
        rows = "its row" if ended.locked == 1 else "their rows"
        say(f"{remaining} cannot be replayed now: another transaction has locked {rows}.")
    if found.waiting:
        say(f"To continue: dispatcher dlq replay --resume {found.replay_id}")
    if ended.dead_letters_fault:
        say(f"The dead letters are still on the DLQ: {ended.dead_letters_fault}")
        say("To remove them later: dispatcher dlq reconcile --fix")
    if found.replayed < found.total or ended.dead_letters_fault:
        return Exit.PARTLY if found.replayed else Exit.FAILED
    return Exit.DONE


def _repair(names: tuple[str, ...], body: Path | None, reason: str | None, actor: str | None) -> int:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.ops.acts import Act
    from dispatcher.ops.poison import repair_poison

    _refuse(len(names) != 1 or not is_poison_id(names[0]), "--body needs the id of exactly one poison message, p-….")
    if body is None:
        raise click.UsageError(
            "A poison message points to no email, so there is nothing to send again. To publish a corrected message in "
            "its place, write that message to a file and add --body FILE."
        )
    _refuse(not reason, "--reason is missing. Give a few words for the audit log.")
    act, repaired = Act.of(actor, reason or ""), body.read_bytes()
    settings = load_settings("database_url", "amqp_url")

    async def repair(session: AsyncSession, dlq: DeadLetterQueue) -> int:
        publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher dlq", ca_file=settings.ca_file)
        try:
            return await repair_poison(session, dlq, publisher, settings.queue, names[0], repaired, act)
        finally:
            await publisher.close()

    removed = run_with_dlq("dlq", repair, settings)
    say(f"Published to {settings.queue}; removed {counted(removed, 'poison message')} from the DLQ.")
    return Exit.DONE


@click.command("replays")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="N",
    default=20,
    show_default=True,
    help="List at most this many replays.",
)
@json_option()
def replays(limit: int, as_json: bool) -> int:
    """List replays, newest first: state, progress, operator, reason.

    \b
    Examples:
      dispatcher dlq replays
      dispatcher dlq replays --json | jq '.replays[] | select(.state == "interrupted")'

    The state `interrupted` means that some emails are not replayed yet, but no process runs the replay: for example,
    because the process was killed, or because another transaction had locked the remaining emails. `dispatcher dlq
    replay --resume REPLAY` continues the replay.
    """
    from dispatcher.store.replays import list_replays

    found = run_with_session("dlq", partial(list_replays, limit=limit))
    if as_json:
        print_json({"replays": [_replay_json(each) for each in found]})
        return Exit.DONE
    counted_columns = ("emails", "replayed", "skipped", "remaining")
    table = Table("replay", "state", *counted_columns, "rate", "operator", "reason", "selection", right=[2, 3, 4, 5])
    for each in found:
        filters = ", ".join(f"{name}={value}" for name, value in each.selection.items()) or "all"
        counts = (each.total, each.replayed, sum(each.skipped.values()), each.waiting)
        rate = f"{each.per_second:g}/s" if each.per_second else None
        texts = (rate, each.actor, each.reason, f"{each.source}: {filters}")
        table.add(each.replay_id, _state(each), *(f"{count:,}" for count in counts), *texts)
    if found:
        table.show()
    else:
        say("There are no replays.")
    return Exit.DONE


@click.command("stop")
@click.argument("replay_id", metavar="REPLAY", type=int)
@audit_options()
def stop(replay_id: int, act: Act) -> int:
    """Stop a running replay. Emails that the replay has already made pending are still sent.

    \b
    Example:
      dispatcher dlq stop 7 --reason "the provider throttles us"

    `dispatcher dlq replay --resume REPLAY` continues the replay.
    """
    from dispatcher.ops.replaying import stop as stop_replay

    found = run_with_session("dlq", partial(stop_replay, replay_id=replay_id, act=act))
    if found is None:
        raise _unknown(replay_id)
    counts = f"{found.replayed:,} of {found.total:,} replayed, {found.waiting:,} remaining"
    say(f"Replay {replay_id} is {found.state}: {counts}.")
    return Exit.DONE


def _replay_json(found: Replay) -> dict[str, Any]:
    """The JSON object that `--json` prints for a replay. Scripts rely on its form."""
    return {**asdict(found), "state": _state(found), "total": found.total, "replayed": found.replayed}


def _state(found: Replay) -> str:
    """The replay's state; `interrupted` if the database says `running`, but no process runs it."""
    return "interrupted" if found.state.value == "running" and not found.is_active else found.state.value
