"""`dispatcher dlq replay`, `replays` and `stop`: send failed emails again, each once, at a limited rate."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dispatcher.actions.dlq import OUTCOMES, DeadFilter
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import filter_options, require_names_or_filter, select_by_names
from dispatcher.cli.options import Number, audit_options, confirm, json_option, progress
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import RunOnSession, one_session, open_dlq, run_with_dlq, run_with_session
from dispatcher.domain.failures import DEFAULT_PER_SECOND, MIN_PER_SECOND, ItemOutcome, ReplayState, Selection
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import ServerUnavailable

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.domain.failures import OverlappingReplay, Replay
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replaying import Preview
    from dispatcher.store.connections import AsyncSession

_SKIPPED_SHOWN: Final = 1000


@click.command("replay")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@filter_options(DeadFilter)
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
    asked: DeadFilter[Any],
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
    attempts again, and a monitor removes its dead letter from the DLQ. Ctrl-C, a crash and `dispatcher dlq stop` lose
    nothing: --resume continues the replay.

    If two replays select the same email, the email is sent once. Before the replay starts, the command lists the
    running replays that include some of the same emails. The new replay and the listed replays share one rate, the
    lowest of all their rates. With --force, the new replay keeps its own rate.

    A poison message (p-…) points to no email, so there is no email to send. With --body, the command publishes a
    corrected message in its place.

    Exit codes: 0 all selected emails were replayed, or no email matches; 1 emails match, but none was replayed; 2
    confirmation needs a terminal or --yes; 3 only some were replayed. The command prints how many emails it skipped for
    each reason; --json lists them.
    """
    from dispatcher.ops import replaying
    from dispatcher.ops.acts import Act, this_user
    from dispatcher.store.replays import find_overlaps

    _refuse(rate and rate < MIN_PER_SECOND, f"--rate must be at least {MIN_PER_SECOND} emails per second, or 0.")
    if body or any(map(is_poison_id, names)):
        return _repair(names, body, reason, actor)
    selection = asked.selected()
    if resume is not None:
        _refuse(names or selection.filters or from_queue or everything, "--resume takes no ids and no filter.")
        with one_session("dlq", load_settings("database_url")) as on_session:
            who = actor or this_user()
            found = on_session(
                lambda session: replaying.resume(
                    session, resume, actor=who, reason=reason, per_second=rate, force=force
                )
            )
            overlapping = on_session(lambda session: find_overlaps(session, email_ids=[], replay_id=resume))
            _say_overlaps(overlapping, force=force)
            return _run(on_session, found, as_json=as_json)
    ways = "ids or message keys, a filter such as --error-type, --from-queue, or --all"
    require_names_or_filter(names, selection.filters, ways, is_chosen=from_queue or everything)
    _refuse(names and from_queue, "Give ids and message keys, or --from-queue, but not both.")
    _refuse(
        not dry_run and not reason,
        "--reason is missing. Give a few words for the audit log. (--dry-run needs no reason.)",
    )
    act = None if dry_run else Act.of(actor, reason or "")
    settings = load_settings("database_url", *(("amqp_url",) if from_queue else ()))
    with one_session("dlq", settings) as on_session:
        selected = on_session(partial(_find, settings, selection, names, from_queue, include_held))
        _show(selected, as_json=as_json and dry_run, force=force)
        if act is None or not (selected.preview.total or selected.others):
            return Exit.DONE
        confirm(f"Replay {counted(selected.preview.replayable, 'email')}?", yes=yes)
        made = on_session(
            partial(
                replaying.create,
                selection=selected.selection,
                act=act,
                include_held=include_held,
                per_second=DEFAULT_PER_SECOND if rate is None else rate or None,
                source="queue" if from_queue else "ids" if names else "filter",
                force=force,
            )
        )
        return _run(on_session, made, as_json=as_json)


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
    from dispatcher.ops.replaying import overlaps, preview
    from dispatcher.store.failures import find_dead_ids

    selection = await select_by_names(session, selection, names)
    if from_queue:
        from dispatcher.monitor.dead_letters import list_dead_letter_ids

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
        say(f"{counted(count, 'email')}: {OUTCOMES[ItemOutcome(outcome)]}. For example {examples}")
    if others:
        say(f"{counted(others, 'email')}: not failed or held. The replay skips them.")
    if not preview.total and not others:
        say("No failed or held email matches.")
    _say_overlaps(overlapping, force=force)


