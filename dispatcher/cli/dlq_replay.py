"""`dispatcher dlq replay`: send failed emails again, each once, at a limited rate."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dispatcher.actions.dlq import OUTCOMES, CreateReplay, ResumeReplay, select
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.face import option, read_options
from dispatcher.cli.options import ACTOR, confirm, json_option, progress
from dispatcher.cli.output import counted, examples, print_json, say
from dispatcher.cli.sessions import RunOnSession, one_session, open_dlq, run_with_dlq
from dispatcher.domain.failures import ItemOutcome, ReplayState, Selection
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.domain.text import DEFAULT_TENANT
from dispatcher.errors import ServerUnavailable

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.domain.failures import DeadGroup, OverlappingReplay, Replay
    from dispatcher.ops.acts import Act
    from dispatcher.ops.replaying import Preview
    from dispatcher.store.connections import AsyncSession

_SKIPPED_SHOWN: Final = 1000
_CAUSES_SHOWN: Final = 10
_FIELDS: Final = [option(CreateReplay, each) for name, each in CreateReplay.fields.items() if name != "email_ids"]
_NO_REASON: Final = "--reason is missing. Give a few words for the audit log."


@click.command("replay", params=_FIELDS)
@click.argument("names", metavar="[ID|KEY...|p-…]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Select every failed email, and with --held every held email.")
@click.option("--from-queue", is_flag=True, help="Select the emails whose dead letters are on the DLQ.")
@click.option("--actor", metavar="NAME", help=ACTOR)
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
    everything: bool,
    from_queue: bool,
    actor: str | None,
    dry_run: bool,
    yes: bool,
    resume: int | None,
    body: Path | None,
    as_json: bool,
    **given: Any,
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

    Each email becomes pending and due in its own transaction, at the rate given by --rate (0: no limit). The email gets
    all its attempts again, and a monitor removes its dead letter from the DLQ. Ctrl-C, a crash and `dispatcher dlq
    stop` lose nothing: --resume continues the replay.

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
    from dispatcher.ops.replaying import create

    if body or any(map(is_poison_id, names)):
        return _repair(names, body, given["reason"], actor)
    if is_unlimited := given["per_second"] == "0":
        given["per_second"] = None
    asked = read_options(CreateReplay, given)
    selection = asked.selected()
    if resume is not None:
        _refuse(names or selection.filters or from_queue or everything, "--resume takes no ids and no filter.")
        again = ResumeReplay(
            replay_id=resume,
            per_second=0.0 if is_unlimited else asked.per_second if given["per_second"] else None,
            force=asked.force,
            reason=asked.reason or "dispatcher dlq replay --resume",
        )
        return _resume(again, actor, as_json=as_json)
    _refuse(names and set(selection.filters) - {"tenant_id"}, "Give ids and message keys, or a filter, not both.")
    _refuse(names and from_queue, "Give ids and message keys, or --from-queue, but not both.")
    _refuse(
        not (names or selection.filters or from_queue or everything),
        "No emails are selected. Give ids or message keys, a filter such as --error-type, --from-queue, or --all.",
    )
    _refuse(not dry_run and not asked.reason, f"{_NO_REASON} (--dry-run needs no reason.)")
    act = None if dry_run else Act.of(actor, asked.reason)
    settings = load_settings("database_url", *(("amqp_url",) if from_queue else ()))
    with one_session("dlq", settings) as on_session:
        selected = on_session(partial(_find, settings, selection, names, from_queue, asked.include_held))
        _show(selected, as_json=as_json and dry_run, force=asked.force)
        if act is None or not (selected.preview.total or selected.others):
            return Exit.DONE
        wanted, chosen = selected.preview.replayable, selected.preview.total + selected.others
        others = "" if wanted == chosen else f" of the {chosen:,} selected, and skip the others"
        confirm(f"Replay {counted(wanted, 'email')}{others}?", yes=yes)
        made = on_session(
            partial(
                create,
                selection=selected.selection,
                act=act,
                include_held=asked.include_held,
                per_second=None if is_unlimited else asked.per_second,
                source="queue" if from_queue else "ids" if names else "filter",
                force=asked.force,
            )
        )
        return _run(on_session, made, as_json=as_json)


def _refuse(is_mistake: object, text: str) -> None:
    if is_mistake:
        raise click.UsageError(text)


def _resume(asked: ResumeReplay, actor: str | None, *, as_json: bool) -> int:
    from dispatcher.actions.runner import Face, Who, run
    from dispatcher.store.replays import find_overlaps

    with one_session("dlq", load_settings("database_url")) as on_session:
        found = on_session(lambda session: run(session, asked, Who(Face.COMMAND, actor)))
        overlapping = on_session(lambda session: find_overlaps(session, email_ids=[], replay_id=asked.replay_id))
        _say_overlaps(overlapping, force=asked.force)
        return _run(on_session, found, as_json=as_json)


class _Replayable(NamedTuple):
    """The emails that a replay selects.

    Attributes:
        selection: Selects the emails by their ids, so that an email that fails later is not included.
        causes: The largest groups of the emails by cause.
        others: How many of the ids on the command line belong to emails that are not failed or held.
        overlapping: Running replays that include some of the same emails.
    """

    selection: Selection
    preview: Preview
    causes: list[DeadGroup]
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
    from dispatcher.ops.names import find_ids
    from dispatcher.ops.replaying import overlaps, preview
    from dispatcher.store.failures import MOST_GROUPED, find_dead_ids, group_dead

    if names:  # discarded or not
        found_ids = await find_ids(session, selection.parameters["tenant_id"] or DEFAULT_TENANT, names)
        selection = select(email_ids=found_ids, discarded=None)
    if from_queue:
        from dispatcher.monitor.dead_letters import list_dead_letter_ids

        async with open_dlq(settings, "dlq") as dlq:
            selection = selection.of(await list_dead_letter_ids(session, dlq))
    given = selection.email_ids
    ids = await find_dead_ids(session, selection) if given is None else given
    found = await preview(session, selection, include_held=include_held)
    others = 0 if given is None or selection.filters else len(set(given)) - found.total
    causes = await group_dead(session, selection, "cause", limit=MOST_GROUPED, groups=_CAUSES_SHOWN)
    return _Replayable(selection.of(ids), found, causes, others, await overlaps(session, selection))


def _show(found: _Replayable, *, as_json: bool, force: bool) -> None:
    _, preview, causes, others, overlapping = found
    if as_json:
        document = {"emails": preview.counts, "samples": preview.samples, "not_failed_or_held": others}
        print_json({**document, "causes": causes, "overlaps": [asdict(each) for each in overlapping]})
        return
    for outcome, count in preview.counts.items():
        about = f"{counted(count, 'email')}: {OUTCOMES[ItemOutcome(outcome)]}. For example:"
        say(about + examples(preview.samples[outcome]))
    for group in causes:
        again = f" {group.fails_again}" if group.fails_again else ""
        say(f"  {group.emails:,} of {group.value.rstrip('.')}, such as {group.sample_key}.{again}")
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
    from dispatcher.ops.replaying import Ended, run
    from dispatcher.store.replays import list_skipped

    rate = f" at {begun.per_second:g}/s" if begun.per_second else ""
    ended = Ended(begun, 0)
    if begun.state is not ReplayState.DONE:
        say(f"Replay {begun.id}: {counted(begun.waiting, 'selected email')}{rate}.")
        try:
            with progress("replaying", total=begun.total, done=begun.total - begun.waiting) as advance:
                ended = on_session(lambda session: run(session, begun.id, on_email=lambda *_: advance()))
        except (KeyboardInterrupt, ServerUnavailable) as error:
            how = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Connection lost"
            say(f"{how}; no email is lost. To continue: dispatcher dlq replay --resume {begun.id}")
            raise
    found, locked = ended.replay, ended.locked
    if as_json:
        skipped = on_session(lambda session: list_skipped(session, replay_id=begun.id, limit=_SKIPPED_SHOWN))
        document = {**asdict(found), "replayed": found.replayed, "locked": locked}
        print_json({**document, "skipped_emails": {str(email_id): why for email_id, why in skipped.items()}})
    say(f"{found.describe()}. A monitor removes the dead letters of replayed emails from the DLQ.")
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


def replay_ids(settings: Settings, email_ids: tuple[UUID, ...], act: Act, per_second: float, *, as_json: bool) -> int:
    from dispatcher.ops.replaying import create

    with one_session("dlq", settings) as on_session:
        selection = select(email_ids=email_ids)
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
    _refuse(not reason, _NO_REASON)
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
