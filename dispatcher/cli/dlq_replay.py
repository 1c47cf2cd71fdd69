"""`dispatcher dlq replay`: failed emails are sent again, once each, at a pace."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

import click

from dispatcher.cli.acting import agreed, is_terminal, opened_dlq, opened_session
from dispatcher.cli.dlq_replays import replay_json, state_word
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import console_for, print_json, say
from dispatcher.cli.selecting import named, refuse_both, selecting
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import DispatcherError, ServerUnavailable

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replays import Ended, Preview
    from dispatcher.store.failures import Selection
    from dispatcher.store.replays import ItemOutcome, Meeting, Replay

    OnEmail = Callable[[UUID, ItemOutcome], None]

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
@selecting
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
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: what was done, and what was skipped and why.")
def command(
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
    from dispatcher.ops.replays import LEAST_PER_SECOND

    _refuse(rate and rate < LEAST_PER_SECOND, f"--rate is at least {LEAST_PER_SECOND} emails per second.")
    if body or any(map(is_poison_id, names)):
        return _repair(names, body, reason, actor)
    if resume is not None:
        _refuse(names or selection.filters or from_queue or everything, "--resume takes no ids and no filter.")
        settings = load_settings("database_url", "amqp_url")
        return _run(settings, resume, as_json=as_json, resumed_by=_Resumption(actor, reason, rate, force))
    refuse_both(names, selection.filters)
    _refuse(names and from_queue, "Give ids and message keys, or --from-queue, not both.")
    _refuse(
        not (names or selection.filters or from_queue or everything),
        "Which ones? Give ids or message keys, a filter such as --error-type, --from-queue, or --all.",
    )
    _refuse(not dry_run and not reason, "A --reason is needed: a few words for the audit. (--dry-run needs none.)")
    act = None if dry_run else Act.of(actor, reason or "")
    settings = load_settings("database_url", "amqp_url")
    selection, email_ids, found, met = asyncio.run(_preview(settings, selection, names, from_queue, include_held))
    _show_preview(found, met, selection, as_json=as_json and dry_run, force=force)
    if act is None or not (found.total or _others(found, selection)):
        return Exit.DONE
    if not yes and not agreed(f"Replay {found.replayable:,}?"):
        return Exit.DONE if is_terminal() else Exit.USAGE
    source = "queue" if from_queue else "ids" if names else "filter"
    per_second = 50.0 if rate is None else rate or None
    settled = replace(selection, email_ids=email_ids)
    made = asyncio.run(_create(settings, settled, act, include_held, per_second, source, force))
    return _run(settings, made.replay_id, as_json=as_json)


def _refuse(mistaken: object, words: str) -> None:
    if mistaken:
        raise click.UsageError(words)


async def _preview(
    settings: Settings, selection: Selection, names: tuple[str, ...], from_queue: bool, include_held: bool
) -> tuple[Selection, tuple[UUID, ...], Preview, list[Meeting]]:
    """The selection, and its emails now: emails that fail before the operator confirms are not replayed."""
    from dispatcher.ops.letters import list_letter_ids
    from dispatcher.ops.replays import meetings, preview
    from dispatcher.store.failures import find_dead_ids

    async with opened_session(settings, "dlq") as session:
        selection = await named(session, selection, names)
        if from_queue:
            async with opened_dlq(settings, "dlq") as dlq:
                selection = replace(selection, email_ids=tuple(await list_letter_ids(session, dlq)))
        email_ids = selection.email_ids
        if email_ids is None:
            email_ids = tuple(await find_dead_ids(session, selection))
        found = await preview(session, selection, include_held=include_held)
        return selection, email_ids, found, await meetings(session, selection)


def _show_preview(found: Preview, met: list[Meeting], selection: Selection, *, as_json: bool, force: bool) -> None:
    others = _others(found, selection)
    if as_json:
        told = {"emails": found.counts, "samples": found.samples, "not_failed_or_held": others}
        print_json({**told, "meets": [asdict(meeting) for meeting in met]})
        return
    for outcome, count in found.counts.items():
        say(f"{count:,} {_WORDS[outcome.value]}, such as {', '.join(map(str, found.samples[outcome]))}")
    if others:
        say(f"{others:,} neither failed nor held; they will be skipped.")
    if not found.total and not others:
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


def _others(found: Preview, selection: Selection) -> int:
    """Ids that were given and are not failed or held."""
    if selection.email_ids is None or selection.filters:
        return 0
    return len(set(selection.email_ids)) - found.total


async def _create(
    settings: Settings,
    selection: Selection,
    act: Act,
    include_held: bool,
    per_second: float | None,
    source: str | None,
    force: bool,
) -> Replay:
    from dispatcher.ops.replays import create

    async with opened_session(settings, "dlq") as session:
        return await create(
            session,
            selection,
            act,
            include_held=include_held,
            per_second=per_second,
            source=source,
            force=force,
        )


class _Resumption(NamedTuple):
    """The options of `--resume`; None leaves the replay's own value."""

    actor: str | None
    reason: str | None
    rate: float | None
    force: bool


