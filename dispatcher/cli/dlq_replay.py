"""`dispatcher dlq replay`, `replays` and `stop`: failed emails are sent again, once each, at a pace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dispatcher.cli.acting import acting, at_dlq, confirm, in_session, json_option, opened_dlq, progress
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.selecting import check_choice, named, selecting
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
    from dispatcher.store.replays import ItemOutcome, Meeting, Replay

_SKIPPED_SHOWN: Final = 1000
_WORDS: Final = {
    "replayed": "to be sent again",
    "already_sent": "already sent",
    "under_way": "on their way already",
    "discarded": "discarded; `dispatcher dlq replay ID` sends one again nevertheless",
    "may_have_arrived": "may have arrived: held, or once without an answer; --held replays them, too",
    "content_pruned": "cannot be sent again: their content was deleted",
    "unknown": "no such email",
}


@click.command("replay")
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@selecting()
@click.option("--all", "everything", is_flag=True, help="Everything that failed, without a filter.")
@click.option("--from-queue", is_flag=True, help="Those whose dead letters are on the DLQ; stale ones do not count.")
@click.option(
    "--held", "include_held", is_flag=True, help="Also what may have arrived: held, or once without an answer."
)
@click.option(
    "--rate", type=click.FloatRange(min=0), help="Emails per second, at least 0.01; 50 if not said, 0 for no limit."
)
@click.option("--force", is_flag=True, help="Keep this pace, even if other replays are sending the same emails.")
@click.option("--reason", metavar="TEXT", help="Why, for the audit: a few words, no addresses. Needed to go on.")
@click.option("--actor", metavar="NAME", help="Who decides; the system's user@host if not said.")
@click.option("--dry-run", is_flag=True, help="Count and name some, and change nothing.")
@click.option("--yes", is_flag=True, help="Go on without asking; needed where there is no terminal.")
@click.option("--resume", type=int, metavar="REPLAY", help="Go on with a replay that was stopped or interrupted.")
@click.option(
    "--body",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The repaired message to publish instead of a poison message p-….",
)
@json_option("One line of JSON: what was done, and what was skipped and why.")
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
    """Send failed emails again, by ids or message keys, by a filter, or as the DLQ names them. What was sent is never
    sent again.

    First tells how many it is about and names some, then asks, or goes on at once with --yes; without a terminal to ask
    on (a script, a pipe) it changes nothing unless there is --yes. Each email becomes
    pending and due in a commit of its own, at the pace of --rate, its attempts counted anew; its dead letter leaves the
    DLQ. Ctrl-C, a crash or `dispatcher dlq stop` lose nothing: --resume goes on where it ended. Two replays of the same
    email send it once. If a running replay has some of the same emails, this one names it before it starts, and the
    two share the slower pace. --force keeps this one's pace.

    \b
    Examples:
      dispatcher dlq replay --error-type server_error --dry-run
      dispatcher dlq replay --error-type server_error --rate 20 --reason "SES is back"
      dispatcher dlq replay order-17-receipt --tenant shop --reason "address corrected at the provider" --yes
      dispatcher dlq replay --resume 7
      dispatcher dlq replay p-3fa9c1d2e0b4 --body repaired.json --reason "key was misspelt"

    Exit codes: 0 all were replayed, or nothing matches; 1 none was; 2 nobody could be asked; 3 some were: the others
    are counted by the reason for which they were skipped, and --json names them.
    """
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replaying import DEFAULT_PER_SECOND, LEAST_PER_SECOND, create

    _refuse(rate and rate < LEAST_PER_SECOND, f"--rate is at least {LEAST_PER_SECOND} emails per second.")
    if body or any(map(is_poison_id, names)):
        return _repair(names, body, reason, actor)
    if resume is not None:
        _refuse(names or selection.filters or from_queue or everything, "--resume takes no ids and no filter.")
        resumed_by = {"actor": actor, "reason": reason, "per_second": rate, "force": force}
        return _run(load_settings("database_url", "amqp_url"), resume, as_json=as_json, resumed_by=resumed_by)
    ways = "ids or message keys, a filter such as --error-type, --from-queue, or --all"
    check_choice(names, selection, ways, is_chosen=from_queue or everything)
    _refuse(names and from_queue, "Give ids and message keys, or --from-queue, not both.")
    _refuse(not dry_run and not reason, "A --reason is needed: a few words for the audit. (--dry-run needs none.)")
    act = None if dry_run else Act.of(actor, reason or "")
    settings = load_settings("database_url", "amqp_url")
    found = in_session("dlq", partial(_find, settings, selection, names, from_queue, include_held), settings)
    _show(found, as_json=as_json and dry_run, force=force)
    if act is None or not (found.preview.total or found.others):
        return Exit.DONE
    confirm(f"Replay {found.preview.replayable:,}?", yes=yes)
    made = in_session(
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
    return _run(settings, made.replay_id, as_json=as_json)


def _refuse(mistaken: object, words: str) -> None:
    if mistaken:
        raise click.UsageError(words)


class _Replayable(NamedTuple):
    """What a replay is about.

    Attributes:
        selection: With the ids of now: emails that fail before the operator confirms are not replayed.
        others: Ids that were given and are not failed or held.
        met: Running replays that have some of the same emails.
    """

    selection: Selection
    preview: Preview
    others: int
    met: list[Meeting]


async def _find(
    settings: Settings,
    selection: Selection,
    names: tuple[str, ...],
    from_queue: bool,
    include_held: bool,
    session: AsyncSession,
) -> _Replayable:
    from dispatcher.ops.letters import list_letter_ids
    from dispatcher.ops.replaying import meetings, preview
    from dispatcher.store.failures import find_dead_ids

    selection = await named(session, selection, names)
    if from_queue:
        async with opened_dlq(settings, "dlq") as dlq:
            selection = replace(selection, email_ids=tuple(await list_letter_ids(session, dlq)))
    given = selection.email_ids
    ids = tuple(await find_dead_ids(session, selection)) if given is None else given
    found = await preview(session, selection, include_held=include_held)
    others = 0 if given is None or selection.filters else len(set(given)) - found.total
    return _Replayable(replace(selection, email_ids=ids), found, others, await meetings(session, selection))


def _show(found: _Replayable, *, as_json: bool, force: bool) -> None:
    _, preview, others, met = found
    if as_json:
        told = {"emails": preview.counts, "samples": preview.samples, "not_failed_or_held": others}
        print_json({**told, "overlaps": [asdict(meeting) for meeting in met]})
        return
    for outcome, count in preview.counts.items():
        say(f"{count:,} {_WORDS[outcome.value]}, such as {', '.join(map(str, preview.samples[outcome]))}")
    if others:
        say(f"{others:,} neither failed nor held; they will be skipped.")
    if not preview.total and not others:
        say("No failed or held email matches.")
    _say_meetings(met, force=force)


def _say_meetings(met: list[Meeting], *, force: bool) -> None:
    for each in met:
        pace = f"{each.per_second:g}/s" if each.per_second else "no limit"
        count = f"{each.emails:,} of the same emails"
        say(f"Replay {each.replay_id} of {each.actor} ({each.reason}; {pace}) is under way, with {count} still to do.")
    if met:
        say(
            "This replay keeps its own pace."
            if force
            else "They share the slowest of their paces. To keep this replay's own pace, add --force."
        )


def _run(settings: Settings, replay_id: int, *, as_json: bool, resumed_by: Mapping[str, Any] | None = None) -> int:
    """Runs a replay to its end, or as far as it gets.

    Args:
        resumed_by: The options of `--resume`; None leaves the replay's own value.
    """
    try:
        ended, skipped = at_dlq("dlq", partial(_run_replay, replay_id, resumed_by), settings)
    except (KeyboardInterrupt, ServerUnavailable) as error:
        how = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Cut off"
        say(f"{how}; nothing is lost. `dispatcher dlq replay --resume {replay_id}` goes on.")
        raise
    if as_json:
        told = {**_replay_json(ended.replay), "locked": ended.locked, "dead_letters_removed": ended.letters_removed}
        print_json({**told, "skipped_emails": {str(email_id): why for email_id, why in skipped}})
    return _report(ended)


async def _run_replay(
    replay_id: int, resumed_by: Mapping[str, Any] | None, session: AsyncSession, dlq: DeadLetterQueue
) -> tuple[Ended, list[tuple[UUID, ItemOutcome]]]:
    from dispatcher.ops.acts import this_user
    from dispatcher.ops.replaying import find, meetings_of, resume, run
    from dispatcher.store.replays import list_skipped

    if resumed_by:
        await resume(session, replay_id, **{**resumed_by, "actor": resumed_by["actor"] or this_user()})
        _say_meetings(await meetings_of(session, replay_id), force=resumed_by["force"])
    begun = await find(session, replay_id)
    if begun is None:
        raise _unknown(replay_id)
    pace = f" at {begun.per_second:g}/s" if begun.per_second else ""
    say(f"Replay {replay_id}: {begun.waiting:,} emails{pace}.")
    with progress("replaying", total=begun.total, done=begun.total - begun.waiting) as advance:
        ended = await run(session, dlq, replay_id, on_email=lambda _email_id, _outcome: advance())
    return ended, await list_skipped(session, replay_id, limit=_SKIPPED_SHOWN)


def _unknown(replay_id: int) -> DispatcherError:
    return DispatcherError(f"There is no replay {replay_id}.", remedy="`dispatcher dlq replays` lists them.")


def _report(ended: Ended) -> int:
    found = ended.replay
    say(
        f"Replay {found.replay_id} is {_state(found)}: {found.replayed:,} of {found.total:,} replayed, "
        f"{sum(found.skipped.values()):,} skipped, {found.waiting:,} left; "
        f"{ended.letters_removed:,} dead letters left the DLQ."
    )
    for outcome, count in found.skipped.items():
        say(f"skipped {count:,}: {_WORDS[outcome.value]}")
    if ended.locked:
        say(f"{ended.locked:,} of them wait for the end of somebody's transaction, which holds their rows.")
    if found.waiting:
        say(f"`dispatcher dlq replay --resume {found.replay_id}` goes on.")
    if ended.letters_fault:
        say(f"Their dead letters are still on the DLQ: {ended.letters_fault} `dispatcher dlq reconcile --fix` helps.")
    if found.replayed < found.total or ended.letters_fault:
        return Exit.PARTLY if found.replayed else Exit.FAILED
    return Exit.DONE


def _repair(names: tuple[str, ...], body: Path | None, reason: str | None, actor: str | None) -> int:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.ops.acts import Act
    from dispatcher.ops.poison import repair_poison

    _refuse(len(names) != 1 or not is_poison_id(names[0]), "--body repairs one poison message: name it, p-….")
    if body is None:
        raise click.UsageError("A poison message points to no email: repair it in a file and give that by --body.")
    _refuse(not reason, "A --reason is needed: a few words for the audit.")
    act, repaired = Act.of(actor, reason or ""), body.read_bytes()
    settings = load_settings("database_url", "amqp_url")

    async def repair(session: AsyncSession, dlq: DeadLetterQueue) -> int:
        publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher dlq", ca_file=settings.ca_file)
        try:
            return await repair_poison(session, dlq, publisher, settings.queue, names[0], repaired, act)
        finally:
            await publisher.close()

    removed = at_dlq("dlq", repair, settings)
    say(f"Published to {settings.queue}; {removed} poison message{'' if removed == 1 else 's'} left the DLQ.")
    return Exit.DONE


@click.command("replays")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@json_option()
def replays(limit: int, as_json: bool) -> int:
    """List replays, the latest first: who, why, and how far they are.

    `interrupted` is one whose command ended half-way, be it because somebody's transaction holds the emails that are
    left: `dispatcher dlq replay --resume REPLAY` goes on.

    \b
    Example:
      dispatcher dlq replays
    """
    from dispatcher.store.replays import list_replays

    found = in_session("dlq", partial(list_replays, limit=limit))
    if as_json:
        print_json({"replays": [_replay_json(each) for each in found]})
        return Exit.DONE
    columns = ("replay", "state", "emails", "replayed", "skipped", "waiting", "rate", "by", "reason", "what")
    table = Table(*columns, right=[2, 3, 4, 5])
    for each in found:
        what = ", ".join(f"{name}={value}" for name, value in each.selection.items()) or "all"
        counts = (each.total, each.replayed, sum(each.skipped.values()), each.waiting)
        rate = f"{each.per_second:g}/s" if each.per_second else None
        words = (rate, each.actor, each.reason, f"{each.source}: {what}")
        table.add(each.replay_id, _state(each), *(f"{count:,}" for count in counts), *words)
    if found:
        table.show()
    else:
        say("There was no replay yet.")
    return Exit.DONE


@click.command("stop")
@click.argument("replay_id", metavar="REPLAY", type=int)
@acting()
def stop(replay_id: int, act: Act) -> int:
    """Let a replay go no further. What it replayed stays replayed; `dlq replay --resume` goes on later.

    \b
    Example:
      dispatcher dlq stop 7 --reason "the provider throttles us"
    """
    from dispatcher.ops.replaying import stop as stop_replay

    found = in_session("dlq", partial(stop_replay, replay_id=replay_id, act=act))
    if found is None:
        raise _unknown(replay_id)
    say(f"Replay {replay_id} is {found.state}: {found.replayed:,} of {found.total:,} replayed, {found.waiting:,} left.")
    return Exit.DONE


def _replay_json(found: Replay) -> dict[str, Any]:
    """A replay as scripts rely on it."""
    return {**asdict(found), "state": _state(found), "total": found.total, "replayed": found.replayed}


def _state(found: Replay) -> str:
    """Its state; `interrupted` if it should go on and nobody is at it."""
    return "interrupted" if found.state.value == "running" and not found.is_active else found.state.value
