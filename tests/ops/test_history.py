"""The history of an email: its timeline, and why it waits, with PostgreSQL's real data about workers, relays, locks and
leases. Pauses begin and end with an audit entry, or end by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import psycopg
import pytest

from dispatcher.actions.action import Change, Refused
from dispatcher.actions.held import Confirm
from dispatcher.actions.pauses import (
    PauseAll,
    PauseLane,
    PauseProvider,
    PauseTenant,
    ResumeLane,
    ResumeProvider,
    ResumeTenant,
)
from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.unsent import Cancel
from dispatcher.domain.controls import Pause
from dispatcher.domain.email_history import Moment
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import WaitExplanation, WaitReason, explain_wait
from dispatcher.ops.email_history import find_history
from dispatcher.store.connections import AsyncSession, Pool
from dispatcher.store.controls import list_pauses, read_controls
from dispatcher.store.emails import find_facts
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.store.providers import ProviderStore
from dispatcher.store.queries import query
from tests.ops.dead_emails import Desk, decide
from tests.store.pausing import pause
from tests.store.results import result
from tests.waiting import until_answer

SETTINGS = SimpleNamespace(lanes=("urgent", "normal", "bulk"), providers=())
WORKER = "host-a:w0:4711:9f86d081"
LEASE_SECONDS = 60.0


@pytest.fixture
def worker(tables_url: str) -> Iterator[psycopg.Connection]:
    with (
        psycopg.connect(tables_url, autocommit=True, application_name=WORKER) as worker,
        psycopg.connect(tables_url, autocommit=True) as relay,
    ):
        relay.execute(query("take_named_locks"), {"names": ["relay"]})
        yield worker


async def wait_of(session: AsyncSession, email_id: UUID, *providers: str) -> WaitExplanation:
    if providers:
        facts = await find_facts(session, email_id)
        assert facts is not None
        return explain_wait(facts, providers=providers)
    story = await find_history(session, email_id, lease_seconds=LEASE_SECONDS)
    assert story is not None
    assert story.waiting is not None
    return story.waiting


async def act(session: AsyncSession, asked: Change[Pause], actor: str = "ann@ops-1") -> Pause:
    found: Pause = await run(
        session, asked.but(reason=asked.reason or "maintenance"), Who(Face.COMMAND, actor), SETTINGS
    )
    return found


async def test_a_relay_is_missing_and_then_a_worker_and_a_finished_email_waits_for_nothing(desk: Desk) -> None:
    email_id = desk.books.enqueue_one()

    assert (await wait_of(desk.session, email_id)).reason is WaitReason.NO_RELAY
    desk.books.change(email_id, publish_due_at=None)
    assert (await wait_of(desk.session, email_id)).reason is WaitReason.NO_WORKER
    desk.books.change(email_id, status="sent")
    story = await find_history(desk.session, email_id)
    assert story is not None
    assert story.waiting is None


DOMAIN = {"wait_reason": "domain", "wait_domain": "example.org"}


@pytest.mark.parametrize(
    ("columns", "limit", "because"),
    [
        ({"wait_reason": "redelivery"}, None, "ses deferred it (attempt 7: recipient_deferred)"),
        (DOMAIN, (1, 2), "example.org may get 1 email per second, 2 at the same time"),
        (DOMAIN, None, "example.org had a ceiling, which was removed"),
    ],
)
async def test_a_waiting_email_waits_until_its_time_for_a_reason(
    desk: Desk, columns: dict[str, str], limit: tuple[int | None, ...] | None, because: str
) -> None:
    email_id, until = desk.books.enqueue_one(), datetime.now(UTC) + timedelta(hours=1)
    if limit:
        into = "insert into domain_limit (domain, per_second, concurrent) values ('example.org', %s, %s)"
        desk.books.connection.execute(into, limit)
    attempt = {"attempt_count": 7, "provider": "ses", "error_type": "recipient_deferred"}
    desk.books.change(email_id, status="waiting", wait_until=until, publish_due_at=None, **columns, **attempt)

    found = await wait_of(desk.session, email_id)

    assert (found.reason, found.until, found.because) == (WaitReason(columns["wait_reason"]), until, because)


async def test_other_due_emails_are_ahead_and_a_provider_that_refuses_is_named_with_its_reason(
    desk: Desk, worker: psycopg.Connection
) -> None:
    *others, last = desk.books.enqueue(5)
    desk.books.change(others[0], status="sent", publish_due_at=None)
    desk.books.change(others[1], publish_due_at=datetime.now(UTC) + timedelta(hours=1))
    queued = await wait_of(desk.session, last)
    desk.books.connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at) "
        "values ('smtp', 'host-a:w0', 'open', 'SMTP refuses our credentials.', now() + interval '30 s')"
    )

    found = await wait_of(desk.session, last)

    assert (queued.reason, queued.ahead) == (WaitReason.QUEUED, 2)
    assert (found.reason, found.until is None) == (WaitReason.PROVIDER_REFUSES, False)
    remedy = "To try it at once: `dispatcher resume provider smtp`."
    assert found.detail == f"smtp refuses all emails: SMTP refuses our credentials. {remedy}"


async def test_a_leased_email_waits_for_its_worker(desk: Desk, worker: psycopg.Connection) -> None:
    email_id = desk.books.enqueue_one()
    lease = "update email_log set status = 'sending', locked_by = %s, locked_until = now() + interval '1 min'"
    desk.books.connection.execute(lease, [WORKER])
    leased = await wait_of(desk.session, email_id)
    worker.close()

    assert leased.reason is WaitReason.LEASED
    # PostgreSQL notices a closed session a moment later.
    await until_answer(lambda: wait_of(desk.session, email_id), lambda wait: wait.reason is WaitReason.WORKER_LOST)


async def test_a_second_pause_changes_the_first_and_deletes_pauses_that_have_ended(desk: Desk) -> None:
    pause(desk.books.connection, "tenant", "old", seconds=-1)
    first = await act(desk.session, PauseLane(lane="bulk", for_seconds=60))
    second = await act(desk.session, PauseLane(lane="bulk", reason="it takes longer"), actor="bob")

    assert [(each.subject, each.reason) for each in await list_pauses(desk.session)] == [
        ("lane bulk", "it takes longer")
    ]
    assert (second.began_at, second.until, second.reason) == (first.began_at, None, "it takes longer")
    assert [row["name"] for row in desk.books.select("select name from pause")] == ["bulk"]
    assert (await read_controls(desk.session)).pause_of_lane("bulk") is not None


async def test_a_pause_that_has_ended_by_itself_is_no_longer_in_force(desk: Desk) -> None:
    pause(desk.books.connection, "tenant", "acme", seconds=0.05)
    await until_answer(lambda: list_pauses(desk.session), lambda pauses: pauses == [])
    with pytest.raises(Refused, match="The tenant acme is not paused"):
        await act(desk.session, ResumeTenant(tenant_id="acme"))
    assert desk.books.count("operator_audit") == 0
    again = await act(desk.session, PauseTenant(tenant_id="acme"))
    assert datetime.now(UTC) - again.began_at < timedelta(seconds=5)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (PauseAll(for_seconds=7200), "Everything is paused"),
        (PauseLane(lane="normal", for_seconds=7200), "Lane normal is paused"),
        (PauseTenant(tenant_id="acme", for_seconds=7200), "Tenant acme is paused"),
        (PauseProvider(provider="smtp", for_seconds=7200), "Provider smtp is paused"),
    ],
)
async def test_an_email_that_is_paused_waits_for_that_reason(
    desk: Desk, worker: psycopg.Connection, asked: Change[Pause], sentence: str
) -> None:
    (email_id,) = desk.books.enqueue(1, tenant_id="acme")
    desk.books.change(email_id, publish_due_at=None)
    begun = await act(desk.session, asked)
    await act(desk.session, PauseTenant(tenant_id="other"))

    found = await wait_of(desk.session, email_id, "smtp")

    assert found.reason is WaitReason.PAUSED
    assert begun.until is not None
    assert found.until is not None
    assert abs(found.until - begun.until) < timedelta(seconds=1)
    assert found.detail == f"{sentence} until {begun.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC by ann: maintenance."
    if isinstance(asked, PauseProvider):  # another provider can send the email
        found = await wait_of(desk.session, email_id, "smtp", "ses")
        assert found.reason is WaitReason.QUEUED
        assert f"{sentence} until" in found.detail


async def test_resume_ends_the_wait_that_workers_began_and_is_audited(desk: Desk) -> None:
    for slot, state in [("a:w0", "open"), ("b:w0", "paused"), ("b:w1", "closed")]:
        desk.books.connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at)"
            " values ('smtp', %s, %s, 'throttled', now() + interval '1 hour')",
            [slot, state],
        )

    ended = await act(desk.session, ResumeProvider(provider="smtp"))

    assert (ended.subject, ended.reason, ended.actor) == ("provider smtp", "throttled", "dispatcher")
    marked = desk.books.select("select slot from provider_state where resumed_at is not null order by slot")
    assert [row["slot"] for row in marked] == ["a:w0", "b:w0"]
    (entry,) = desk.books.select("select actor, action, reason, detail from operator_audit")
    assert (entry["actor"], entry["action"], entry["reason"]) == ("ann@ops-1", "resume", "maintenance")
    assert (entry["detail"]["scope"], entry["detail"]["name"]) == ("provider", "smtp")


@pytest.mark.parametrize(
    ("is_leased", "attempts", "base", "is_due_earlier"),
    [
        (True, 0, 0, True),
        (True, 3, 3, True),  # replayed, and not attempted since
        (True, 1, 0, False),  # deferred: its own wait goes on
        (False, 0, 0, False),  # the API publishes it
    ],
)
async def test_resume_of_a_provider_makes_emails_due_that_workers_postponed_without_an_attempt(
    desk: Desk, is_leased: bool, attempts: int, base: int, is_due_earlier: bool
) -> None:
    now = datetime.now(UTC)
    late, soon = now + timedelta(seconds=90), now + timedelta(seconds=3)
    email_id = desk.books.enqueue_one()
    desk.books.change(email_id, publish_due_at=late, leased_at=now if is_leased else None)
    desk.books.change(email_id, attempt_count=attempts, attempt_base=base)

    pause(desk.books.connection, "lane", "normal")
    await act(desk.session, ResumeLane(lane="normal"))
    assert desk.books.row(email_id)["publish_due_at"] == late
    pause(desk.books.connection, "provider", "smtp")
    await act(desk.session, ResumeProvider(provider="smtp"))

    due_at = desk.books.row(email_id)["publish_due_at"]
    assert (soon <= due_at < late) if is_due_earlier else (due_at == late)


async def test_a_worker_takes_a_resume_once_if_it_needs_it(desk: Desk, pool: Pool) -> None:
    store = ProviderStore(pool, slot="a:w0")
    for provider in ("smtp", "ses"):
        await store.set_state(provider, "open", "connection_failed", 60.0)
        await act(desk.session, ResumeProvider(provider=provider))
    await store.set_state("smtp", "open", "connection_failed", 120.0)
    await store.set_state("ses", "closed", None, None)

    assert await store.take_resumes() == ["smtp"]
    assert await store.take_resumes() == []
    with pytest.raises(Refused):
        await act(desk.session, ResumeProvider(provider="ses"))


async def timeline(session: AsyncSession, email_id: UUID) -> list[Moment]:
    history = await find_history(session, email_id)
    assert history is not None
    instants = [moment.at for moment in history.timeline]
    assert instants == sorted(instants)
    return list(history.timeline)


async def words(session: AsyncSession, email_id: UUID) -> list[str]:
    return [moment.what for moment in await timeline(session, email_id)]


async def test_attempts_ends_and_a_dead_letter_have_instants(desk: Desk, store: LeaseStore) -> None:
    sent, failed = desk.books.enqueue(2)
    outbox = Outbox(desk.session)
    await outbox.mark_published({each.email_id: each.due_at for each in await outbox.find_publish_due(1)})
    for email_id, status in ((sent, Status.SENT), (failed, Status.FAILED)):
        (lease,) = await store.lease(desk.books.keys([email_id]), 60)
        await store.record([result(lease, Status.SENDING, error_type="throttled", provider_code="421")])
        await store.record([result(lease, status, attempt_number=2, error_type="refused")])
    await outbox.mark_dead_lettered({each.email_id: each.failed_at for each in await outbox.find_dead_letter_due(1)})

    found = await words(desk.session, sent)
    assert found[:3] == ["enqueued", "published", "leased"]
    assert sorted(found[3:]) == ["attempt 1: deferred", "attempt 2: accepted", "sent"]
    found = await words(desk.session, failed)
    assert found.index("failed") < found.index("dead-lettered") == len(found) - 1
    assert desk.books.row(failed)["settled_at"] is not None


async def test_a_decision_has_its_actor_and_reason(desk: Desk, store: LeaseStore) -> None:
    email_id, unsent = desk.books.enqueue(2)
    (lease,) = await store.lease(desk.books.keys([email_id]), 60)
    await store.record([result(lease, Status.HELD, error_type="outcome_unknown")])
    held_since = desk.books.row(email_id)["settled_at"]
    before = await words(desk.session, email_id)
    await decide(desk.session, Confirm(reason="the provider shows it"), email_id)
    await decide(desk.session, Cancel(reason="too late"), unsent)

    assert (held_since is None, before[-1]) == (False, "held")
    (moment,) = [moment for moment in await timeline(desk.session, email_id) if moment.what == "confirm"]
    assert (moment.actor, moment.reason) == ("ann@ops-1", "the provider shows it")
    assert sorted(await words(desk.session, unsent)) == ["cancel", "cancelled", "enqueued"]