def _run(
    settings: Settings,
    replay_id: int,
    *,
    as_json: bool,
    resumed_by: _Resumption | None = None,
) -> int:
    try:
        ended, skipped = asyncio.run(_run_replay(settings, replay_id, resumed_by))
    except KeyboardInterrupt:
        say(f"Interrupted; nothing is lost. `dispatcher dlq replay --resume {replay_id}` goes on.")
        raise
    except ServerUnavailable:
        say(f"Cut off; nothing is lost. `dispatcher dlq replay --resume {replay_id}` goes on.")
        raise
    if as_json:
        told = {**replay_json(ended.replay), "locked": ended.locked, "dead_letters_removed": ended.letters_removed}
        print_json({**told, "skipped_emails": {str(email_id): why for email_id, why in skipped}})
    return _tell(ended)


async def _run_replay(
    settings: Settings, replay_id: int, resumed_by: _Resumption | None
) -> tuple[Ended, list[tuple[UUID, ItemOutcome]]]:
    from dispatcher.ops.acts import this_user
    from dispatcher.ops.replays import find, meetings_of, resume, run
    from dispatcher.store.replays import list_skipped

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        if resumed_by:
            actor, reason, rate, force = resumed_by
            who = actor or this_user()
            await resume(session, replay_id, actor=who, reason=reason, per_second=rate, force=force)
            _say_meetings(await meetings_of(session, replay_id), force=force)
        begun = await find(session, replay_id)
        if begun is None:
            raise DispatcherError(f"There is no replay {replay_id}.", remedy="`dispatcher dlq replays` lists them.")
        say(f"Replay {replay_id}: {begun.waiting:,} emails" + _pace(begun))
        with _progress(begun) as on_email:
            ended = await run(session, dlq, replay_id, on_email=on_email)
        return ended, await list_skipped(session, replay_id, limit=_SKIPPED_SHOWN)


@contextmanager
def _progress(begun: Replay) -> Iterator[OnEmail]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console_for(sys.stderr), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("replaying", total=begun.total, completed=begun.total - begun.waiting)
        yield lambda _email_id, _outcome: progress.advance(task)


def _tell(ended: Ended) -> int:
    found = ended.replay
    say(
        f"Replay {found.replay_id} is {state_word(found)}: {found.replayed:,} of {found.total:,} replayed, "
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
        say(f"Their dead letters are still on the DLQ: {ended.letters_fault} `dispatcher dlq reconcile --mend` helps.")
    if found.replayed < found.total or ended.letters_fault:
        return Exit.PARTLY if found.replayed else Exit.FAILED
    return Exit.DONE


def _repair(names: tuple[str, ...], body: Path | None, reason: str | None, actor: str | None) -> int:
    from dispatcher.ops.acts import Act

    _refuse(len(names) != 1 or not is_poison_id(names[0]), "--body repairs one poison message: name it, p-….")
    _refuse(body is None, "A poison message points to no email: repair it in a file and give that by --body.")
    _refuse(not reason, "A --reason is needed: a few words for the audit.")
    act = Act.of(actor, reason or "")
    settings = load_settings("database_url", "amqp_url")
    assert body is not None
    removed = asyncio.run(_publish_repaired(settings, names[0], body.read_bytes(), act))
    say(f"Published to {settings.queue}; {removed} poison message{'' if removed == 1 else 's'} left the DLQ.")
    return Exit.DONE


async def _publish_repaired(settings: Settings, name: str, body: bytes, act: Act) -> int:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.ops.poison import repair_poison

    publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher dlq", ca_file=settings.ca_file)
    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        try:
            return await repair_poison(session, dlq, publisher, settings.queue, name, body, act)
        finally:
            await publisher.close()


def _pace(found: Replay) -> str:
    return f" at {found.per_second:g}/s." if found.per_second else "."
