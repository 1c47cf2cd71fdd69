"""The delivery state of an email: the worst of what its events say, in whichever order and batches they arrive."""

from __future__ import annotations

from itertools import count
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.actions.dlq import select
from dispatcher.actions.emails import ListEmails
from dispatcher.actions.runner import Face, Who, run
from dispatcher.domain.event import DELIVERY_FILTERS, Bounce, Delivery, EventKind
from dispatcher.domain.status import Status
from dispatcher.monitor.upkeep import BACKFILL_PAUSE_SECONDS, DeliveryBackfill
from dispatcher.ops.acts import Act
from dispatcher.ops.replaying import create
from dispatcher.store.connections import connect_async
from tests.events.requests import ANN
from tests.events.scene import Scene, event

WHAT: Final[tuple[EventKind | Bounce, ...]] = (*(each for each in EventKind if each != EventKind.BOUNCED), *Bounce)
SAID: Final[dict[EventKind | Bounce, Delivery | None]] = {
    EventKind.ACCEPTED: None,
    EventKind.DEFERRED: Delivery.DELAYED,
    EventKind.DELIVERED: Delivery.DELIVERED,
    EventKind.OPENED: Delivery.OPENED,
    EventKind.CLICKED: Delivery.CLICKED,
    EventKind.UNSUBSCRIBED: Delivery.UNSUBSCRIBED,
    Bounce.SOFT: Delivery.BOUNCED_SOFT,
    Bounce.BLOCKED: Delivery.BOUNCED_BLOCKED,
    EventKind.REJECTED: Delivery.REJECTED,
    Bounce.HARD: Delivery.BOUNCED_HARD,
    EventKind.COMPLAINED: Delivery.COMPLAINED,
}
"""What each kind of event says, from the best to the worst."""
RANKS: Final = [None, *Delivery]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from([ANN, "bob@example.org", None])), max_size=4),
        max_size=4,
    ),
    st.sampled_from([Status.PENDING, Status.SENDING, Status.SENT, Status.HELD]),
)
async def test_the_worst_of_all_events_counts_in_any_order_and_twice(
    scene: Scene, batches: list[list[tuple[EventKind | Bounce, str | None]]], status: Status
) -> None:
    email_id = await scene.make(status)
    number = count()  # otherwise two bounces of a recipient at one instant are the same event
    told = [
        [event(email_id, what, recipient=whom, distinction=f"{next(number)}") for what, whom in batch]
        for batch in batches
    ]

    for batch in (*told, *told[:1]):
        await scene.tell(*batch)

    said = [SAID[what] for batch in batches for what, _ in batch]
    assert scene.books.row(email_id)["delivery"] == max(said, key=RANKS.index, default=None)


@pytest.mark.parametrize("what", WHAT)
async def test_each_kind_of_event_is_a_state_that_lists_find(scene: Scene, what: EventKind | Bounce) -> None:
    told, untold = [await scene.make(Status.SENT) for _ in range(2)]
    await scene.tell(event(told, what), event(untold, what, provider="ses"))  # impossible: it was never at SES

    found = {}
    for word in DELIVERY_FILTERS:
        async with scene.pool.connection() as session:
            page = await run(session, ListEmails(delivery=word), Who(Face.COMMAND))
        found[word] = {row.id: row.delivery for row in page.rows}

    state = SAID[what]
    words = {"none" if state is None else state.value, *(["bounced"] if isinstance(what, Bounce) else [])}
    assert {word for word in found if told in found[word]} == words
    assert {word for word in found if untold in found[word]} == {"none"}
    assert all(rows.get(told, state) == state for rows in found.values())
    kind, bounce = ("bounced", what.value) if isinstance(what, Bounce) else (what.value, None)
    assert Delivery.of(kind, bounce) == state


def forget_deliveries(scene: Scene) -> None:
    """Makes the tables those of an earlier release, just after the upgrade."""
    scene.books.connection.execute("update email_log set delivery = null")
    scene.books.connection.execute("update email_event set received_at = received_at - interval '10 minutes'")
    scene.books.connection.execute(
        "insert into delivery_backfill (read_until) select min(received_at) from email_event"
    )


@pytest.mark.parametrize("most", [1, 2, 100])
async def test_emails_from_before_an_upgrade_get_their_states_in_bounded_rounds(scene: Scene, most: int) -> None:
    emails = [await scene.make(Status.SENT) for _ in range(3)]
    kinds: tuple[EventKind | Bounce, ...] = Bounce.HARD, EventKind.OPENED, EventKind.ACCEPTED
    for email_id, what in zip(emails, kinds, strict=True):
        await scene.tell(event(email_id, EventKind.DELIVERED), event(email_id, what))
        await scene.tell(event(email_id, EventKind.COMPLAINED, provider="ses"))  # impossible
    forget_deliveries(scene)
    backfill = DeliveryBackfill(scene.pool, most=most)

    waits = [await backfill.run_once()]
    while waits[-1] is not None:
        waits.append(await backfill.run_once())
    scene.books.connection.execute("update delivery_backfill set lasts_until = clock_timestamp()")
    await backfill.run_once()

    states = [scene.books.row(each)["delivery"] for each in emails]
    assert states == ["bounced_hard", "opened", "delivered"]
    assert set(waits[:-1]) <= {BACKFILL_PAUSE_SECONDS}
    assert len(waits) >= 9 / most
    assert scene.books.count("delivery_backfill") == 0


async def test_the_backfill_goes_on_while_a_host_of_an_earlier_release_may_store_events(scene: Scene) -> None:
    email_id, later = [await scene.make(Status.SENT) for _ in range(2)]
    await scene.tell(event(email_id))
    forget_deliveries(scene)
    backfill = DeliveryBackfill(scene.pool)
    assert await backfill.run_once() is None

    await scene.tell(event(later, Bounce.SOFT))
    scene.books.connection.execute("update email_log set delivery = null where email_id = %s", [later])
    await backfill.run_once()
    assert scene.books.row(later)["delivery"] is None  # a transaction that stores older events may still be open
    scene.books.connection.execute(
        "update email_event set received_at = received_at - interval '6 minutes' where email_id = %s", [later]
    )

    assert await backfill.run_once() is None
    assert scene.books.row(later)["delivery"] == "bounced_soft"
    assert scene.books.count("delivery_backfill") == 1


async def test_an_email_that_was_dropped_begins_without_a_state_when_it_is_replayed(scene: Scene) -> None:
    dropped, bounced = [await scene.make(Status.HELD) for _ in range(2)]
    await scene.tell(event(dropped, EventKind.REJECTED), event(bounced, Bounce.HARD))
    scene.books.change(bounced, status="failed", error_type="partly_delivered", proven_by=None)
    assert scene.books.row(dropped)["delivery"] == "rejected"

    async with await connect_async(scene.url, name="operator") as session:
        for email_id in (dropped, bounced):
            await create(session, select(email_ids=(email_id,)), Act.of("ann", "it is lifted"), include_held=True)

    assert [scene.books.row(each)["delivery"] for each in (dropped, bounced)] == [None, "bounced_hard"]
