"""Twilio is asked what became of messages whose status callbacks are lost, and of held messages."""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from dispatcher import Sms, enqueue_many
from dispatcher.config import load
from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.dev.http_double import HttpDouble
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import StoreUnavailable
from dispatcher.events.intake import EventIntake
from dispatcher.monitor.message_polling import AGES_SECONDS, INTERVAL_SECONDS, MAX_REQUESTS, MessagePolling
from dispatcher.providers.contract import Attempt
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.leases import LeaseStore
from dispatcher.supervisor.monitor_process import _event_sources
from tests.providers.http_places import ACCOUNT, TOKEN, TwilioPlace, twilio_place
from tests.store.books import Books
from tests.store.results import result

NUMBER, SENDER, TEXT = "+4915112345678", "Example", "Your code is 1234."
YOUNG = timedelta(seconds=AGES_SECONDS[0] + 30)


class Scene:
    def __init__(self, books: Books, store: LeaseStore, place: TwilioPlace, pool: Pool, database_url: str) -> None:
        self.books = books
        self.store = store
        self.provider = place.provider
        self.double: HttpDouble = place.double
        self.intake = EventIntake(pool, SuppressionRules())
        self.polling = MessagePolling(database_url, place.provider, self.intake)
        self.database_url = database_url

    def enqueue(self, count: int = 1, **fields: Any) -> list[UUID]:
        base = self.books.count("email_log")
        given = {"to": NUMBER, "text": TEXT, "sender": SENDER, **fields}
        texts = [Sms(message_key=f"sms-{base + number}", **given) for number in range(count)]
        return [each.email_id for each in enqueue_many(self.books.connection, texts)]

    async def send(self, email_ids: list[UUID], fault: Fault | None = None) -> None:
        """Sends SMS as a worker does; then lets YOUNG pass, for us and for Twilio."""
        before = len(self.double.messages)
        self.double.behaviour.fault = fault
        for lease in await self.store.lease(self.books.keys(email_ids), 60):
            (row,) = self.books.select("select * from email_content where email_id = %s", lease.email_id)
            to, created_at = tuple(row["recipients"]["to"]), datetime.now(UTC)
            sms = OutgoingEmail(lease.email_id, created_at, row["sender"], to, "", row["text_body"], channel="sms")
            outcome = await self.provider.send(sms, Attempt(1, asyncio.get_running_loop().time() + 20))
            done = {"provider": "twilio", "error_type": "outcome_unknown", "error": "No response."}
            if isinstance(outcome, Accepted):
                done = {"provider": "twilio", "provider_message_id": str(outcome.provider_message_id)}
            status = Status.SENT if isinstance(outcome, Accepted) else Status.HELD
            await self.store.record([result(lease, status, **done)])
        self.double.behaviour.fault = None
        self.grow(YOUNG, email_ids)
        for message in list(self.double.messages)[before:]:
            message["date_created"] = email.utils.format_datetime(datetime.now(UTC) - YOUNG, usegmt=True)

    async def sent(self, count: int = 1) -> list[UUID]:
        email_ids = self.enqueue(count)
        await self.send(email_ids)
        return email_ids

    def grow(self, age: timedelta, email_ids: list[UUID]) -> None:
        self.books.connection.execute(
            "update email_log set sent_at = sent_at - %(age)s, settled_at = settled_at - %(age)s,"
            " leased_at = leased_at - %(age)s, created_at = created_at - %(age)s where email_id = any(%(ids)s)",
            {"age": age, "ids": email_ids},
        )

    async def held(self, **fields: Any) -> UUID:
        """An SMS that Twilio accepted, but whose response was lost."""
        (email_id,) = self.enqueue(**fields)
        await self.send([email_id], Fault.CLOSE)
        assert self.books.status(email_id) == "held"
        return email_id

    def status_of(self, status: str, **fields: Any) -> None:
        self.double.messages[-1].update(status=status, **fields)

    def events(self) -> list[tuple[UUID, str, str | None]]:
        rows = self.books.select("select * from email_event order by received_at, kind")
        return [(row["email_id"], row["kind"], row["code"]) for row in rows]


