"""A replay sends each email again once, even if it is stopped, killed, or run twice at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from threading import Thread
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.actions.action import read
from dispatcher.actions.dlq import DiscardDead, ListDead, ResumeReplay, StopReplay, select
from dispatcher.actions.runner import Face, Who
from dispatcher.actions.runner import run as act_on
from dispatcher.domain.failures import ItemOutcome, ReplayState
from dispatcher.ops.acts import Act
from dispatcher.ops.replaying import ReplayBusy, create, overlaps, preview, run
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.failures import find_dead_ids, group_dead
from dispatcher.store.named_locks import named_lock
from dispatcher.store.replays import find_pace, get_replay, list_skipped
from tests.ops.dead_emails import Desk, decide
from tests.waiting import DEADLINE_SECONDS

ACT = Act.of("ann@ops-1", "the provider is back")
REJECTED = select(error_type="rejected")


async def stop(session: AsyncSession, replay_id: int) -> None:
    await act_on(session, StopReplay(replay_id=replay_id, reason=ACT.reason), Who(Face.COMMAND, ACT.actor))


async def stop_elsewhere(url: str, replay_id: int) -> None:
    async with await connect_async(url, name="elsewhere") as elsewhere:
        await stop(elsewhere, replay_id)


async def test_each_email_becomes_pending_with_all_attempts(desk: Desk) -> None:
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    chosen = desk.create(3, due_since=long_ago, redelivery_count=4)
    desk.create(2, error_type="server_error")
    replay = await create(desk.session, REJECTED, ACT, per_second=None)

    ended = await run(desk.session, replay.id)

    assert (ended.replay.state, ended.replay.replayed) == (ReplayState.DONE, 3)
    for email_id in chosen:
        row = desk.books.row(email_id)
        assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
        assert (row["redelivery_count"], row["due_since"] > long_ago) == (0, True)
        assert (row["dead_letter_due_at"], row["published_at"]) == (None, None)
        assert row["publish_due_at"] is not None
    assert [(act["action"], act["reason"]) for act in desk.audit()] == [("replay", "the provider is back")]


async def test_one_email_is_replayed_at_once_unless_locked(desk: Desk) -> None:
    (locked,) = desk.create()

    with lock_holder(desk.url, locks=[locked]):
        left = await create(desk.session, select(email_ids=(locked,)), ACT)
    again = await create(desk.session, select(email_ids=(locked,)), ACT)

    assert (left.state, left.waiting) == (ReplayState.INTERRUPTED, 1)
    assert (again.state, again.outcomes) == (ReplayState.DONE, {"replayed": 1})
    assert (await run(desk.session, left.id)).replay.outcomes == {"under_way": 1}


REFUSED = "refused"


async def test_the_emails_of_a_cause_are_found_by_what_their_errors_share(desk: Desk) -> None:
    blocked = desk.create(
        2, error_type=REFUSED, last_error="550 5.7.1 Client host [192.0.2.1] blocked using zen.spamhaus.org"
    )
    blocked += desk.create(
        error_type=REFUSED, last_error="554 5.7.0 Client host [192.0.2.77] blocked using zen.spamhaus.org"
    )
    spam = desk.create(2, error_type=REFUSED, last_error="550 5.7.1 <address>: this looks like spam (id 4711aa)")
    gone = desk.create(error_type="rejected_recipient", last_error="550 5.1.1 no such user", provider="ses")
    desk.create(error_type=REFUSED, last_error="a long line\n" + "without digits " * 40)
    (silent,) = desk.create(error_type="internal_error", provider=None, last_error=None)
    desk.create(error_type="suppressed")

    groups = await group_dead(desk.session, select(), "cause")

    found = [{*await find_dead_ids(desk.session, select(**group.filters))} for group in groups]
    assert [len(each) for each in found] == [3, 2, 1, 1, 1]
    for group in groups:
        read(ListDead, {}, group.filters)  # a link of the page has them
    assert found[:2] == [{*blocked}, {*spam}]
    assert {*gone} in found
    assert [group.fails_again is not None for group in groups] == [{*gone} == each for each in found]
    assert silent in found[2] | found[3] | found[4]


async def test_skipped_emails_are_listed_with_the_reason(desk: Desk) -> None:
    long_ago, books = datetime(2026, 1, 1, tzinfo=UTC), desk.books
    sent, under_way, pruned, held, failed, expired, held_expired, cancelled, waits = desk.create(9)
    unknown = uuid4()
    for email_id, status in ((sent, "sent"), (under_way, "pending"), (cancelled, "cancelled"), (waits, "waiting")):
        books.change(email_id, status=status)
    books.change(held, status="held")
    books.change(expired, expires_at=long_ago)
    books.change(held_expired, status="held", expires_at=long_ago)
    books.connection.execute("delete from email_content where email_id = %s", [pruned])
    ids = select(email_ids=(sent, under_way, pruned, held, failed, expired, held_expired, cancelled, waits, unknown))
    assert (await preview(desk.session, ids, include_held=True)).counts == {
        ItemOutcome.EXPIRED: 2,
        ItemOutcome.CONTENT_PRUNED: 1,
        ItemOutcome.REPLAYED: 2,
    }

    replay = await create(desk.session, ids, ACT, per_second=None)
    ended = await run(desk.session, replay.id)

    assert (await list_skipped(desk.session, replay_id=replay.id, limit=10)) == {
        sent: ItemOutcome.ALREADY_SENT,
        under_way: ItemOutcome.UNDER_WAY,
        waits: ItemOutcome.UNDER_WAY,
        pruned: ItemOutcome.CONTENT_PRUNED,
        held: ItemOutcome.MAY_HAVE_ARRIVED,
        expired: ItemOutcome.EXPIRED,
        held_expired: ItemOutcome.EXPIRED,
        cancelled: ItemOutcome.CANCELLED,
        unknown: ItemOutcome.UNKNOWN,
    }
    assert (ended.replay.replayed, ended.replay.total) == (1, 10)
    assert books.status(failed) == "pending"


async def test_a_discarded_email_is_replayed_only_if_chosen_after_it(desk: Desk) -> None:
    before, since, by_filter, by_queue, also = desk.create(5)
    await decide(desk.session, DiscardDead(reason=ACT.reason), before)
    named = await create(desk.session, select(email_ids=(before, since), discarded=None), ACT, per_second=None)
    filtered = await create(desk.session, select(), ACT, per_second=None)
    queued = await create(desk.session, select(email_ids=(by_queue, also)), ACT, per_second=None, source="queue")
    await decide(desk.session, DiscardDead(reason=ACT.reason), since, by_filter, by_queue, also)

    for replay in (named, filtered, queued):
        await run(desk.session, replay.id)

    skipped = [(await list_skipped(desk.session, replay_id=each.id, limit=10)) for each in (named, filtered, queued)]
    assert skipped == [
        {since: ItemOutcome.DISCARDED},
        dict.fromkeys((since, by_filter, by_queue, also), ItemOutcome.DISCARDED),
        dict.fromkeys((by_queue, also), ItemOutcome.DISCARDED),
    ]
    assert desk.books.status(before) == "pending"
    assert desk.books.statuses() == {"pending": 1, "failed": 4}

    chosen = await create(desk.session, select(discarded=True), ACT, per_second=None)
    assert (await run(desk.session, chosen.id)).replay.replayed == 4
    assert desk.books.statuses() == {"pending": 5}


@pytest.mark.parametrize(
    "columns", [{"status": "held"}, {"was_uncertain": True, "crash_count": 2}], ids=["held", "failed"]
)
async def test_doubtful_emails_need_include_held(desk: Desk, columns: dict[str, Any]) -> None:
    email_ids = desk.create(2, **columns)

    for include_held in (False, True):
        replay = await create(desk.session, select(), ACT, include_held=include_held, per_second=None)
        assert (await run(desk.session, replay.id)).replay.replayed == (2 if include_held else 0)

    assert desk.books.statuses() == {"pending": 2}
    assert {desk.books.row(email_id)["crash_count"] for email_id in email_ids} == {0}


async def test_a_stopped_replay_can_continue(desk: Desk) -> None:
    desk.create(10)
    replay = await create(desk.session, REJECTED, ACT, per_second=None)

    ended = await run(desk.session, replay.id, on_email=stop_after(4, desk.url, replay.id))
    resumed = await act_on(desk.session, ResumeReplay(replay_id=replay.id), Who(Face.COMMAND, "bob"))

    assert (ended.replay.state, ended.replay.replayed, ended.replay.waiting) == (ReplayState.STOPPED, 4, 6)
    assert resumed.state is ReplayState.INTERRUPTED  # no session runs it yet
    assert (await run(desk.session, replay.id)).replay.replayed == 10
    assert desk.books.statuses() == {"pending": 10}
    assert [act["action"] for act in desk.audit()] == ["replay", "stop", "resume"]


def stop_after(count: int, url: str, replay_id: int) -> Callable[[UUID, ItemOutcome], None]:
    """A callback that stops the replay from a separate session after `count` emails, and waits until the replay has
    stopped."""
    seen: list[UUID] = []

    def note(email_id: UUID, _outcome: ItemOutcome) -> None:
        seen.append(email_id)
        if len(seen) == count:
            thread = Thread(target=lambda: asyncio.run(stop_elsewhere(url, replay_id)))
            thread.start()
            thread.join()

    return note


async def test_two_replays_send_each_email_once(desk: Desk) -> None:
    email_ids = desk.create(40)
    first, second = [await create(desk.session, REJECTED, ACT, per_second=None) for _ in range(2)]

    async with await connect_async(desk.url, name="second") as other:
        ended = await asyncio.gather(run(desk.session, first.id), run(other, second.id))

    assert sum(each.replay.replayed for each in ended) == 40
    assert sum(each.replay.outcomes.get(ItemOutcome.UNDER_WAY, 0) for each in ended) == 40
    assert {desk.books.row(email_id)["attempt_base"] for email_id in email_ids} == {3}


async def test_overlapping_replays_share_the_slower_pace(desk: Desk) -> None:
    desk.create(3)
    desk.create(2, error_type="server_error")
    slow = await create(desk.session, REJECTED, ACT, per_second=20)
    met = await overlaps(desk.session, select())

    fast = await create(desk.session, select(), ACT, per_second=50)
    forced = await create(desk.session, select(), ACT, per_second=40, force=True)
    apart = await create(desk.session, select(provider="ses"), ACT, per_second=1)

    async def paces() -> list[float | None]:
        return [await find_pace(desk.session, replay_id=each.id) for each in (slow, fast, forced, apart)]

    assert [(each.id, each.actor, each.per_second, each.emails) for each in met] == [(slow.id, ACT.actor, 20, 3)]
    assert [list(each.paced_with) for each in (slow, fast, forced, apart)] == [[], [slow.id], [], []]
    assert await paces() == [20, 50, 40, 1]  # no session runs any of the replays
    async with AsyncExitStack() as attended:
        for each in (slow, fast, forced, apart):
            other = await attended.enter_async_context(await connect_async(desk.url, name="other"))
            await attended.enter_async_context(named_lock(other, f"replay {each.id}"))
        assert await paces() == [10, 10, 40, 1]
        await stop(desk.session, slow.id)
        assert (await paces())[1] == 50
    replays = [act for act in desk.audit() if act["action"] == "replay"]
    assert [act["detail"].get("force") for act in replays] == [None, None, True, None]


async def test_a_replay_slows_down_for_a_slower_one(desk: Desk) -> None:
    desk.create(3)
    slow = await create(desk.session, REJECTED, ACT, per_second=0.01)
    fast = await create(desk.session, REJECTED, ACT, per_second=None)
    has_begun = asyncio.Event()

    async with await connect_async(desk.url, name="other") as other, named_lock(other, f"replay {slow.id}"):
        running = asyncio.create_task(run(desk.session, fast.id, on_email=lambda _email_id, _outcome: has_begun.set()))
        await has_begun.wait()
        await stop_elsewhere(desk.url, fast.id)
        ended = await running

    assert (ended.replay.replayed, ended.replay.waiting) == (1, 2)


async def test_only_one_session_can_run_a_replay(desk: Desk) -> None:
    desk.create(2)
    replay = await create(desk.session, REJECTED, ACT)

    async with await connect_async(desk.url, name="second") as other, named_lock(other, f"replay {replay.id}"):
        attended = await get_replay(desk.session, replay.id)
        with pytest.raises(ReplayBusy):
            await run(desk.session, replay.id)

    assert (attended.state, attended.is_active) == (ReplayState.RUNNING, True)


async def test_a_locked_email_is_left_to_a_second_run(desk: Desk) -> None:
    email_ids = desk.create(5)
    unknown = uuid4()
    replay = await create(desk.session, select(email_ids=(*email_ids, unknown)), ACT, per_second=None)

    with lock_holder(desk.url, locks=[email_ids[0], email_ids[2]]):
        left = await run(desk.session, replay.id, lock_seconds=0.0)
        again = await run(desk.session, replay.id, lock_seconds=0.0)
    statuses = desk.books.statuses()
    resumed = await run(desk.session, replay.id)

    assert (left.locked, left.replay.replayed, left.replay.waiting) == (2, 3, 2)
    assert left.replay.outcomes[ItemOutcome.UNKNOWN] == 1
    assert (left.replay.state, left.replay.is_active) == (ReplayState.INTERRUPTED, False)
    assert (again.locked, again.replay) == (2, left.replay)
    assert statuses == {"pending": 3, "failed": 2}
    assert (resumed.locked, resumed.replay.replayed, resumed.replay.state) == (0, 5, ReplayState.DONE)
    ended = await act_on(desk.session, ResumeReplay(replay_id=replay.id), Who(Face.COMMAND, "bob"))
    assert ended.state is ReplayState.DONE


@pytest.mark.parametrize("per_second", [None, 1e-9], ids=["a locked email", "its pace"])
async def test_a_replay_that_waits_ends_soon_after_it_is_stopped(desk: Desk, per_second: float | None) -> None:
    _, email_id = desk.create(2)
    replay = await create(desk.session, REJECTED, ACT, per_second=per_second)
    has_begun = asyncio.Event()

    with lock_holder(desk.url, locks=[email_id]):
        running = asyncio.create_task(
            run(desk.session, replay.id, on_email=lambda *_: has_begun.set(), lock_seconds=DEADLINE_SECONDS)
        )
        await has_begun.wait()
        await stop_elsewhere(desk.url, replay.id)
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            ended = (await running).replay

    assert (ended.state, ended.replayed, ended.waiting) == (ReplayState.STOPPED, 1, 1)


@contextmanager
def lock_holder(url: str, *, locks: list[UUID]) -> Iterator[None]:
    with psycopg.connect(url, application_name="lock_holder") as connection:
        connection.execute("select from email_log where email_id = any(%s) for share", [locks])
        yield
        connection.rollback()