def _say_overlaps(overlapping: list[OverlappingReplay], *, force: bool) -> None:
    for each in overlapping:
        rate = f"{each.per_second:g}/s" if each.per_second else "no rate limit"
        running = f"Replay {each.id} by {each.actor} ({each.reason}; {rate}) is running"
        say(f"{running} and still has to replay {each.emails:,} of these emails.")
    if overlapping:
        say(
            "This replay keeps its own rate."
            if force
            else "All these replays share one rate, the lowest of their rates. To keep your own rate, add --force."
        )


def _run(on_session: RunOnSession, begun: Replay, *, as_json: bool) -> int:
    """Runs a replay until it ends, is stopped, or is interrupted; returns the exit code."""
    from dispatcher.ops.replaying import Ended, run
    from dispatcher.store.replays import list_skipped

    rate = f" at {begun.per_second:g}/s" if begun.per_second else ""
    ended = Ended(begun, 0)
    if begun.state is not ReplayState.DONE:
        say(f"Replay {begun.id}: {counted(begun.waiting, 'email')}{rate}.")
        try:
            with progress("replaying", total=begun.total, done=begun.total - begun.waiting) as advance:
                ended = on_session(lambda session: run(session, begun.id, on_email=lambda *_: advance()))
        except (KeyboardInterrupt, ServerUnavailable) as error:
            how = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Connection lost"
            say(f"{how}; no email is lost. To continue: dispatcher dlq replay --resume {begun.id}")
            raise
    if as_json:
        skipped = on_session(lambda session: list_skipped(session, replay_id=begun.id, limit=_SKIPPED_SHOWN))
        document = {**asdict(ended.replay), "replayed": ended.replay.replayed, "locked": ended.locked}
        print_json({**document, "skipped_emails": {str(email_id): why for email_id, why in skipped.items()}})
    return _report(ended.replay, ended.locked)


def _report(found: Replay, locked: int) -> int:
    say(
        f"Replay {found.id} is {found.state}: {found.replayed:,} of {found.total:,} replayed, "
        f"{sum(found.skipped.values()):,} skipped, {found.waiting:,} remaining. A monitor removes the dead letters of "
        "replayed emails from the DLQ."
    )
    for outcome, count in found.skipped.items():
        say(f"skipped {count:,}: {OUTCOMES[ItemOutcome(outcome)]}")
    if locked:
        rows = "its row" if locked == 1 else "their rows"
        say(f"{counted(locked, 'remaining email')} cannot be replayed now: another transaction has locked {rows}.")
    if found.waiting:
        say(f"To continue: dispatcher dlq replay --resume {found.id}")
    if found.replayed < found.total:
        return Exit.PARTLY if found.replayed else Exit.FAILED
    return Exit.DONE


def replay_ids(settings: Settings, email_ids: tuple[UUID, ...], act: Act, rate: float | None, *, as_json: bool) -> int:
    """Replays these emails, and returns the exit code."""
    from dispatcher.ops.replaying import create

    with one_session("dlq", settings) as on_session:
        selection, per_second = Selection(email_ids=email_ids), rate or DEFAULT_PER_SECOND
        made = on_session(lambda session: create(session, selection, act, per_second=per_second, source="ids"))
        return _run(on_session, made, as_json=as_json)


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
    counts = f"{found.replayed:,} of {found.total:,} replayed, {found.waiting:,} remaining"
    say(f"Replay {replay_id} is {found.state}: {counts}.")
    return Exit.DONE
