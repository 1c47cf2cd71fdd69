"""A replay sends each email again once, even if it is stopped, killed, or run twice at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import UTC, datetime
from threading import Thread
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.actions.dlq import DiscardDead, ResumeReplay, StopReplay, select
from dispatcher.actions.runner import Face, Who
from dispatcher.actions.runner import run as act_on
from dispatcher.domain.failures import ItemOutcome, Replay, ReplayState
from dispatcher.ops.acts import Act
from dispatcher.ops.replaying import ReplayBusy, create, overlaps, preview, run
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.named_locks import named_lock
from dispatcher.store.replays import find_pace, get_replay, list_skipped
from tests.ops.dead_emails import DeadEmails
from tests.ops.decisions import decide
from tests.waiting import DEADLINE_SECONDS, until_answer

ACT = Act.of("ann@ops-1", "the provider is back")
REJECTED = select(error_type="rejected")


async def stop(session: AsyncSession, replay_id: int) -> None:
    await act_on(session, StopReplay(replay_id=replay_id, reason=ACT.reason), Who(Face.COMMAND, ACT.actor))


async def test_the_dry_run_changes_nothing_and_reports_what_would_be_skipped(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    failed, held, pruned = dead_emails.create(7), dead_emails.create(2, status="held"), dead_emails.create(1)
    dead_emails.books.connection.execute("delete from email_content where email_id = %s", pruned)
    before = dead_emails.books.rows()

    found = await preview(session, select())

    assert found.counts == {ItemOutcome.REPLAYED: 7, ItemOutcome.MAY_HAVE_ARRIVED: 2, ItemOutcome.CONTENT_PRUNED: 1}
    assert found.samples[ItemOutcome.REPLAYED] == sorted(failed)[:5]
    assert found.samples[ItemOutcome.MAY_HAVE_ARRIVED] == held
    assert (await preview(session, select(), include_held=True)).replayable == 9
    assert dead_emails.books.rows() == before


async def test_each_email_becomes_pending_with_all_attempts(session: AsyncSession, dead_emails: DeadEmails) -> None:
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    chosen = dead_emails.create(3, due_since=long_ago, redelivery_count=4)
    dead_emails.create(2, error_type="server_error")
    replay = await create(session, REJECTED, ACT, per_second=None)

    ended = await run(session, replay.id)

    assert (ended.replay.state, ended.replay.replayed) == (ReplayState.DONE, 3)
    for email_id in chosen:
        row = dead_emails.books.row(email_id)
        assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
        assert (row["redelivery_count"], row["due_since"] > long_ago) == (0, True)
        assert (row["dead_letter_due_at"], row["published_at"]) == (None, None)
        assert row["publish_due_at"] is not None
    assert [(act["action"], act["reason"]) for act in dead_emails.audit()] == [("replay", "the provider is back")]


async def test_a_replay_of_one_email_is_done_at_once_unless_its_row_is_locked(
    session: AsyncSession, dead_emails: DeadEmails, tables_url: str
) -> None:
    (locked,) = dead_emails.create()

    with lock_holder(tables_url, locks=[locked]):
        left = await create(session, select(email_ids=(locked,)), ACT)
    again = await create(session, select(email_ids=(locked,)), ACT)

    assert (left.state, left.waiting) == (ReplayState.INTERRUPTED, 1)
    assert (again.state, again.outcomes) == (ReplayState.DONE, {"replayed": 1})
    assert (await run(session, left.id)).replay.outcomes == {"under_way": 1}


async def test_skipped_emails_are_listed_with_the_reason(session: AsyncSession, dead_emails: DeadEmails) -> None:
    sent, under_way, pruned, unknown = (
        dead_emails.create(1, status="sent"),
        dead_emails.create(status="pending"),
        dead_emails.create(1),
        uuid4(),
    )
    held, failed = dead_emails.create(status="held"), dead_emails.create()
    dead_emails.books.connection.execute("delete from email_content where email_id = %s", pruned)
    ids = (*sent, *under_way, *pruned, *held, *failed, unknown)

    replay = await create(session, select(email_ids=ids), ACT, per_second=None)
    ended = await run(session, replay.id)

    assert (await list_skipped(session, replay_id=replay.id, limit=10)) == {
        sent[0]: ItemOutcome.ALREADY_SENT,
        under_way[0]: ItemOutcome.UNDER_WAY,
        pruned[0]: ItemOutcome.CONTENT_PRUNED,
        held[0]: ItemOutcome.MAY_HAVE_ARRIVED,
        unknown: ItemOutcome.UNKNOWN,
    }
    assert (ended.replay.replayed, ended.replay.total) == (1, 6)


async def test_emails_that_expired_were_cancelled_or_wait_are_not_replayed(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    failed, held, cancelled, waiting, alive = dead_emails.create(5)
    books = dead_emails.books
    books.change(failed, expires_at=datetime(2026, 1, 1, tzinfo=UTC))
    books.change(held, status="held", expires_at=datetime(2026, 1, 1, tzinfo=UTC))
    books.change(cancelled, status="cancelled")
    books.change(waiting, status="waiting")
    ids = select(email_ids=(failed, held, cancelled, waiting, alive))
    assert (await preview(session, ids, include_held=True)).counts == {
        ItemOutcome.EXPIRED: 2,
        ItemOutcome.REPLAYED: 1,
    }

    replay = await create(session, ids, ACT, include_held=True, per_second=None)
    await run(session, replay.id)

    assert (await list_skipped(session, replay_id=replay.id, limit=10)) == {
        failed: ItemOutcome.EXPIRED,
        held: ItemOutcome.EXPIRED,
        cancelled: ItemOutcome.CANCELLED,
        waiting: ItemOutcome.UNDER_WAY,
    }
    assert books.status(alive) == "pending"


async def test_a_discarded_email_is_replayed_only_if_given_by_id_after_the_discard(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    before, since, by_filter, by_queue, also = dead_emails.create(5)
    await decide(session, DiscardDead(reason=ACT.reason), before)
    named = await create(session, select(email_ids=(before, since), discarded=None), ACT, per_second=None)
    filtered = await create(session, select(), ACT, per_second=None)
    queued = await create(session, select(email_ids=(by_queue, also)), ACT, per_second=None, source="queue")
    await decide(session, DiscardDead(reason=ACT.reason), since, by_filter, by_queue, also)

    for replay in (named, filtered, queued):
        await run(session, replay.id)

    skipped = [(await list_skipped(session, replay_id=each.id, limit=10)) for each in (named, filtered, queued)]
    assert skipped == [
        {since: ItemOutcome.DISCARDED},
        dict.fromkeys((since, by_filter, by_queue, also), ItemOutcome.DISCARDED),
        dict.fromkeys((by_queue, also), ItemOutcome.DISCARDED),
    ]
    assert dead_emails.books.status(before) == "pending"
    assert dead_emails.books.statuses() == {"pending": 1, "failed": 4}


async def test_discarded_emails_are_replayed_if_the_filter_selects_them(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    email_id, _ = dead_emails.create(2)
    await decide(session, DiscardDead(reason=ACT.reason), email_id)

    replay = await create(session, select(discarded=True), ACT, per_second=None)
    ended = await run(session, replay.id)

    assert (ended.replay.replayed, ended.replay.total) == (1, 1)
    assert dead_emails.books.status(email_id) == "pending"


async def test_held_emails_are_replayed_only_with_include_held(session: AsyncSession, dead_emails: DeadEmails) -> None:
    held = dead_emails.create(2, status="held")

    replay = await create(session, select(), ACT, include_held=True, per_second=None)
    ended = await run(session, replay.id)

    assert ended.replay.replayed == 2
    assert {dead_emails.books.status(email_id) for email_id in held} == {"pending"}


async def test_a_stopped_replay_continues_where_it_ended(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    dead_emails.create(10)
    replay = await create(session, REJECTED, ACT, per_second=None)

    ended = await run(session, replay.id, on_email=stop_after(4, tables_url, replay.id))
    resumed = await act_on(session, ResumeReplay(replay_id=replay.id), Who(Face.COMMAND, "bob"))

    assert (ended.replay.state, ended.replay.replayed, ended.replay.waiting) == (ReplayState.STOPPED, 4, 6)
    assert resumed.state is ReplayState.INTERRUPTED  # no session runs it yet
    assert (await run(session, replay.id)).replay.replayed == 10
    assert dead_emails.books.statuses() == {"pending": 10}
    assert [act["action"] for act in dead_emails.audit()] == ["replay", "stop", "resume"]


def stop_after(count: int, url: str, replay_id: int) -> Callable[[UUID, ItemOutcome], None]:
    """A callback that stops the replay from a separate session after `count` emails, and waits until the replay has
    stopped."""
    seen: list[UUID] = []

    async def stop_it() -> None:
        async with await connect_async(url, name="elsewhere") as elsewhere:
            await stop(elsewhere, replay_id)

    def note(email_id: UUID, _outcome: ItemOutcome) -> None:
        seen.append(email_id)
        if len(seen) == count:
            thread = Thread(target=lambda: asyncio.run(stop_it()))
            thread.start()
            thread.join()

    return note


async def test_a_replay_whose_process_dies_loses_nothing(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    dead_emails.create(6)
    replay = await create(session, REJECTED, ACT, per_second=None)
    doomed = await connect_async(tables_url, name="doomed")
    died = asyncio.Event()

    def die(_email_id: UUID, _outcome: ItemOutcome) -> None:
        died.set()
        raise RuntimeError("kill -9")

    with pytest.raises(RuntimeError):
        await run(doomed, replay.id, on_email=die)
    await doomed.close()

    async def interrupted() -> Replay | None:
        found = await get_replay(session, replay.id)
        return None if found.is_active else found

    left = await until_answer(interrupted)  # PostgreSQL notices a closed session a moment later
    assert left is not None
    assert (left.state, left.replayed, left.waiting) == (ReplayState.INTERRUPTED, 1, 5)
    assert (await run(session, replay.id)).replay.replayed == 6


async def test_two_concurrent_replays_replay_each_email_once(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    email_ids = dead_emails.create(40)
    first, second = [await create(session, REJECTED, ACT, per_second=None) for _ in range(2)]

    async with await connect_async(tables_url, name="second") as other:
        ended = await asyncio.gather(run(session, first.id), run(other, second.id))

    assert sum(each.replay.replayed for each in ended) == 40
    assert sum(each.replay.outcomes.get(ItemOutcome.UNDER_WAY, 0) for each in ended) == 40
    assert {dead_emails.books.row(email_id)["attempt_base"] for email_id in email_ids} == {3}


async def test_replays_of_the_same_emails_share_the_slower_pace_unless_forced(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    dead_emails.create(3)
    dead_emails.create(2, error_type="server_error")
    slow = await create(session, REJECTED, ACT, per_second=20)
    met = await overlaps(session, select())

    fast = await create(session, select(), ACT, per_second=50)
    forced = await create(session, select(), ACT, per_second=40, force=True)
    apart = await create(session, select(provider="ses"), ACT, per_second=1)

    async def paces() -> list[float | None]:
        return [await find_pace(session, replay_id=each.id) for each in (slow, fast, forced, apart)]

    assert [(each.id, each.actor, each.per_second, each.emails) for each in met] == [(slow.id, ACT.actor, 20, 3)]
    assert [list(each.paced_with) for each in (slow, fast, forced, apart)] == [[], [slow.id], [], []]
    assert await paces() == [20, 50, 40, 1]  # no session runs any of the replays
    async with AsyncExitStack() as attended:
        for each in (slow, fast, forced, apart):
            other = await attended.enter_async_context(await connect_async(tables_url, name="other"))
            await attended.enter_async_context(named_lock(other, f"replay {each.id}"))
        assert await paces() == [10, 10, 40, 1]
        await stop(session, slow.id)
        assert (await paces())[1] == 50
    assert [act["detail"].get("force") for act in dead_emails.audit() if act["action"] == "replay"] == [
        None, None, True, None
    ]  # fmt: skip


async def test_a_replay_slows_down_for_a_slower_replay_of_the_same_emails(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    dead_emails.create(3)
    slow = await create(session, REJECTED, ACT, per_second=0.01)
    fast = await create(session, REJECTED, ACT, per_second=None)
    has_begun = asyncio.Event()

    async with await connect_async(tables_url, name="other") as other, named_lock(other, f"replay {slow.id}"):
        running = asyncio.create_task(run(session, fast.id, on_email=lambda _email_id, _outcome: has_begun.set()))
        await has_begun.wait()
        async with await connect_async(tables_url, name="elsewhere") as elsewhere:
            await stop(elsewhere, fast.id)
        ended = await running

    assert (ended.replay.replayed, ended.replay.waiting) == (1, 2)


async def test_a_replay_can_be_run_by_one_session_only(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    dead_emails.create(2)
    replay = await create(session, REJECTED, ACT)

    async with await connect_async(tables_url, name="second") as other, named_lock(other, f"replay {replay.id}"):
        attended = await get_replay(session, replay.id)
        with pytest.raises(ReplayBusy):
            await run(session, replay.id)

    assert (attended.state, attended.is_active) == (ReplayState.RUNNING, True)


async def test_a_locked_email_is_skipped_and_the_replay_can_be_resumed(
    session: AsyncSession, dead_emails: DeadEmails, tables_url: str
) -> None:
    email_ids = dead_emails.create(5)
    unknown = uuid4()
    replay = await create(session, select(email_ids=(*email_ids, unknown)), ACT, per_second=None)

    with lock_holder(tables_url, locks=[email_ids[0], email_ids[2]]):
        left = await run(session, replay.id, lock_seconds=0.0)
        again = await run(session, replay.id, lock_seconds=0.0)
    statuses = dead_emails.books.statuses()
    resumed = await run(session, replay.id)

    assert (left.locked, left.replay.replayed, left.replay.waiting) == (2, 3, 2)
    assert left.replay.outcomes[ItemOutcome.UNKNOWN] == 1
    assert (left.replay.state, left.replay.is_active) == (ReplayState.INTERRUPTED, False)
    assert (again.locked, again.replay) == (2, left.replay)
    assert statuses == {"pending": 3, "failed": 2}
    assert (resumed.locked, resumed.replay.replayed, resumed.replay.state) == (0, 5, ReplayState.DONE)


async def test_a_briefly_locked_email_is_replayed_after_the_others(
    session: AsyncSession, dead_emails: DeadEmails, tables_url: str
) -> None:
    email_ids = dead_emails.create(3)
    replay = await create(session, REJECTED, ACT, per_second=None)
    order: list[UUID] = []

    with ExitStack() as locking:
        locking.enter_context(lock_holder(tables_url, locks=[email_ids[0]]))

        def note(email_id: UUID, _outcome: ItemOutcome) -> None:
            order.append(email_id)
            if len(order) == 2:
                locking.close()

        ended = await run(session, replay.id, on_email=note, lock_seconds=DEADLINE_SECONDS)

    assert order == [*email_ids[1:], email_ids[0]]
    assert (ended.locked, ended.replay.state) == (0, ReplayState.DONE)


async def test_a_replay_that_waits_for_a_locked_email_ends_when_it_is_stopped(
    session: AsyncSession, dead_emails: DeadEmails, tables_url: str
) -> None:
    _, email_id = dead_emails.create(2)
    replay = await create(session, REJECTED, ACT, per_second=None)

    with lock_holder(tables_url, locks=[email_id]):
        has_begun = asyncio.Event()
        running = asyncio.create_task(
            run(session, replay.id, on_email=lambda *_: has_begun.set(), lock_seconds=DEADLINE_SECONDS)
        )
        await has_begun.wait()
        async with await connect_async(tables_url, name="elsewhere") as elsewhere:
            await stop(elsewhere, replay.id)
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            ended = await running

    assert (ended.replay.state, ended.replay.waiting) == (ReplayState.STOPPED, 1)


async def test_a_replay_that_waits_for_its_pace_ends_soon_after_it_is_stopped(
    session: AsyncSession, dead_emails: DeadEmails, tables_url: str
) -> None:
    dead_emails.create(2)
    replay = await create(session, REJECTED, ACT, per_second=1e-9)
    has_begun = asyncio.Event()

    running = asyncio.create_task(run(session, replay.id, on_email=lambda _email_id, _outcome: has_begun.set()))
    await has_begun.wait()
    async with await connect_async(tables_url, name="elsewhere") as elsewhere:
        await stop(elsewhere, replay.id)
    async with asyncio.timeout(DEADLINE_SECONDS / 2):
        ended = await running

    assert (ended.replay.state, ended.replay.replayed, ended.replay.waiting) == (ReplayState.STOPPED, 1, 1)


@contextmanager
def lock_holder(url: str, *, locks: list[UUID]) -> Iterator[None]:
    """Opens a transaction that locks these emails' rows."""
    with psycopg.connect(url, application_name="lock_holder") as connection:
        connection.execute("select from email_log where email_id = any(%s) for share", [locks])
        yield
        connection.rollback()


async def test_the_pace_is_kept(session: AsyncSession, dead_emails: DeadEmails) -> None:
    dead_emails.create(11)
    replay = await create(session, REJECTED, ACT, per_second=50)
    began = asyncio.get_running_loop().time()

    await run(session, replay.id)

    assert asyncio.get_running_loop().time() - began > 9 / 50


async def test_a_failed_email_that_may_have_arrived_is_treated_like_a_held_one(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(was_uncertain=True, crash_count=2)

    for include_held in (False, True):
        replay = await create(session, select(), ACT, include_held=include_held, per_second=None)
        await run(session, replay.id)
        found = await get_replay(session, replay.id)
        assert found is not None
        assert found.replayed == include_held

    assert dead_emails.books.row(email_id)["crash_count"] == 0