@pytest.fixture
async def scene(books: Books, store: LeaseStore, pool: Pool, tables_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    async with twilio_place(tmp_path) as place:
        scene = Scene(books, store, place, pool, tables_url)
        yield scene
        await scene.polling.close()


async def test_an_end_whose_callback_was_lost_is_found_once(scene: Scene) -> None:
    (email_id,) = await scene.sent()
    scene.status_of("undelivered", error_code=30005, error_message=f"Unknown destination {NUMBER}")

    await scene.polling.run_once()
    await scene.polling.run_once()

    assert scene.events() == [(email_id, "bounced", "30005")]
    assert scene.double.reads.total() == 1
    assert scene.books.select("select reason from suppression") == [{"reason": "hard_bounce"}]


async def test_a_message_is_asked_for_at_each_age_until_its_end_is_known(scene: Scene) -> None:
    (email_id,) = await scene.sent()
    await scene.polling.run_once()
    scene.grow(timedelta(hours=1), [email_id])
    scene.status_of("delivered")
    await scene.polling.run_once()
    scene.grow(timedelta(hours=6), [email_id])

    await scene.polling.run_once()

    assert [kind for _, kind, _ in scene.events()] == ["accepted", "delivered"]
    assert scene.double.reads.total() == 2


async def test_young_old_and_finished_messages_and_emails_are_not_asked_for(scene: Scene) -> None:
    young, old, unknown = await scene.sent(3)
    scene.grow(-YOUNG, [young])
    scene.grow(timedelta(days=1), [old])
    scene.books.change(unknown, provider_message_id=None)
    scene.books.change(scene.books.enqueue_one(), status="sent", sent_at=datetime.now(UTC) - YOUNG, provider="twilio")

    await scene.polling.run_once()

    assert scene.double.reads.total() == 0


async def test_the_list_of_messages_is_evidence_for_a_held_message(scene: Scene) -> None:
    held: dict[UUID, tuple[str, str]] = {}
    for number, (sender, status, becomes, kind) in enumerate((
        (SENDER, "sent", "sent", "accepted"),
        (SENDER, "delivered", "sent", "delivered"),
        (SENDER, "failed", "failed", "rejected"),
        (f"MG{'0' * 32}", "sent", "sent", "accepted"),  # a message service
    )):  # fmt: skip
        held[await scene.held(sender=sender, to=f"{NUMBER[:-1]}{number}")] = becomes, kind
        scene.status_of(status)

    await scene.polling.run_once()

    assert {email_id: (scene.books.status(email_id), kind) for email_id, kind, _ in scene.events()} == held


async def test_without_its_own_message_a_held_message_stays_held(scene: Scene) -> None:
    await scene.held()
    scene.double.messages.clear()  # Twilio did not accept the message
    for number, change in enumerate((
        {"body": TEXT.upper()},
        {"from": "Other"},
        {"date_created": "Tue, 01 Jan 2030 12:00:00 GMT"},
        {"status": "invented"},
        {"sid": "1"},
    )):  # fmt: skip
        await scene.held(to=f"{NUMBER[:-1]}{number}")
        scene.double.messages[-1].update(change)

    await scene.polling.run_once()

    assert scene.books.statuses() == {"held": 6}
    assert (scene.events(), scene.double.reads.total()) == ([], 6)


@pytest.mark.parametrize("is_erased", [False, True])
async def test_of_two_equal_texts_to_one_number_both_stay_held(scene: Scene, is_erased: bool) -> None:
    first, second = await scene.held(), await scene.held()
    scene.double.messages.pop()  # Twilio accepted only one of them
    if is_erased:
        scene.books.connection.execute("delete from email_content where email_id = %s", [second])

    await scene.polling.run_once()

    assert scene.books.statuses() == {"held": 2}
    assert {first, second} == {row["email_id"] for row in scene.books.rows()}


async def test_different_texts_to_one_number_are_told_apart(scene: Scene) -> None:
    first, second = await scene.held(text="Your code is 1."), await scene.held(text="Your code is 2.")
    scene.double.messages.pop()

    await scene.polling.run_once()

    assert (scene.books.status(first), scene.books.status(second)) == ("sent", "held")


@pytest.mark.parametrize("is_rival", [True, False])
async def test_the_message_of_another_sms_is_no_evidence(scene: Scene, is_rival: bool) -> None:
    (sent,) = await scene.sent()
    email_id = await scene.held()
    scene.double.messages.pop()
    if not is_rival:  # by its times, it cannot be the same; by its SID, it is
        scene.grow(timedelta(hours=5), [sent])

    await scene.polling.run_once()

    assert scene.books.status(email_id) == "held"
    assert [each for each, _, _ in scene.events()] == [sent]


async def test_a_round_asks_for_a_bounded_number_and_the_next_round_continues(scene: Scene) -> None:
    email_ids = await scene.sent(MAX_REQUESTS + 5)

    wait = await scene.polling.run_once()
    first = scene.double.reads.total()
    await scene.polling.run_once()

    assert first == MAX_REQUESTS
    assert wait is not None
    assert wait < INTERVAL_SECONDS
    assert sorted(each for each, _, _ in scene.events()) == sorted(email_ids)
    assert set(scene.double.reads.values()) == {1}


async def test_a_throttled_service_waits_and_logs_once(scene: Scene) -> None:
    (email_id,) = await scene.sent()
    scene.double.behaviour.fault = Reply(429, {"code": 20429, "message": NUMBER}, {"Retry-After": "700"})

    with capture_logs() as logs:
        waits = [await scene.polling.run_once() for _ in range(3)]
        scene.double.behaviour.fault = None
        await scene.polling.run_once()

    assert waits == [700.0] * 3
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["events.source_unavailable"]
    assert NUMBER not in str(logs)
    assert scene.events() == [(email_id, "accepted", None)]
    assert scene.double.reads.total() == 4


async def test_one_host_asks_at_a_time(scene: Scene) -> None:
    await scene.sent()
    other = MessagePolling(scene.database_url, scene.provider, scene.intake)

    assert await scene.polling.run_once() is None
    assert await other.run_once() is None
    asked = scene.double.reads.total()
    await scene.polling.close()
    await other.run_once()
    await other.close()

    assert (asked, scene.double.reads.total()) == (1, 2)


async def test_after_a_lost_session_the_service_continues(scene: Scene) -> None:
    await scene.polling.run_once()
    scene.books.terminate("dispatcher polling twilio")
    await scene.sent()

    with pytest.raises(StoreUnavailable):
        await scene.polling.run_once()
    await scene.polling.run_once()

    assert scene.double.reads.total() == 1


@pytest.mark.parametrize(
    ("providers", "count"), [("", 0), ("sms-capture", 0), ("twilio", 1), ("sms-capture,twilio", 1)]
)
def test_only_the_monitor_of_a_host_with_twilio_polls(tmp_path: Path, providers: str, count: int) -> None:
    environ = {"DATABASE_URL": "postgresql://db", "AMQP_URL": "amqp://mq", "TWILIO_ACCOUNT_SID": ACCOUNT}
    environ |= {"PROVIDERS": "capture", "SMS_PROVIDERS": providers, "TWILIO_AUTH_TOKEN": TOKEN}
    environ |= dict.fromkeys(("CAPTURE_DIR", "SMS_CAPTURE_DIR"), str(tmp_path))
    settings = load({f"DISPATCHER_{name}": value for name, value in environ.items()})

    sources = _event_sources(settings, make_pool(settings.database_url, name="unused", size=1))
    assert [type(task) for task in sources] == [MessagePolling] * count


async def test_wrong_credentials_make_the_service_wait(scene: Scene) -> None:
    await scene.held()
    scene.double.behaviour.key = "another"

    with capture_logs() as logs:
        wait = await scene.polling.run_once()

    assert wait is not None
    (reason,) = [log["reason"] for log in logs if log["event"] == "events.source_unavailable"]
    assert reason == "Twilio answers 401 20003."
