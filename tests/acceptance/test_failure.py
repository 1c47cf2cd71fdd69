"""A bad email never blocks the queue: it fails immediately, and all other emails are sent."""

from __future__ import annotations

import uuid

import orjson
import pika

from dispatcher import OnUncertain
from tests.acceptance.books import announced_in
from tests.acceptance.harness import CONNECTIONS, WORKERS, Host, emails, stop
from tests.supervisor.program import eventually


def test_rejected_emails_fail_alone_and_their_dead_letters_contain_nothing_private(host: Host) -> None:
    host.sink()
    refused = host.enqueue(emails(10, name="refused", to=lambda number: f"refused-{number}@private.example"))
    good = host.enqueue(emails(100, name="good"))
    run = host.run()

    books = host.await_finished(refused | good)

    stop(run)
    books.assert_balanced()
    assert books.by_status == {"failed": refused, "sent": good}
    dead_letters = host.rabbit.read_all(host.topology.dlq)
    assert announced_in(dead_letters) == dict.fromkeys(refused, 1)
    for dead_letter in dead_letters:
        fields = orjson.loads(dead_letter.body)
        number = fields["message_key"].removeprefix("refused-")
        assert fields["status"] == "failed"
        assert fields["error_type"] == "rejected_recipient"
        assert fields["attempts"] == 1
        assert fields["provider"] == "smtp"
        assert fields["correlation_id"] == dead_letter.properties.correlation_id == f"order-{number}"
        assert "User unknown" in fields["error"]
        assert dead_letter.properties.delivery_mode == pika.DeliveryMode.Persistent.value
        whole = dead_letter.body + repr(dead_letter.properties).encode()
        for private in (b"private.example", b"refused-%s@" % number.encode(), b"shop@", b"Receipt", b"Thank you"):
            assert private not in whole


def test_greylisted_emails_are_sent_with_the_second_attempt(host: Host) -> None:
    host.sink()
    ids = host.enqueue(emails(20, to=lambda number: f"greylisted-{number}@example.org"))
    run = host.run()

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 20}
    assert {row.attempt_count for row in host.rows().values()} == {2}
    assert not host.rabbit.read_all(host.topology.dlq)


def test_emails_that_are_always_deferred_fail_after_the_last_attempt(host: Host) -> None:
    host.sink("--reply", "rcpt=452 4.2.2 mailbox full")
    ids = host.enqueue(emails(20))
    run = host.run(MAX_ATTEMPTS=3)

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"failed": 20}
    assert {row.attempt_count for row in host.rows().values()} == {3}


def test_a_provider_outage_affects_only_in_flight_emails(host: Host) -> None:
    sink = host.sink("--latency-ms", "100")
    run = host.run()
    host.await_consumers()
    ids = host.enqueue(emails(800))  # both workers still have emails when the provider goes down
    for number in range(WORKERS):
        host.await_work(run.pid_of(f"worker {number}"))

    sink.kill()
    run.await_events("provider.paused", WORKERS)
    sink.become()

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.count("failed") == 0
    assert books.count("held") <= WORKERS * CONNECTIONS
    assert books.count("sent") + books.count("held") == 800


def test_emails_whose_answer_is_lost_are_held_and_never_sent_again(host: Host) -> None:
    # The server accepts the email, and closes the connection without an answer. So the outcome is unknown.
    host.sink("--reply", "answer=close")
    ids = host.enqueue(emails(20))
    run = host.run()

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"held": 20}
    assert host.recipient.delivered() == dict.fromkeys(ids, 1)
    for dead_letter in host.rabbit.read_all(host.topology.dlq):
        assert orjson.loads(dead_letter.body)["error_type"] == "outcome_unknown"


def test_emails_whose_answer_is_lost_are_resent_under_policy_resend_while_attempts_are_left(host: Host) -> None:
    host.sink("--reply", "answer=close")
    held = host.enqueue(emails(5, name="held"))
    resent = host.enqueue(emails(5, name="resent", on_uncertain=OnUncertain.RESEND))
    run = host.run(MAX_ATTEMPTS=3)

    books = host.await_finished(held | resent)

    stop(run)
    assert not books.lost
    assert host.recipient.delivered() == dict.fromkeys(held, 1) | dict.fromkeys(resent, 3)
    assert books.by_status == {"held": held | resent}


def test_poison_messages_are_dead_lettered_and_other_emails_are_sent(host: Host) -> None:
    ids = host.enqueue(emails(100, name="good"))
    known = str(next(iter(ids)))
    garbage = [
        b"",
        b"\x00\xff\xfe not json",
        b"[]",
        b'{"v": 1}',
        b'{"v": 99, "email_id": "%s", "message_key": "good-0"}' % known.encode(),
        b'{"v": 1, "email_id": "not-a-uuid", "message_key": "x"}',
        orjson.dumps({"v": 1, "email_id": str(uuid.uuid4()), "message_key": "nobody"}),
        orjson.dumps({"v": 1, "email_id": known, "message_key": "somebody else's"}),
        b"[" * 50_000,
        b"x" * 3_000_000,
    ]
    run = host.run()
    run.await_events("broker.connected")

    host.rabbit.publish(host.topology.queue, *garbage)
    more = host.enqueue(emails(100, name="more"))

    books = host.await_finished(ids | more)
    eventually(lambda: host.rabbit.waiting(host.topology.dlq) == len(garbage))
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 200}
    dead_letters = host.rabbit.read_all(host.topology.dlq)
    assert sorted(dead_letter.body for dead_letter in dead_letters) == sorted(garbage)
    assert all(dead_letter.was_rejected for dead_letter in dead_letters)
    assert not run.events("process.exited", level="error")


def test_foreign_properties_do_no_harm(host: Host) -> None:
    ids = host.enqueue(emails(10))
    run = host.run()
    strange = pika.BasicProperties(
        headers={"traceparent": 17, "nested": {"list": [1, None, {"a": b"\xff"}]}},
        correlation_id="\N{SNOWMAN}" * 60,
        content_type="image/png",
        content_encoding="gzip",
        priority=9,
        expiration="3600000",
    )

    host.rabbit.publish(host.topology.queue, b"strange", properties=strange)

    books = host.await_finished(ids)
    eventually(lambda: host.rabbit.waiting(host.topology.dlq) == 1)
    stop(run)
    books.assert_balanced()
    assert [dead_letter.body for dead_letter in host.rabbit.read_all(host.topology.dlq)] == [b"strange"]


def test_a_message_delivered_a_hundred_times_sends_one_email(host: Host) -> None:
    host.sink("--latency-ms", "2000")
    run = host.run(LOG_LEVEL="debug")
    (email_id,) = host.enqueue(emails(1))
    message = orjson.dumps({"v": 1, "email_id": str(email_id), "message_key": "email-0"})
    run.await_events("relay.published")  # the relay publishes one message, in addition to the hundred below
    host.rabbit.publish(host.topology.queue, *[message] * 50)

    books = host.await_finished({email_id})
    host.rabbit.publish(host.topology.queue, *[message] * 50)

    run.await_events("message.duplicated", 100)
    stop(run)
    assert host.rabbit.waiting(host.topology.queue) == 0
    books.assert_balanced()
    assert host.recipient.delivered() == {email_id: 1}
    assert not host.rabbit.read_all(host.topology.dlq)
