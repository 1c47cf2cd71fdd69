"""A server takes only some recipients at a time: each gets the email once, and nobody is left out silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Reason, Rejected, Uncertain
from tests.providers.choosy_server import ChoosyServer, Rule, at_most, choosy_server
from tests.store.suppressing import suppress
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider

ANN, BOB, CEM = "ann@example.com", "bob@example.net", "cem@example.org"
MAILBOX_FULL = "452 4.2.2 mailbox full"


def many(count: int) -> list[str]:
    return [f"reader-{number}@list{number % 3}.example" for number in range(count)]


def one_domain_per_transaction() -> Rule:
    first = ""

    def rule(recipient: str, count: int) -> str | None:
        nonlocal first
        domain = recipient.partition("@")[2]
        first = domain if count == 0 else first
        return None if domain == first else "451 4.3.0 Multiple destination domains per transaction is unsupported"

    return rule


def greylisted(address: str, times: int) -> Rule:
    left = times

    def rule(recipient: str, _count: int) -> str | None:
        nonlocal left
        if recipient != address or not left:
            return None
        left -= 1
        return "451 4.7.1 Greylisted"

    return rule


def always(**replies: str) -> Rule:
    return lambda recipient, _count: replies.get(recipient.partition("@")[0])


@pytest.mark.parametrize(
    ("rule", "to", "attempts"),
    [
        (lambda: at_most(1), [ANN, BOB, CEM], 3),
        (lambda: at_most(10), many(45), 5),
        (lambda: at_most(10, "452 Too many recipients"), many(30), 3),
        (one_domain_per_transaction, many(9), 3),
        (lambda: greylisted(BOB, 2), [ANN, BOB, CEM], 3),
        (lambda: None, [ANN, BOB, CEM], 1),
    ],
    ids=["one each", "ten each", "without enhanced code", "one domain", "greylisted", "no limit"],
)
@pytest.mark.parametrize("groups", [True, False], ids=["pipelined", "one by one"])
async def test_each_recipient_gets_the_email_once(
    bench: Bench, rule: Callable[[], Rule | None], to: list[str], attempts: int, groups: bool
) -> None:
    server = ChoosyServer(extensions=("PIPELINING",) if groups else ("8BITMIME",))
    server.rule = rule() or server.rule
    async with choosy_server(server) as provider:
        await bench.start(
            [provider],
            MAX_ATTEMPTS="3",
            UNSUBSCRIBE_URL="https://mail.example.com",
            UNSUBSCRIBE_SENDERS="example.com",
        )
        (email_id,) = await bench.enqueue(to=to)
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys(to, 1)
    assert bench.books.outcomes(email_id) == [*["deferred"] * (attempts - 1), "accepted"]
    assert bench.books.row(email_id)["error_type"] is None
    assert len({content.partition(b"\r\n\r\n")[0] for content in server.contents}) == 1, "the headers differ"


@pytest.mark.parametrize(
    ("rule", "status", "reason", "words", "delivered"),
    [
        (
            always(cem=MAILBOX_FULL),
            "failed",
            Reason.PARTLY_DELIVERED,
            "delivered to 2 of 3 recipients; mailbox full",
            [ANN, BOB],
        ),
        (
            always(bob="550 5.1.1 no such user", cem=MAILBOX_FULL),
            "failed",
            Reason.PARTLY_DELIVERED,
            "delivered to 1 of 3 recipients; refused recipients: 2 (550 5.1.1); mailbox full",
            [ANN],
        ),
        (
            always(bob="550 5.1.1 no such user"),
            "sent",
            None,
            "refused recipients: 2 (550 5.1.1); 250 2.0.0 Ok: queued as T0001",
            [ANN, CEM],
        ),
        (always(ann=MAILBOX_FULL, bob=MAILBOX_FULL, cem=MAILBOX_FULL), "failed", Reason.RECIPIENT_DEFERRED, None, []),
    ],
)
async def test_the_end_says_who_has_the_email(
    bench: Bench, rule: Rule, status: str, reason: Reason | None, words: str | None, delivered: list[str]
) -> None:
    server = ChoosyServer(rule=rule)
    async with choosy_server(server) as provider:
        await bench.start([provider], MAX_ATTEMPTS="2")
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({status: 1})

    row = bench.books.row(email_id)
    assert row["error_type"] == reason
    assert words in (row["last_error"], None)
    assert server.recipients(email_id) == dict.fromkeys(delivered, 1)
    assert (row["dead_letter_due_at"] is not None) is (status == "failed")


async def test_a_rest_that_is_refused_for_good_makes_the_email_sent_and_is_listed(bench: Bench) -> None:
    replies = iter(["452 4.5.3 too many", "550 5.1.1 no such user"])
    server = ChoosyServer(rule=lambda recipient, _: next(replies) if recipient == BOB else None)
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB], cc=[CEM])
        await bench.settled({"sent": 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], row["last_error"]) == (None, "refused recipients: 2 (550 5.1.1); no such user")


@pytest.mark.parametrize("words", ["550 Rule 7 says no", "554 5.7.1 Relay access denied"], ids=["unknown", "known"])
async def test_an_undecided_rejection_of_the_rest_fails_with_the_recipients_who_have_the_email(
    bench: Bench, words: str
) -> None:
    replies = iter(["452 4.5.3 too many"])
    server = ChoosyServer(rule=lambda recipient, _: next(replies, words) if recipient == CEM else None)
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await until(lambda: bench.books.row(email_id)["recipient_outcomes"] is not None)

        async def it_failed() -> bool:
            await bench.enqueue()
            return bench.books.status(email_id) == "failed"

        await until_answer(it_failed)

    row = bench.books.row(email_id)
    assert (row["error_type"], row["recipient_outcomes"]) == (Reason.PARTLY_DELIVERED, {"1": None, "2": None})
    assert row["last_error"].startswith("delivered to 2 of 3 recipients; ")
    assert (row["dead_letter_due_at"] is not None, bench.books.outcomes(email_id)) == (True, ["deferred", "rejected"])
    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB], 1)


async def test_an_undecided_rejection_of_the_rest_waits_and_the_row_says_who_has_the_email(bench: Bench) -> None:
    replies = iter(["452 4.5.3 too many"])
    server = ChoosyServer(rule=lambda recipient, _: next(replies, "550 Rule 7 says no") if recipient == CEM else None)
    async with choosy_server(server) as provider:
        worker = await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await until(lambda: bench.books.row(email_id)["recipient_outcomes"] is not None)
        await worker.stop()
        await bench.settled({"pending": 1})
        assert bench.books.row(email_id)["recipient_outcomes"] == {"1": None, "2": None}

        server.rule = always()
        await bench.start([provider])
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB, CEM], 1)


async def test_an_address_that_no_provider_supports_is_listed_and_the_others_get_the_email(bench: Bench) -> None:
    server = ChoosyServer()
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, "jörg@example.com"])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == {ANN: 1}
    assert bench.books.row(email_id)["last_error"].startswith("refused recipients: 2 (rejected_recipient); an address")


async def test_a_second_provider_gets_only_the_others(bench: Bench) -> None:
    server = ChoosyServer(extensions=())
    other = ScriptedProvider("other", Capabilities(copies=1))
    seen: list[Any] = []

    async def act(provider: ScriptedProvider, email: Any, attempt: Any) -> Any:
        seen.append((email.to, email.cc))
        attempt.mark_on_wire()
        return provider.accept(email.email_id)

    other.always = act
    async with choosy_server(server) as provider:
        await bench.start([provider, other])
        (email_id,) = await bench.enqueue(to=[ANN, "jörg@example.com"], cc=[CEM])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == {ANN: 1, CEM: 1}
    assert seen == [(("jörg@example.com",), ())]


async def test_a_refusal_after_an_unknown_outcome_does_not_say_that_the_others_have_no_copy(bench: Bench) -> None:
    server = ChoosyServer(extensions=())
    other = ScriptedProvider("other", Capabilities(copies=1, idempotency_key_seconds=3600.0))
    outcomes = iter([Uncertain("no answer"), Rejected(Reason.REJECTED_RECIPIENT, "unknown", "422")])

    async def act(_provider: ScriptedProvider, _email: Any, attempt: Any) -> Any:
        attempt.mark_on_wire()
        return next(outcomes)

    other.always = act
    async with choosy_server(server) as provider:
        await bench.start([provider, other], RETRY_BASE_SECONDS="0.01")
        (email_id,) = await bench.enqueue(to=[ANN, "jörg@example.com"])
        await bench.settled({"held": 1})

    assert server.recipients(email_id) == {ANN: 1}
    assert bench.books.row(email_id)["last_error"] == "delivered to 1 of 2 recipients; unknown"


async def test_a_replay_sends_only_to_the_others(bench: Bench) -> None:
    server = ChoosyServer(rule=always(cem=MAILBOX_FULL))
    async with choosy_server(server) as provider:
        await bench.start([provider], MAX_ATTEMPTS="1")
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({"failed": 1})
        assert bench.books.row(email_id)["recipient_outcomes"] == {"1": None, "2": None}

        server.rule = always()
        base = bench.books.row(email_id)["attempt_count"]
        bench.books.change(email_id, status="pending", attempt_base=base, dead_letter_due_at=None)
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB, CEM], 1)


async def test_an_unknown_outcome_of_a_later_transaction_holds_the_email_and_concerns_only_the_others(
    bench: Bench,
) -> None:
    server = ChoosyServer(rule=at_most(2), answer=lambda number: "!" if number == 2 else None)
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({"held": 1})
        assert bench.books.row(email_id)["last_error"].startswith("delivered to 2 of 3 recipients; ")

        row = bench.books.row(email_id)
        bench.books.change(email_id, status="pending", attempt_base=row["attempt_count"], dead_letter_due_at=None)
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB, CEM], 1)


async def test_a_recipient_that_is_suppressed_between_two_transactions_is_left_out(bench: Bench) -> None:
    server = ChoosyServer(rule=always(cem=MAILBOX_FULL))
    async with choosy_server(server) as provider:
        first = await bench.start([provider], MAX_ATTEMPTS="1", REDELIVER_FOR="1h")
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({"waiting": 1})
        await first.stop()
        # ann has the email already, so her entry changes nothing.
        suppress(bench.books.connection, ANN, CEM)

        await bench.start([provider])
        bench.books.change(email_id, status="pending")
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == {ANN: 1, BOB: 1}
    assert bench.books.row(email_id)["last_error"] == (
        "refused recipients: 3 (suppressed: hard_bounce); Every other recipient is suppressed: hard_bounce."
    )


async def test_a_worker_that_drains_between_two_transactions_leaves_the_rest_to_another(bench: Bench) -> None:
    server = ChoosyServer(rule=greylisted(BOB, 1))
    async with choosy_server(server) as provider:
        first = await bench.start([provider], RETRY_BASE_SECONDS="60", RETRY_CAP_SECONDS="60")
        (email_id,) = await bench.enqueue(to=[ANN, BOB])
        await until(lambda: bench.books.row(email_id)["recipient_outcomes"] is not None)
        await first.stop()
        row = bench.books.row(email_id)
        assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 1, 1)

        await bench.start([provider])
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == {ANN: 1, BOB: 1}


async def test_an_event_of_a_recipient_who_has_the_email_does_not_prove_that_the_others_have_it(bench: Bench) -> None:
    """The event may arrive even before the result of the transaction is recorded."""
    server = ChoosyServer(rule=greylisted(BOB, 1))
    connection = bench.books.connection

    def mark(_transaction: int) -> None:
        connection.execute("update email_log set proven_by = 'smtp' where recipient_outcomes is null")

    server.answer = mark
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB])
        await until(lambda: bench.books.statuses() == {"sent": 1} or len(server.contents) == 2)

    assert server.recipients(email_id) == {ANN: 1, BOB: 1}


async def test_outcomes_are_stored_without_addresses(bench: Bench) -> None:
    server = ChoosyServer(rule=always(bob="550 5.1.1 <bob@example.net> unknown", cem=MAILBOX_FULL))
    async with choosy_server(server) as provider:
        await bench.start([provider], MAX_ATTEMPTS="1")
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({"failed": 1})

    stored = json.dumps([bench.books.row(email_id), *bench.books.attempts(email_id)], default=str)
    assert "@example" not in stored
    assert bench.books.row(email_id)["recipient_outcomes"] == {"1": None, "2": "550 5.1.1"}
