"""How many emails a publisher may publish to a queue that must stay shallow, and how many of them share a message."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.credit import EMPTY_EMAILS, LEAST_SHARE, MESSAGES_PER_CONSUMER, QueueCredit
from dispatcher.broker.topology import FoundQueue

MOST = 16
BATCH = 500
MANY = 1_000_000
"""So many emails that workers who took them between two counts are fast, however slow this machine is."""


class Queue:
    """A queue whose messages are always taken at once, unless a test sets `messages`."""

    def __init__(self) -> None:
        self.messages, self.consumers = 0, 2

    async def find(self) -> FoundQueue:
        return FoundQueue(self.messages, self.consumers)


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
async def credit(queue: Queue) -> AsyncIterator[QueueCredit]:
    """A credit that knows the result of its first count."""
    credit = QueueCredit(queue.find, most_per_message=MOST, prefetch=256)
    assert credit.emails == 0
    await credit.counted()
    yield credit
    await credit.close()


async def publish(credit: QueueCredit, *batches: int) -> None:
    """Publishes batches of emails. Workers take each batch before the next count, unless `Queue.messages` is set."""
    for emails in batches:
        credit.take(emails)
        credit.note_messages(emails, emails)
        assert credit.emails == 0  # and starts a count
        await credit.counted()


async def test_a_small_rest_of_the_credit_is_not_published(credit: QueueCredit) -> None:
    assert credit.emails == EMPTY_EMAILS
    credit.take(EMPTY_EMAILS - EMPTY_EMAILS // LEAST_SHARE)
    assert credit.emails == 0


@pytest.mark.parametrize(
    ("consumers", "batches", "emails", "per_message"),
    [
        pytest.param(2, [MANY, 3 * MANY], BATCH, MOST, id="a backlog of fast workers"),
        *((2, [MANY, 3 * MANY], few, 1) for few in (1, 2, 2 * MESSAGES_PER_CONSUMER)),
        *((each, [MANY, 3 * MANY], 3 * each * MESSAGES_PER_CONSUMER, 3) for each in (1, 2, 5)),
        pytest.param(2, [MANY], BATCH, 1, id="emails that only fill the prefetch windows"),
        pytest.param(0, [MANY, 3 * MANY], BATCH, 1, id="no consumers"),
    ],
)
async def test_emails_share_messages_as_far_as_workers_are_fast_and_each_can_get_several(
    queue: Queue, credit: QueueCredit, consumers: int, batches: list[int], emails: int, per_message: int
) -> None:
    queue.consumers = consumers
    await publish(credit, *batches)

    assert credit.per_message(emails) == per_message


async def test_emails_share_no_message_after_workers_have_taken_none(queue: Queue, credit: QueueCredit) -> None:
    await publish(credit, MANY, 3 * MANY)
    queue.messages = 10 * MANY
    await publish(credit, 10 * MANY)

    assert credit.per_message(BATCH) == 1


async def test_ready_messages_count_as_the_emails_that_they_point_to(queue: Queue, credit: QueueCredit) -> None:
    credit.take(840)
    credit.note_messages(200, 200)
    credit.note_messages(40, 640)
    queue.messages = 40
    assert credit.emails == 0  # and starts a count
    await credit.counted()

    # Workers took 200 emails, so the target is at most 500, and 640 are ready. The average message has 3.5 emails.
    assert credit.emails == 0


async def test_emails_whose_messages_are_not_written_do_not_count_as_taken(queue: Queue, credit: QueueCredit) -> None:
    credit.take(500)
    credit.note_messages(500, 500)
    credit.take(500)
    queue.messages = 500
    assert credit.emails == 0  # and starts a count
    await credit.counted()

    assert credit.emails == 0
