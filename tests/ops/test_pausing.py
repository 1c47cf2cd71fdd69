"""Pauses begin and end with an audit entry, end by themselves, and are the reason why an email waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from dispatcher.actions import pauses
from dispatcher.actions.action import Refused
from dispatcher.actions.runner import Face, Who, run
from dispatcher.domain.controls import Pause, PauseScope
from dispatcher.domain.waiting import WaitReason, explain_wait
from dispatcher.store.connections import AsyncSession, Pool
from dispatcher.store.controls import list_pauses, read_controls
from dispatcher.store.emails import find_facts
from dispatcher.store.providers import ProviderStore
from dispatcher.store.queries import query
from tests.store.books import Books
from tests.store.pausing import pause
from tests.waiting import until_answer

SETTINGS = SimpleNamespace(lanes=("urgent", "normal", "bulk"), providers=())


async def begin(
    session: AsyncSession,
    scope: PauseScope,
    name: str = "",
    *,
    actor: str = "ann@ops-1",
    reason: str = "maintenance",
    seconds: float | None = None,
) -> Pause:
    return await _run(session, "Pause", scope, name, actor, reason=reason, for_seconds=seconds)


async def end(
    session: AsyncSession, scope: PauseScope, name: str = "", *, actor: str = "ann@ops-1", reason: str = "maintenance"
) -> Pause:
    return await _run(session, "Resume", scope, name, actor, reason=reason)


async def _run(session: AsyncSession, verb: str, scope: PauseScope, name: str, actor: str, **given: Any) -> Pause:
    field = "tenant_id" if scope is PauseScope.TENANT else str(scope)
    action = getattr(pauses, f"{verb}{scope.capitalize()}")
    named = {} if scope is PauseScope.ALL else {field: name}
    found: Pause = await run(session, action(**named, **given), Who(Face.COMMAND, actor), SETTINGS)
    return found


@pytest.fixture(autouse=True)
def _worker(tables_url: str) -> Iterator[None]:
    """Opens the sessions of a leading relay and of a worker."""
    with (
        psycopg.connect(tables_url, autocommit=True, application_name="host-a:w0:4711:9f86d081"),
        psycopg.connect(tables_url, autocommit=True) as relay,
    ):
        relay.execute(query("take_named_locks"), {"names": ["relay"]})
        yield


async def test_a_pause_and_its_end_are_audited(session: AsyncSession, books: Books) -> None:
    begun = await begin(session, PauseScope.TENANT, "acme", seconds=3600)
    (found,) = await list_pauses(session)
    assert replace(found, actor="ann") == begun
    assert begun.until is not None
    assert timedelta(minutes=59) < begun.until - datetime.now(UTC) < timedelta(minutes=61)
    assert await end(session, PauseScope.TENANT, "acme", actor="bob@ops-2", reason="done") == begun
    assert await list_pauses(session) == []

    entries = books.select("select actor, action, reason, detail from operator_audit order by audit_id")
    assert [(each["actor"], each["action"], each["reason"]) for each in entries] == [
        ("ann@ops-1", "pause", "maintenance"),
        ("bob@ops-2", "resume", "done"),
    ]
    assert (entries[0]["detail"]["scope"], entries[0]["detail"]["name"]) == ("tenant", "acme")


async def test_a_second_pause_changes_the_end_and_the_reason_of_the_first(session: AsyncSession) -> None:
    first = await begin(session, PauseScope.ALL, seconds=60)
    second = await begin(session, PauseScope.ALL, actor="bob", reason="it takes longer")

    assert await list_pauses(session) == [second]
    assert (second.began_at, second.until, second.reason) == (first.began_at, None, "it takes longer")


async def test_a_pause_that_has_ended_by_itself_is_no_longer_in_force(session: AsyncSession, books: Books) -> None:
    pause(books.connection, "tenant", "acme", seconds=0.05)

    async def has_ended() -> bool:
        return await list_pauses(session) == []

    await until_answer(has_ended)
    with pytest.raises(Refused, match="The tenant acme is not paused"):
        await end(session, PauseScope.TENANT, "acme")
    assert books.count("operator_audit") == 0
    again = await begin(session, PauseScope.TENANT, "acme")
    assert datetime.now(UTC) - again.began_at < timedelta(seconds=5)


async def test_a_new_pause_deletes_pauses_that_have_ended(session: AsyncSession, books: Books) -> None:
    pause(books.connection, "tenant", "old", seconds=-1)
    await begin(session, PauseScope.LANE, "bulk")

    assert [row["name"] for row in books.select("select name from pause")] == ["bulk"]
    assert (await read_controls(session)).pause_of_lane("bulk") is not None


@pytest.mark.parametrize(
    ("scope", "name", "sentence"),
    [
        (PauseScope.ALL, "", "Everything is paused"),
        (PauseScope.LANE, "normal", "Lane normal is paused"),
        (PauseScope.TENANT, "acme", "Tenant acme is paused"),
        (PauseScope.PROVIDER, "smtp", "Provider smtp is paused"),
    ],
)
async def test_an_email_that_is_paused_waits_for_that_reason(
    session: AsyncSession, books: Books, scope: PauseScope, name: str, sentence: str
) -> None:
    (email_id,) = books.enqueue(1, tenant_id="acme")
    books.change(email_id, publish_due_at=None)
    begun = await begin(session, scope, name, seconds=7200)
    await begin(session, PauseScope.TENANT, "other")

    facts = await find_facts(session, email_id)
    assert facts is not None
    found = explain_wait(facts, providers=["smtp"])

    assert found.reason is WaitReason.PAUSED
    assert begun.until is not None
    assert found.until is not None
    assert abs(found.until - begun.until) < timedelta(seconds=1)
    assert found.detail == f"{sentence} until {begun.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC by ann: maintenance."


async def test_an_email_that_another_provider_can_send_does_not_wait_for_a_paused_one(
    session: AsyncSession, books: Books
) -> None:
    (email_id,) = books.enqueue(1)
    books.change(email_id, publish_due_at=None)
    await begin(session, PauseScope.PROVIDER, "smtp")

    facts = await find_facts(session, email_id)
    assert facts is not None
    found = explain_wait(facts, providers=["smtp", "ses"])

    assert found.reason is WaitReason.QUEUED
    assert "Provider smtp is paused by ann: maintenance." in found.detail


async def test_resume_ends_the_wait_that_workers_began_themselves_and_is_audited(
    session: AsyncSession, books: Books
) -> None:
    for slot, state in [("a:w0", "open"), ("b:w0", "paused"), ("b:w1", "closed")]:
        books.connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at)"
            " values ('smtp', %s, %s, 'throttled', now() + interval '1 hour')",
            [slot, state],
        )

    ended = await end(session, PauseScope.PROVIDER, "smtp")

    assert (ended.subject, ended.reason, ended.actor) == ("provider smtp", "throttled", "dispatcher")
    marked = books.select("select slot from provider_state where resumed_at is not null order by slot")
    assert [row["slot"] for row in marked] == ["a:w0", "b:w0"]
    (entry,) = books.select("select actor, action, reason, detail from operator_audit")
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
    session: AsyncSession, books: Books, is_leased: bool, attempts: int, base: int, is_due_earlier: bool
) -> None:
    now = datetime.now(UTC)
    late, soon = now + timedelta(seconds=90), now + timedelta(seconds=3)
    email_id = books.enqueue_one()
    books.change(email_id, publish_due_at=late, leased_at=now if is_leased else None)
    books.change(email_id, attempt_count=attempts, attempt_base=base)

    found = []
    for scope, name in ((PauseScope.LANE, "normal"), (PauseScope.PROVIDER, "smtp")):
        pause(books.connection, scope, name)
        await end(session, scope, name)
        found.append(books.row(email_id)["publish_due_at"])

    assert found[0] == late
    assert (soon <= found[1] < late) if is_due_earlier else (found[1] == late)


async def test_resume_ends_an_operators_pause_and_the_workers_waits_together(
    session: AsyncSession, books: Books
) -> None:
    begun = await begin(session, PauseScope.PROVIDER, "smtp")
    books.connection.execute("insert into provider_state (provider, slot, state) values ('smtp', 'a:w0', 'open')")

    assert await end(session, PauseScope.PROVIDER, "smtp") == begun

    assert books.select("select from provider_state where resumed_at is not null")
    assert books.count("operator_audit") == 2


async def test_a_provider_that_needs_no_resume_is_neither_paused_nor_awaited_by_workers(session: AsyncSession) -> None:
    with pytest.raises(Refused, match="The provider smtp is not paused, and no worker waits for it"):
        await end(session, PauseScope.PROVIDER, "smtp")


async def test_a_worker_takes_a_resume_once_and_a_closed_breaker_needs_none(
    session: AsyncSession, books: Books, pool: Pool
) -> None:
    store = ProviderStore(pool, slot="a:w0")
    for provider in ("smtp", "ses"):
        await store.set_state(provider, "open", "connection_failed", 60.0)
        await end(session, PauseScope.PROVIDER, provider)
    await store.set_state("smtp", "open", "connection_failed", 120.0)
    await store.set_state("ses", "closed", None, None)

    assert await store.take_resumes() == ["smtp"]
    assert await store.take_resumes() == []
    with pytest.raises(Refused):
        await end(session, PauseScope.PROVIDER, "ses")
