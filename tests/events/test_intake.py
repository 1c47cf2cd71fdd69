"""Events are stored once; each proves that the provider accepted its email, whatever the email's status. Bounces,
complaints and unsubscriptions suppress their recipients. An event that proves less than it says changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from dispatcher.config import Settings, load
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.suppression import SuppressionReason, SuppressionRules
from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.events.intake import BATCH, EventBatcher, EventIntake, Stored, suppression_rules
from dispatcher.ops.email_history import find_history
from dispatcher.store.connections import connect_async, make_pool
from dispatcher.store.events import EventRow, store_events
from tests.events.requests import ANN, AT
from tests.events.scene import Recorder, Scene, event
from tests.relay.running import Start
from tests.store.books import Books
from tests.store.results import result
from tests.store.suppressing import hasher_of, suppress, unsuppress
from tests.waiting import until

BOB: Final = "bob@example.org"
CEM: Final = "cem@example.org"


async def test_an_event_is_stored_without_the_address(scene: Scene) -> None:
    (email_id,) = scene.books.enqueue_tried()

    stored = await scene.tell(event(email_id, Bounce.HARD, code="5.1.1", detail=f"{ANN}: no such user"))

    assert stored == Stored(new=1, settled=1)
    (row,) = scene.books.select("select * from email_event")
    assert (row["email_id"], row["provider"], row["kind"], row["bounce"]) == (email_id, "sendgrid", "bounced", "hard")
    assert (row["code"], row["detail"], row["happened_at"]) == ("5.1.1", "<address>: no such user", AT)
    assert len(row["address_hash"]) == 16


async def test_repeated_events_and_events_of_unknown_emails_are_counted_and_left_out(scene: Scene) -> None:
    (email_id,) = scene.books.enqueue_tried()
    delivered, opened = event(email_id), event(email_id, EventKind.OPENED)
    await scene.tell(delivered)

    stored = await scene.tell(opened, event(new_email_id()), delivered, opened)

    assert stored == Stored(new=1, duplicates=2, unknown=1)
    assert scene.books.count("email_event") == 2


@pytest.mark.parametrize("status", ["pending", "waiting", "sending", "failed", "held"])
async def test_an_event_about_an_email_that_was_delivered_in_part_does_not_settle_it(scene: Scene, status: str) -> None:
    email_id = scene.books.enqueue_one()
    scene.books.change(email_id, status=status, recipient_outcomes='{"1": null}')

    await scene.tell(event(email_id))

    row = scene.books.row(email_id)
    assert (row["status"], row["proven_by"], scene.books.count("email_event")) == (status, None, 1)


async def test_new_events_are_counted_by_the_recipients_mailbox_provider(scene: Scene) -> None:
    to = ["ann@gmail.com", "Bob <bob@Outlook.co.uk>", "eve@example.org"]
    (email_id,) = scene.books.enqueue_tried(to=to)
    hasher = hasher_of(scene.books.connection)
    rows = [EventRow.of(event(email_id, Bounce.HARD, recipient=each), hasher) for each in (*to, None)]

    stored = await store_events(scene.pool, [*rows, rows[0]], SuppressionRules())
    again = await store_events(scene.pool, rows, SuppressionRules())

    counts = {each.mailbox: (each.new, each.duplicates) for each in stored}
    assert counts == {"gmail": (1, 1), "microsoft": (1, 0), "other": (1, 0), "unknown": (1, 0)}
    assert {each.mailbox: (each.new, each.duplicates) for each in again} == dict.fromkeys(counts, (0, 1))


@pytest.mark.parametrize("status", [Status.PENDING, Status.FAILED, Status.HELD])
async def test_an_event_of_any_kind_proves_that_an_unsent_email_was_sent(scene: Scene, status: Status) -> None:
    kinds: Sequence[EventKind | Bounce] = EventKind.ACCEPTED, Bounce.SOFT, EventKind.CLICKED
    emails = [await scene.make(status) for _ in kinds]

    assert await scene.tell(*map(event, emails, kinds)) == Stored(new=3, settled=3)

    for row in scene.books.rows():
        assert (row["status"], row["provider"], row["proven_by"]) == ("sent", "sendgrid", "sendgrid")
        assert row["sent_at"] is not None
        assert (row["publish_due_at"], row["dead_letter_due_at"], row["error_type"]) == (None, None, None)
    assert scene.books.hourly()["accepted"] == 3
    acts = scene.seen("actor, action, detail->>'from', detail->>'to'", "operator_audit")
    assert acts == [("evidence:sendgrid", "settle", status, "sent")] * 3


async def test_the_relay_settles_emails_that_a_worker_recorded_after_the_event(
    scene: Scene, start: Start, settings: Settings
) -> None:
    leases = await scene.lease(*scene.books.enqueue(3))
    await scene.tell(*(event(lease.email_id) for lease in leases))
    then = Status.HELD, Status.FAILED, Status.PENDING
    await scene.store.record([result(lease, status) for lease, status in zip(leases, then, strict=True)])

    await start(settings)

    await until(lambda: scene.books.statuses() == {"sent": 3})
    assert scene.books.count("operator_audit") == 3


@pytest.mark.parametrize(
    ("later", "status"),
    [(EventKind.ACCEPTED, "failed"), (EventKind.REJECTED, "failed"), (EventKind.DELIVERED, "sent")],
)
async def test_a_held_email_that_the_provider_dropped_fails_and_only_a_delivery_revives_it(
    scene: Scene, later: EventKind, status: str
) -> None:
    email_id = await scene.make(Status.HELD)
    scene.books.change(email_id, dead_letter_due_at=None)

    stored = await scene.tell(event(email_id, EventKind.REJECTED, code="550", detail="Bounced Address"))

    row = scene.books.row(email_id)
    assert stored == Stored(new=1, settled=1)
    assert (row["status"], row["error_type"], row["proven_by"]) == ("failed", "dropped_by_provider", None)
    assert row["last_error"] == "The provider accepted the email, then dropped it: 550 Bounced Address"
    assert row["dead_letter_due_at"] is not None
    assert (await scene.tell(event(email_id, later, happened_at=AT + timedelta(seconds=1)))).settled == (
        status == "sent"
    )
    row = scene.books.row(email_id)
    assert (row["status"], row["proven_by"]) == (status, "sendgrid" if status == "sent" else None)


async def test_a_dropped_email_may_be_sent_again(scene: Scene) -> None:
    (email_id,) = scene.books.enqueue_tried()
    scene.books.change(email_id, publish_due_at=None)

    assert await scene.tell(event(email_id, EventKind.REJECTED)) == Stored(new=1)

    assert scene.books.row(email_id)["publish_due_at"] is not None
    assert [lease.email_id for lease in await scene.lease(email_id)] == [email_id]


async def test_an_email_is_sent_if_only_one_of_several_recipients_was_dropped(scene: Scene) -> None:
    one, each, whole = [await scene.make(Status.HELD, to=[ANN, BOB]) for _ in range(3)]
    dropped = [(one, ANN), (each, ANN), (each, BOB), (whole, None)]

    await scene.tell(*(event(email_id, EventKind.REJECTED, recipient=address) for email_id, address in dropped))

    assert [scene.books.status(email_id) for email_id in (one, each, whole)] == ["sent", "failed", "failed"]


async def test_events_of_other_emails_are_stored_while_a_row_is_locked(scene: Scene) -> None:
    locked, free = scene.books.enqueue_tried(2)
    pool = make_pool(scene.url, name="intake", size=1, lock_seconds=0.2)
    await pool.open()
    events = [event(locked), event(free)]
    with psycopg.connect(scene.url) as other:
        Books(other).lock(locked)

        with pytest.raises(StoreBusy, match="1 emails"):
            await EventIntake(pool, SuppressionRules()).store(events)
        assert (scene.books.status(locked), scene.books.status(free)) == ("pending", "sent")

    assert await EventIntake(pool, SuppressionRules()).store(events) == Stored(new=1, duplicates=1, settled=1)
    await pool.close()


async def test_one_event_that_postgresql_refuses_does_not_stop_the_others(scene: Scene) -> None:
    bad, good = scene.books.enqueue_tried(2)

    assert await scene.tell(event(bad, provider="nul\0"), event(good)) == Stored(new=1, settled=1)
    assert (scene.books.status(bad), scene.books.status(good)) == ("pending", "sent")


async def test_no_event_is_left_out_if_the_statement_itself_is_at_fault(scene: Scene) -> None:
    events = [event(email_id) for email_id in scene.books.enqueue_tried(2)]
    scene.books.connection.execute("alter table email_event alter column detail type integer using null")
    try:
        with pytest.raises(StoreUnavailable, match="42804"):
            await scene.tell(*events)
    finally:
        scene.books.connection.execute("alter table email_event alter column detail type text using null")

    assert await scene.tell(*events) == Stored(new=2, settled=2)


async def test_intakes_that_store_the_same_events_at_once_do_not_deadlock(scene: Scene) -> None:
    events = [event(email_id) for email_id in scene.books.enqueue_tried(50)]

    parts = await asyncio.gather(scene.tell(*events), scene.tell(*events[::-1]))

    assert sum(part.new for part in parts) == 50
    assert scene.books.statuses() == {"sent": 50}
    assert scene.books.hourly()["accepted"] == 50


async def test_an_event_waits_for_a_record_in_progress_and_then_changes_nothing(scene: Scene) -> None:
    email_id = await scene.make(Status.SENDING)
    with psycopg.connect(scene.url) as recording:
        recording.execute("update email_log set status = 'sent', sent_at = now() where email_id = %s", [email_id])
        storing = asyncio.create_task(scene.tell(event(email_id)))
        await until(lambda: scene.books.waiting_for_a_lock("worker-1"))

    assert await storing == Stored(new=1)
    assert scene.books.row(email_id)["proven_by"] is None


# Events that prove less than they say.
MakeEmail = Callable[[Scene], Awaitable[UUID]]


def tried(then: Status | None, *providers: str, **changes: Any) -> MakeEmail:
    """A function that makes an email with a recorded attempt for each provider, or without a status one that no worker
    has leased; then changes its row."""

    async def make_tried(scene: Scene) -> UUID:
        email_id = await scene.make(then, *providers) if then else scene.books.enqueue_one()
        if changes:
            scene.books.change(email_id, **changes)
        return email_id

    return make_tried


async def scheduled(scene: Scene) -> UUID:
    return scene.books.enqueue_one(send_at=datetime.now(UTC) + timedelta(days=1))


async def released(scene: Scene) -> UUID:
    (lease,) = await scene.lease(scene.books.enqueue_one())
    await scene.store.release({lease.email_id: lease.token})
    return lease.email_id


async def lost_with_its_host(scene: Scene) -> UUID:
    email_id = await scene.make(Status.SENDING, "smtp")
    scene.books.change(email_id, locked_until=datetime.now(UTC) - timedelta(hours=1))
    async with scene.outbox() as outbox:
        assert await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())
    return email_id


async def sent_before_a_promotion(scene: Scene) -> UUID:
    email_id = scene.books.enqueue_one()
    scene.books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before) values (2, false, now())"
    )
    return email_id


IMPOSSIBLE: Final = [
    tried(None),
    tried(None, status="cancelled", publish_due_at=None),
    scheduled,
    released,
    tried(Status.FAILED, "twilio", channel="sms"),
    tried(Status.FAILED, "smtp"),
    tried(Status.HELD, "ses"),
    tried(Status.SENT, "smtp"),
    tried(Status.WAITING, "smtp", "ses"),
]
POSSIBLE: Final = [
    tried(Status.SENDING),
    lost_with_its_host,
    sent_before_a_promotion,
    tried(Status.WAITING, "ses", status="held", was_uncertain=True, wait_until=None),  # held after a restore
    tried(Status.SENDING, "smtp"),
    tried(Status.HELD, "sendgrid"),
    tried(Status.SENT, "sendgrid"),
    tried(Status.SENT, "sendgrid", "smtp"),
    tried(Status.FAILED, "smtp", "sendgrid", "ses"),
]


@pytest.mark.parametrize("make_email", IMPOSSIBLE)
async def test_an_event_about_an_email_that_no_worker_sent_through_the_provider_is_stored_and_changes_nothing(
    scene: Scene, make_email: MakeEmail
) -> None:
    scene.books.connection.execute("update outgoing_feed set is_on = true")
    email_id = await make_email(scene)
    before, posts = scene.books.row(email_id), scene.books.count("outgoing_event")
    kinds = EventKind.DELIVERED, EventKind.COMPLAINED, EventKind.REJECTED

    assert [await scene.tell(event(email_id, kind)) for kind in kinds] == [Stored()] * 3
    assert [await scene.tell(event(email_id, kind)) for kind in kinds] == [Stored(duplicates=1)] * 3

    assert scene.seen("doubt") == ["impossible"] * 3
    assert scene.books.row(email_id) == before
    assert (scene.books.count("suppression"), scene.books.count("outgoing_event")) == (0, posts)


@pytest.mark.parametrize("make_email", POSSIBLE)
async def test_an_event_proves_acceptance_if_an_attempt_may_have_used_the_provider(
    scene: Scene, make_email: MakeEmail
) -> None:
    email_id = await make_email(scene)

    assert (await scene.tell(event(email_id))).new == 1

    row = scene.books.row(email_id)
    assert row["status"] == "sent" or (row["status"], row["proven_by"]) == ("sending", "sendgrid")
    assert scene.seen("doubt") == [None]


@pytest.mark.parametrize(
    ("sent_by", "reported_by", "stored"),
    [
        ("sendgrid:acme", "sendgrid:acme", "sendgrid:acme"),
        ("sendgrid:acme", "sendgrid", "sendgrid:acme"),
        ("sendgrid", "sendgrid:acme", None),
        ("sendgrid:acme", "sendgrid:other", None),
        ("sendgrid:acme", "ses", None),
    ],
)
async def test_an_event_proves_an_email_of_its_account_and_that_of_a_provider_one_of_any_account(
    scene: Scene, sent_by: str, reported_by: str, stored: str | None
) -> None:
    email_id = await scene.make(Status.HELD, sent_by)
    other_id = await scene.make(Status.HELD, sent_by, "smtp")  # its row names the last
    given = event(email_id, provider=reported_by), event(other_id, provider=reported_by)

    count = 2 if stored else 0
    assert await scene.tell(*given) == Stored(new=count, settled=count)

    assert scene.books.row(email_id)["proven_by"] == stored
    assert (await scene.tell(*given)).duplicates == 2
    assert (await scene.tell(event(email_id, provider="sendgrid"))).duplicates == (reported_by != "ses")


async def test_an_impossible_event_does_not_count_beside_events_of_its_own_and_other_emails(scene: Scene) -> None:
    unsent = scene.books.enqueue_one()
    dropped, held = [await scene.make(Status.HELD) for _ in range(2)]
    possible = event(dropped, EventKind.REJECTED), event(held)

    stored = await scene.tell(event(unsent), event(dropped, provider="ses"), *possible, event(new_email_id()))

    assert stored == Stored(new=2, unknown=1, settled=2)
    assert [scene.books.status(email_id) for email_id in (unsent, dropped, held)] == ["pending", "failed", "sent"]


# Suppressed recipients.
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Bounce.HARD, "hard_bounce"),
        (EventKind.COMPLAINED, "complaint"),
        (EventKind.UNSUBSCRIBED, "unsubscribe"),
        (Bounce.SOFT, None),
        (Bounce.BLOCKED, None),
    ],
)
async def test_some_events_suppress_the_recipient_for_ever_without_an_address_in_the_clear(
    scene: Scene, what: EventKind | Bounce, reason: str | None
) -> None:
    emails = scene.books.enqueue_tried(5, tenant_id="shop")
    events = [event(email_id, what, recipient="Ann <Ann@Example.org>") for email_id in emails]

    await scene.tell(*events)

    hashed = scene.hash(ANN)
    entry = "shop", hashed, reason, "a•••@example.org", False, None
    columns = "tenant_id, address_hash, reason, masked, is_domain, expires_at"
    assert scene.seen(columns, "suppression") == ([entry] if reason else [])
    sources = {(each.email_id, each.key(hashed)) for each in events}
    assert set(scene.seen("source_email_id, source_event_key", "suppression")) <= sources


async def test_an_event_that_the_provider_repeats_never_brings_a_removed_entry_back(scene: Scene) -> None:
    bounced = event(scene.books.enqueue_tried()[0], Bounce.HARD)
    await scene.tell(bounced)
    unsuppress(scene.books.connection, ANN)

    await scene.tell(bounced)

    assert scene.books.count("suppression") == 0


async def test_a_complaint_that_names_several_recipients_of_an_email_suppresses_none(scene: Scene) -> None:
    (unclear,) = scene.books.enqueue_tried(to=[ANN, BOB])
    (clear,) = scene.books.enqueue_tried(to=CEM)
    accused = (unclear, ANN), (unclear, BOB), (clear, CEM)

    await scene.tell(*(event(email_id, EventKind.COMPLAINED, recipient=each) for email_id, each in accused))

    assert scene.seen("masked", "suppression") == ["c•••@example.org"]


async def test_an_address_has_one_entry_and_one_that_ends_earlier_is_replaced(scene: Scene) -> None:
    suppress(scene.books.connection, ANN, expires_in="1 day")
    suppress(scene.books.connection, BOB)
    emails = scene.books.enqueue_tried(4, to=[ANN, BOB, CEM])
    complaints = [
        event(each, EventKind.COMPLAINED, recipient=to) for each, to in zip(emails, (ANN, BOB, CEM), strict=False)
    ]

    await scene.tell(*complaints, event(emails[3], Bounce.HARD, recipient=CEM))

    assert scene.seen("masked", "suppression") == [f"{name}•••@example.org" for name in "abc"]
    reasons = dict(scene.seen("masked, reason", "suppression"))
    assert (reasons["a•••@example.org"], reasons["b•••@example.org"]) == ("complaint", "hard_bounce")
    assert scene.seen("expires_at", "suppression") == [None] * 3


async def test_only_the_configured_events_suppress_and_an_entry_ends_after_the_configured_days(scene: Scene) -> None:
    given = {"DATABASE_URL": "postgresql://db/x", "AMQP_URL": "amqp://mq/", "PROVIDERS": "capture"}
    settings = load({f"DISPATCHER_{name}": value for name, value in given.items()})
    assert suppression_rules(settings) == SuppressionRules()
    emails = scene.books.enqueue_tried(2, to=[ANN, BOB])
    events = event(emails[0], Bounce.HARD), event(emails[1], EventKind.COMPLAINED, recipient=BOB)

    await scene.tell(*events, reasons=frozenset([SuppressionReason.COMPLAINT]), days=30)

    ((masked, reason, lasts),) = scene.seen("masked, reason, expires_at - created_at", "suppression")
    assert (masked, reason) == ("b•••@example.org", "complaint")
    assert lasts > timedelta(days=29)


async def test_soft_bounces_of_several_emails_suppress_if_that_is_configured(scene: Scene) -> None:
    emails = scene.books.enqueue_tried(3)
    twice = event(emails[0], Bounce.SOFT), event(emails[0], Bounce.SOFT, happened_at=AT - timedelta(1))
    doubtful = [event(each, Bounce.SOFT, provider="smtp") for each in scene.books.enqueue_tried(3, cc=BOB)]

    for events in twice, [event(emails[1], Bounce.SOFT)], doubtful:
        await scene.tell(*events, soft_bounces=3)
        assert scene.books.count("suppression") == 0
    await scene.tell(event(emails[2], Bounce.SOFT), soft_bounces=3)

    assert scene.seen("reason", "suppression") == ["soft_bounce"]


@pytest.mark.parametrize(
    ("provider", "what"),
    [
        ("sendgrid", Bounce.HARD),
        ("ses", EventKind.COMPLAINED),
        ("twilio", EventKind.UNSUBSCRIBED),
        ("smtp", Bounce.HARD),
        ("smtp", EventKind.COMPLAINED),
    ],
)
@pytest.mark.parametrize("has_content", [True, False])
async def test_an_event_suppresses_only_an_address_to_which_the_email_was_sent(
    scene: Scene, provider: str, what: EventKind | Bounce, has_content: bool
) -> None:
    (email_id,) = scene.books.enqueue_tried(to="Ann <Ann@Example.org>", cc="Ann <ANN@example.org>")
    if not has_content:
        scene.books.connection.execute("delete from email_content")

    for each in (BOB, ANN):
        await scene.tell(event(email_id, what, provider=provider, recipient=each))

    assert scene.seen("masked", "suppression") == ["a•••@example.org"]
    assert scene.seen("doubt") == ["recipient", None]


@pytest.mark.parametrize("others", [{"to": [ANN, BOB]}, {"cc": BOB}, {"bcc": BOB}])
@pytest.mark.parametrize("what", [Bounce.HARD, EventKind.COMPLAINED])
async def test_a_message_of_one_of_several_recipients_suppresses_none(
    scene: Scene, others: dict[str, Any], what: EventKind | Bounce
) -> None:
    (email_id,) = scene.books.enqueue_tried(**others)

    for each in (ANN, BOB):
        await scene.tell(event(email_id, what, provider="smtp", recipient=each))

    assert scene.seen("doubt") == ["recipient"] * 2
    assert scene.books.count("suppression") == 0


# What an operator sees of the events.
async def test_the_history_shows_events_with_the_recipients_position(scene: Scene) -> None:
    (email_id,) = scene.books.enqueue_tried(to=[ANN, "Bob <bob@example.org>"], cc=[CEM])
    await scene.tell(
        event(email_id, recipient="CEM@example.org"),
        event(email_id, Bounce.HARD, recipient=BOB, code="5.1.1"),
        event(email_id, EventKind.OPENED, recipient=None),
        event(email_id, EventKind.COMPLAINED, recipient="stranger@example.org"),
    )

    async with await connect_async(scene.url, name="test") as session:
        story = await find_history(session, email_id)
        scene.books.connection.execute("delete from email_content")
        later = await find_history(session, email_id)

    assert story is not None
    positions = {each.kind: each.recipient for each in story.events}
    assert positions == {"delivered": 3, "bounced": 2, "opened": None, "complained": None}
    assert "example.org" not in str(story.events)
    assert later is not None
    assert {each.recipient for each in later.events} == {None}


# Concurrent requests share a transaction; a locked email delays only the requests that concern it.
def events(count: int = 1) -> list[ProviderEvent]:
    return [event(new_email_id()) for _ in range(count)]


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([1] * 100, [100]),
        ([BATCH - 1, 1, 1, 2 * BATCH], [BATCH, 1, 2 * BATCH]),  # a request is never split
        ([0], []),
    ],
)
async def test_concurrent_requests_share_a_batch_up_to_a_limit(sizes: list[int], batches: list[int]) -> None:
    sink = Recorder()
    batcher = EventBatcher(sink)

    await asyncio.gather(*(batcher.store(events(size)) for size in sizes))

    assert [len(batch) for batch in sink.batches] == batches


async def test_an_outage_fails_every_request_of_the_batch_and_the_next_batch_is_stored() -> None:
    sink = Recorder(faults=[StoreUnavailable("away")])
    batcher = EventBatcher(sink)

    found = await asyncio.gather(*(batcher.store(events()) for _ in range(3)), return_exceptions=True)
    await batcher.store(events())

    assert [type(each) for each in found] == [StoreUnavailable] * 3
    assert len(sink.batches) == 1


async def test_a_locked_email_fails_only_its_own_request() -> None:
    locked = events()

    class Locking(Recorder):
        async def store(self, given: Sequence[ProviderEvent]) -> None:
            if locked[0] in given:
                raise StoreBusy("locked")

    storing = map(EventBatcher(Locking()).store, (events(), locked, events()))
    found = await asyncio.gather(*storing, return_exceptions=True)

    assert [type(each) for each in found] == [type(None), StoreBusy, type(None)]


async def test_a_client_that_disconnects_does_not_disturb_the_others() -> None:
    sink = Recorder()
    batcher = EventBatcher(sink)
    leaving, staying = (asyncio.create_task(batcher.store(events())) for _ in range(2))
    await asyncio.sleep(0)

    leaving.cancel()
    await staying

    assert len(sink.batches[0]) == 2
    with pytest.raises(asyncio.CancelledError):
        await leaving
