"""What a test key enqueues never leaves; its addresses choose the outcome."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import psycopg
import pytest

from dispatcher import Email, Sms, enqueue
from dispatcher.errors import MessageKeyConflict
from dispatcher.store.enqueueing import draft, insert_parameters
from dispatcher.store.queries import query
from tests.store.suppressing import suppress
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.test_sms import sms_provider

CASES: Final = {
    "ann@example.org": ("sent", None),
    "delivered@simulator.invalid": ("sent", "delivered"),
    "Bob <BOUNCED+17@simulator.invalid>": ("sent", "bounced_hard"),
    "complained@simulator.invalid": ("sent", "complained"),
    "deferred@simulator.invalid": ("sent", "delivered"),
    "held@simulator.invalid": ("held", None),
    "suppressed@example.org": ("failed", None),
    "+4915112345678": ("sent", None),
}


def enqueued(bench: Bench) -> dict[UUID, str]:
    usual = {"sender": "shop@example.com", "text": "Hello"}
    messages = [
        Sms(message_key=each, to=each, text="Hello")
        if each.startswith("+")
        else Email(message_key=each, to=each, **usual)  # type: ignore[arg-type]
        for each in CASES
    ]
    drafts = draft(messages, is_test=True)
    with psycopg.connect(bench.settings().database_url) as connection:
        connection.execute(query("enqueue"), insert_parameters(drafts))
    with (
        psycopg.connect(bench.settings().database_url) as connection,
        pytest.raises(MessageKeyConflict, match="ann@"),
    ):
        enqueue(connection, messages[0])
    return {each.email_id: each.email.message_key for each in drafts}


async def test_addresses_choose_the_outcome_of_a_test_and_no_provider_sees_it(bench: Bench) -> None:
    connection, texts = bench.books.connection, sms_provider()
    suppress(connection, "suppressed@example.org")
    connection.execute("update outgoing_feed set is_on = true")
    email_ids = enqueued(bench)
    await bench.start([bench.provider, texts], ALLOW_RECIPIENTS="none")

    await bench.deliver(email_ids)

    def found() -> dict[str, tuple[str, str | None]]:
        return {email_ids[row["email_id"]]: (row["status"], row["delivery"]) for row in bench.books.rows()}

    await until(lambda: found() == CASES)
    assert (bench.provider.calls, texts.calls) == ([], [])
    rows = bench.books.rows()
    assert {(row["channel"], row["dead_letter_due_at"]) for row in rows} == {("test", None)}
    assert {row["provider"] for row in rows if row["status"] != "failed"} == {"simulator"}
    kinds = bench.books.select("select kind, provider from outgoing_event order by 1")
    assert [each["kind"] for each in kinds] == [
        *("bounced", "complained", "delayed", *["delivered"] * 3, "held", *["sent"] * 6, "suppressed")
    ]
    assert bench.books.select("select masked from suppression") == [{"masked": "s•••@example.org"}]
    await bench.nothing_left_on_the_queue()


async def test_a_test_waits_on_a_host_of_an_earlier_release(bench: Bench) -> None:
    """Such a host has no simulator: the channel has no provider there."""
    (email_id,) = [each for each, key in enqueued(bench).items() if key == "ann@example.org"]
    worker = await bench.start(has_simulator=False)

    await bench.deliver([email_id])

    due = "select 1 from email_log where email_id = %s and status = 'pending' and publish_due_at > clock_timestamp()"
    await until(lambda: bench.books.select(due, email_id))
    await until(lambda: worker.in_flight == 0)
    assert bench.provider.calls == []
