"""Topics of consent: whatever happens to a recipient, the statements suppress as a model of one line does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import count, product
from typing import Any, Final
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.suppressions import AddSuppressions, ListSuppressions, LookUp, RemoveSuppressions
from dispatcher.domain.event import OF_TOPIC, Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import Recipient, SuppressionRules
from dispatcher.ops.suppressions import unsubscribe
from dispatcher.store.events import EventRow, store_events
from dispatcher.store.suppressions import SuppressionReader
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.suppression import SuppressedRecipients
from tests.providers.emails import an_email
from tests.store.books import Books
from tests.store.machine import Sessions
from tests.store.suppressing import hasher_of
from tests.waiting import until

ADDRESSES: Final = ("ann@example.org", "bob@example.org")
TOPICS: Final = (None, "newsletter", "offers")
DOMAIN: Final = "example.org"
WHO: Final = Who(Face.COMMAND, "ann@ops-1")
Entry = tuple[str, str | None]
"""A recipient, and a topic; None: all emails."""
_numbers = count(1)
emails = st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(TOPICS))
entries = st.tuples(st.sampled_from((*ADDRESSES, DOMAIN)), st.sampled_from(TOPICS))
STEPS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("click"), emails, st.booleans()),
        st.tuples(
            st.just("event"),
            emails,
            st.sampled_from([*Bounce, EventKind.COMPLAINED, EventKind.UNSUBSCRIBED, OF_TOPIC, EventKind.DELIVERED]),
        ),
        st.tuples(st.just("add"), entries, st.none()),
        st.tuples(st.just("remove"), entries, st.none()),
        st.tuples(st.just("remove by id"), entries, st.none()),
    ),
    min_size=1,
    max_size=8,
)


class World:
    """A tenant with an email of each topic to each address, and the entries that it should have."""

    def __init__(self, sessions: Sessions) -> None:
        self.tenant_id = f"tenant-{next(_numbers)}"
        self.session, books = sessions.relay, sessions.books
        self.hasher = hasher_of(books.connection)
        self.emails: dict[Entry, UUID] = {
            each: books.enqueue_tried(to=each[0], topic=each[1], tenant_id=self.tenant_id)[0]
            for each in product(ADDRESSES, TOPICS)
        }
        self.reader = SuppressionReader(sessions.pool)
        self.entries: set[Entry] = set()

    async def click(self, email: Entry, is_whole: bool) -> None:
        token = self.hasher.unsubscribe_token(self.emails[email], email[0])
        left = None if is_whole else email[1]
        assert await unsubscribe(self.session, token, is_whole=is_whole) == [left]
        self.entries.add((email[0], left))

    async def event(self, email: Entry, what: Any) -> None:
        kind = {OF_TOPIC: EventKind.UNSUBSCRIBED}.get(what, EventKind.BOUNCED if isinstance(what, Bounce) else what)
        event = ProviderEvent(
            email_id=self.emails[email],
            provider="sendgrid",
            kind=kind,
            bounce=what if isinstance(what, Bounce) else None,
            code=what if what == OF_TOPIC else None,
            recipient=email[0],
            happened_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(_numbers)),
        )
        await store_events(self.session, [EventRow.of(event, self.hasher)], SuppressionRules())
        if what == OF_TOPIC:
            self.entries.add(email)
        elif what in (Bounce.HARD, EventKind.COMPLAINED, EventKind.UNSUBSCRIBED):
            self.entries.add((email[0], None))

    async def add(self, entry: Entry, _: None) -> None:
        recipient, topic = entry
        asked = AddSuppressions(recipients=(recipient,), topic=topic, tenant_id=self.tenant_id)
        assert (await run(self.session, asked, WHO)).added == (entry not in self.entries)
        self.entries.add(entry)

    async def remove(self, entry: Entry, _: None) -> None:
        recipient, topic = entry
        asked = RemoveSuppressions(recipients=(recipient,), topic=topic, tenant_id=self.tenant_id)
        assert (await run(self.session, asked, WHO)).removed == (entry in self.entries)
        self.entries.discard(entry)

    async def remove_by_id(self, entry: Entry, _: None) -> None:
        looked_up = await run(self.session, LookUp(recipient=entry[0], tenant_id=self.tenant_id), WHO)
        ids = tuple(each.id for each in looked_up if (each.is_domain, each.topic) == (entry[0] == DOMAIN, entry[1]))
        assert len(ids) == (entry in self.entries)
        if ids:
            await run(self.session, RemoveSuppressions(ids=ids, tenant_id=self.tenant_id), WHO)
        self.entries.discard(entry)

    async def compare(self) -> None:
        """The entries that operators see, the emails that the query stops, and those about which a worker asks."""
        listed = await run(self.session, ListSuppressions(tenant_id=self.tenant_id), WHO)
        masked = {(Recipient.parse(recipient).masked, topic) for recipient, topic in self.entries}
        assert {(each.recipient, each.topic) for each in listed.rows} == masked
        assert len(listed.rows) == len(self.entries)
        stopped = {
            email for email in self.emails if not self.entries.isdisjoint(product((email[0], DOMAIN), (None, email[1])))
        }
        hashes = {each: [(1, found) for found in self.hasher.suppressing_hashes(*each)] for each in self.emails}
        found = await self.reader.find({self.emails[each]: asked for each, asked in hashes.items()})
        assert found.keys() == {self.emails[each] for each in stopped}
        memory = SuppressedRecipients(self.reader, StoreOutage())
        reading = asyncio.create_task(memory.run())
        await until(lambda: memory.is_current)
        asks = {each for each in self.emails if memory.may_concern(an_email(to=each[:1]), self.tenant_id, each[1])}
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert asks == stopped


@pytest.fixture
def sessions(tables_url: str, books: Books) -> Iterator[Sessions]:
    with closing(Sessions(tables_url, books)) as opened:
        yield opened


def test_only_the_emails_of_a_left_topic_stop_and_for_all_others_an_entry_for_all_counts(sessions: Sessions) -> None:
    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def search(steps: list[tuple[str, Entry, Any]]) -> None:
        async def live() -> None:
            world = World(sessions)
            for name, what, how in steps:
                step: Callable[[Entry, Any], Any] = getattr(world, name.replace(" ", "_"))
                await step(what, how)
                await world.compare()

        sessions.run(live())

    search()
