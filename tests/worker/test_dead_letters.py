"""If an operator moves a dead letter to a send queue, it goes back to the DLQ, and the log names the command that sends
the email again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from tests.ops.dead_emails import DeadEmails
from tests.worker.bench import Bench


@pytest.fixture
def dead_emails(bench: Bench) -> DeadEmails:
    return DeadEmails(bench.books, bench.rabbit, bench.topology)


@pytest.mark.parametrize(
    ("columns", "fields"),
    [
        pytest.param({}, {}, id="failed"),
        pytest.param({"status": "held"}, {}, id="held"),
        pytest.param({"expires_at": datetime(2026, 1, 1, tzinfo=UTC)}, {}, id="expired"),
        pytest.param({}, {"attempts": 2}, id="of an earlier failure"),
    ],
)
async def test_a_dead_letter_moved_to_the_send_queue_goes_back_to_the_dlq(
    bench: Bench, dead_emails: DeadEmails, columns: dict[str, object], fields: dict[str, object]
) -> None:
    (email_id,) = dead_emails.create(**columns)  # type: ignore[arg-type]
    row, letter = bench.books.row(email_id), dead_emails.dead_letter(email_id, **fields)
    await bench.start()

    with capture_logs() as logs:
        await bench.rabbit.publish(bench.topology.queue, letter)
        (back,) = await bench.rabbit.take_all(bench.topology.dlq, 1)

    await bench.nothing_left_on_the_queue()
    assert (back.body, bench.books.row(email_id), bench.provider.calls) == (letter, row, [])
    (remedy,) = [each["remedy"] for each in logs if each["event"] == "message.returned"]
    assert f"dispatcher dlq replay {email_id}" in remedy


async def test_a_plain_pointer_to_a_failed_email_or_an_impossible_dead_letter_is_acked(
    bench: Bench, dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create()
    await bench.start()

    await bench.deliver([email_id])
    await bench.rabbit.publish(bench.topology.queue, dead_emails.dead_letter(email_id, attempts=2**40))
    neighbours = await bench.enqueue(20)

    await bench.settled({"sent": len(neighbours), "failed": 1})
    await bench.nothing_left_on_the_queue()
