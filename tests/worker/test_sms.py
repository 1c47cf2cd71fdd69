"""SMS pass through the same outbox, leases and results as emails, and reach only providers of SMS."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import psycopg
from structlog.testing import capture_logs

from dispatcher import Sms, enqueue_many
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept, answer

NUMBER = "+4915112345678"
ENTRIES = "select masked, reason from suppression"


def sms_provider() -> ScriptedProvider:
    return ScriptedProvider("twilio", Capabilities(copies=1, channel="sms"))


async def enqueued(bench: Bench, count: int = 1, **changes: Any) -> list[UUID]:
    before = len(bench.books.rows())
    usual = {"to": NUMBER, "text": "Your code is 1234.", **changes}
    messages = [Sms(message_key=f"sms-{before + number}", **usual) for number in range(count)]
    with psycopg.connect(bench.settings().database_url) as connection:
        sms_ids = [each.email_id for each in enqueue_many(connection, messages)]
    await bench.deliver(sms_ids)
    return sms_ids


async def test_each_channel_is_sent_by_its_providers(bench: Bench) -> None:
    emails, texts = ScriptedProvider("smtp"), sms_provider()
    seen: list[OutgoingEmail] = []

    async def look(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        seen.append(email)
        return await accept(provider, email, attempt)

    texts.always = look
    await bench.start([emails, texts])

    sms_ids = await enqueued(bench, 20, sender="Example")
    email_ids = await bench.enqueue(20)

    await bench.settled({"sent": 40})
    assert (emails.accepted, texts.accepted) == (dict.fromkeys(email_ids, 1), dict.fromkeys(sms_ids, 1))
    assert {(each.channel, each.to, each.sender, each.text) for each in seen} == {
        ("sms", (NUMBER,), "Example", "Your code is 1234.")
    }
    assert {bench.books.row(each)["channel"] for each in sms_ids} == {"sms"}
    assert {bench.books.row(each)["channel"] for each in email_ids} == {None}
    for table in ("email_log", "email_recipient", "email_idempotency"):
        rows = bench.books.select(f"select t::text as text from {table} as t")  # noqa: S608 - our own names
        assert all(NUMBER[1:] not in row["text"] for row in rows), "only the content has the number"
    await bench.nothing_left_on_the_queue()


async def test_an_sms_waits_for_a_host_with_a_provider_and_delays_no_email(bench: Bench) -> None:
    worker = await bench.start([ScriptedProvider("smtp")], PREFETCH="2")
    with capture_logs() as logs:
        sms_ids = await enqueued(bench, 10)

        email_ids = await bench.enqueue(5)

        await bench.settled({"pending": 10, "sent": 5})
        await until(lambda: all(bench.due_in_seconds(each) > 0 for each in sms_ids))
        await until(lambda: worker.in_flight == 0)
    (line,) = [each for each in logs if each["event"] == "email.no_channel"]
    assert (line["channel"], line["count"]) == ("sms", 1)
    assert {bench.books.row(each)["attempt_count"] for each in sms_ids} == {0}
    assert {bench.books.row(each)["attempt_count"] for each in email_ids} == {1}


NO_NUMBER: Final = "The recipient must be a phone number with its country code,"
NOT_ALLOWED: Final[list[tuple[list[str], str]]] = [
    (["+18765551234"], "The recipient is a number of JM, which DISPATCHER_SMS_COUNTRIES"),
    (["+15551234567"], "The recipient is a number that no country is known to assign;"),
    (["+499001234567"], "The recipient is a premium-rate number:"),
    (["+881612345678"], "The recipient has the calling code +881, which belongs to no country:"),
    (["ann@example.org"], NO_NUMBER),
    ([], NO_NUMBER),
]


async def test_stored_sms_that_are_too_long_or_whose_number_is_not_allowed_here_are_not_sent(bench: Bench) -> None:
    texts = sms_provider()
    sms_ids = await enqueued(bench, len(NOT_ALLOWED))
    for email_id, (to, _) in zip(sms_ids, NOT_ALLOWED, strict=True):
        bench.books.connection.execute(
            "update email_content set recipients = jsonb_build_object('to', %s::text[]) where email_id = %s",
            [to, email_id],
        )
    (long,) = await enqueued(bench, text="a" * 307)
    (allowed,) = await enqueued(bench)

    await bench.start([texts], SMS_COUNTRIES="DE,US", SMS_MAX_SEGMENTS="2")

    await bench.settled({"failed": len(NOT_ALLOWED) + 1, "sent": 1})
    for email_id, (_, words) in zip(sms_ids, NOT_ALLOWED, strict=True):
        row = bench.books.row(email_id)
        assert (row["error_type"], row["last_error"][: len(words)]) == (Reason.REJECTED_RECIPIENT, words)
    assert bench.books.row(long)["last_error"] == (
        "The text takes 3 segments (GSM-7); DISPATCHER_SMS_MAX_SEGMENTS allows 2."
    )
    assert (texts.accepted, texts.calls) == ({allowed: 1}, [allowed])


async def test_a_recipient_who_opted_out_is_suppressed_for_the_next_sms(bench: Bench) -> None:
    texts = sms_provider()
    texts.always = answer(Rejected(Reason.OPTED_OUT, "unsubscribed recipient", "400 21610"))
    await bench.start([texts])
    await enqueued(bench)
    await bench.settled({"failed": 1})
    await until(lambda: bench.books.select(ENTRIES) != [])

    assert bench.books.select(f"{ENTRIES} where tenant_id = 'default'") == [
        {"masked": "+49•••78", "reason": "unsubscribe"}
    ]
    texts.always = accept

    async def the_next_fails() -> bool:  # a worker reads the changed suppressions every 0.75 s
        (email_id,) = await enqueued(bench)
        await until(lambda: bench.books.row(email_id)["status"] in ("sent", "failed"))
        return bool(bench.books.row(email_id)["error_type"] == "suppressed")

    await until_answer(the_next_fails)
