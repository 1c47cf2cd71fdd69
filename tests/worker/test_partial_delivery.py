"""A server takes only some recipients at a time: each gets the email once, and nobody is left out silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome, Reason, Rejected, Uncertain
from tests.providers.choosy_server import ChoosyServer, Rule, at_most, choosy_server
from tests.store.suppressing import suppress
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider

ANN, BOB, CEM = "ann@example.com", "bob@example.net", "cem@example.org"
JOERG = "jörg@example.com"
MAILBOX_FULL = "452 4.2.2 mailbox full"
NO_USER = "550 5.1.1 no such user"
TOO_MANY = "452 4.5.3 too many"


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


def in_turn(address: str, *replies: str, last: str | None = None) -> Rule:
    """Refuses an address with these replies, and then with `last`, or accepts it."""
    left = iter(replies)
    return lambda recipient, _count: next(left, last) if recipient == address else None


def always(**replies: str) -> Rule:
    return lambda recipient, _count: replies.get(recipient.partition("@")[0])


async def replayed(bench: Bench, email_id: UUID, **columns: Any) -> None:
    """Sends the email again, as a replay does."""
    base = bench.books.row(email_id)["attempt_count"]
    bench.books.change(email_id, status="pending", attempt_base=base, dead_letter_due_at=None, **columns)
    await bench.deliver([email_id])
    await bench.settled({"sent": 1})


@pytest.mark.parametrize(
    ("rule", "to", "attempts"),
    [
        (lambda: at_most(1), [ANN, BOB, CEM], 3),
        (lambda: at_most(10), many(45), 5),
        (lambda: at_most(10, "452 Too many recipients"), many(30), 3),
        (one_domain_per_transaction, many(9), 3),
        (lambda: in_turn(BOB, "451 4.7.1 Greylisted", "451 4.7.1 Greylisted"), [ANN, BOB, CEM], 3),
        (lambda: None, [ANN, BOB, CEM], 1),
    ],
    ids=["one each", "ten each", "without enhanced code", "one domain", "greylisted", "no limit"],
)
async def test_each_recipient_gets_the_email_once(
    bench: Bench, rule: Callable[[], Rule | None], to: list[str], attempts: int
) -> None:
    settings: dict[str, Any] = {"UNSUBSCRIBE_URL": "https://mail.example.com", "UNSUBSCRIBE_SENDERS": "example.com"}
    server = ChoosyServer()
    server.rule = rule() or server.rule
    async with choosy_server(server) as provider:
        await bench.start([provider], MAX_ATTEMPTS="3", **settings)
        (email_id,) = await bench.enqueue(to=to)
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys(to, 1)
    assert bench.books.outcomes(email_id) == [*["deferred"] * (attempts - 1), "accepted"]
    assert bench.books.row(email_id)["error_type"] is None
    assert len({content.partition(b"\r\n\r\n")[0] for content in server.contents}) == 1, "the headers differ"


PARTLY = Reason.PARTLY_DELIVERED
FULL_AND_UNKNOWN = always(bob="550 5.1.1 <bob@example.net> unknown", cem=MAILBOX_FULL)
TWO_OF_THREE = "delivered to 2 of 3 recipients; mailbox full"
ONE_OF_THREE = "delivered to 1 of 3 recipients; refused recipients: 2 (550 5.1.1); mailbox full"
ALL_FULL = always(ann=MAILBOX_FULL, bob=MAILBOX_FULL, cem=MAILBOX_FULL)


@pytest.mark.parametrize(
    ("rule", "to", "status", "reason", "words", "delivered"),
    [
        (always(cem=MAILBOX_FULL), [ANN, BOB, CEM], "failed", PARTLY, TWO_OF_THREE, [ANN, BOB]),
        (FULL_AND_UNKNOWN, [ANN, BOB, CEM], "failed", PARTLY, ONE_OF_THREE, [ANN]),
        (always(bob=NO_USER), [ANN, BOB, CEM], "sent", None, "refused recipients: 2 (550 5.1.1); 250", [ANN, CEM]),
        (ALL_FULL, [ANN, BOB, CEM], "failed", Reason.RECIPIENT_DEFERRED, "", []),
        (in_turn(BOB, TOO_MANY, NO_USER), [ANN, BOB], "sent", None, "refused recipients: 2 (550 5.1.1); no ", [ANN]),
        (always(), [ANN, JOERG], "sent", None, "refused recipients: 2 (rejected_recipient); an address", [ANN]),
    ],
    ids=["one full", "one full, one unknown", "one unknown", "all full", "rest refused for good", "unsupported"],
)
async def test_the_end_says_who_has_the_email_without_addresses(
    bench: Bench, rule: Rule, to: list[str], status: str, reason: Reason | None, words: str, delivered: list[str]
) -> None:
    server = ChoosyServer(rule=rule)
    async with choosy_server(server) as provider:
        await bench.start([provider], MAX_ATTEMPTS="2")
        (email_id,) = await bench.enqueue(to=to)
        await bench.settled({status: 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], (row["last_error"] or "").startswith(words)) == (reason, True)
    assert server.recipients(email_id) == dict.fromkeys(delivered, 1)
    assert (row["dead_letter_due_at"] is not None) is (status == "failed")
    assert "@example" not in json.dumps([row, *bench.books.attempts(email_id)], default=str)
    if rule is FULL_AND_UNKNOWN:
        assert row["recipient_outcomes"] == {"1": None, "2": "550 5.1.1"}


@pytest.mark.parametrize("words", ["550 Rule 7 says no", "554 5.7.1 Relay access denied"], ids=["unknown", "known"])
async def test_an_undecided_rejection_of_the_rest_names_who_has_the_email(bench: Bench, words: str) -> None:
    server = ChoosyServer(rule=in_turn(CEM, TOO_MANY, last=words))
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await until(lambda: bench.books.row(email_id)["recipient_outcomes"] is not None)
        await until_answer(bench.enqueue, lambda _: bench.books.status(email_id) == "failed")

    row = bench.books.row(email_id)
    assert (row["error_type"], row["recipient_outcomes"]) == (Reason.PARTLY_DELIVERED, {"1": None, "2": None})
    assert row["last_error"].startswith("delivered to 2 of 3 recipients; ")
    assert (row["dead_letter_due_at"] is not None, bench.books.outcomes(email_id)) == (True, ["deferred", "rejected"])
    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB], 1)


@pytest.mark.parametrize("reply", ["550 Rule 7 says no", "451 4.7.1 Greylisted"], ids=["undecided", "deferred"])
async def test_a_drain_between_two_transactions_leaves_the_rest_to_another_worker(bench: Bench, reply: str) -> None:
    server = ChoosyServer(rule=in_turn(CEM, TOO_MANY, last=reply))
    async with choosy_server(server) as provider:
        first = await bench.start([provider], RETRY_BASE_SECONDS="60", RETRY_CAP_SECONDS="60")
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await until(lambda: bench.books.row(email_id)["recipient_outcomes"] is not None)
        await first.stop()
        row = bench.books.row(email_id)
        assert (row["status"], row["recipient_outcomes"]) == ("pending", {"1": None, "2": None})
        assert row["attempt_base"] >= 1

        server.rule = always()
        await bench.start([provider])
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})

    assert server.recipients(email_id) == dict.fromkeys([ANN, BOB, CEM], 1)


@pytest.mark.parametrize("has_keys", [False, True], ids=["accepted", "refused after an unknown outcome"])
async def test_a_second_provider_gets_only_the_others(bench: Bench, has_keys: bool) -> None:
    server = ChoosyServer(extensions=())
    other = ScriptedProvider("other", Capabilities(copies=1, idempotency_key_seconds=3600.0 if has_keys else None))
    doubt: list[Outcome] = [Uncertain("no answer"), Rejected(Reason.REJECTED_RECIPIENT, "unknown", "422")]
    doubtful = iter(doubt)
    seen: list[Any] = []

    async def act(provider: ScriptedProvider, email: Any, attempt: Any) -> Outcome:
        seen.append((email.to, email.cc))
        attempt.mark_on_wire()
        if has_keys:
            return next(doubtful)
        return provider.accept(email.email_id)

    other.always = act
    async with choosy_server(server) as provider:
        await bench.start([provider, other], RETRY_BASE_SECONDS="0.01")
        (email_id,) = await bench.enqueue(to=[ANN, JOERG], cc=[CEM])
        await bench.settled({"held" if has_keys else "sent": 1})

    assert server.recipients(email_id) == {ANN: 1, CEM: 1}
    assert seen == [((JOERG,), ())] * (2 if has_keys else 1)
    # The refusal does not say that the others have no copy.
    assert not has_keys or bench.books.row(email_id)["last_error"] == "delivered to 2 of 3 recipients; unknown"


async def test_an_unknown_outcome_of_a_later_transaction_holds_the_email_only_for_the_others(bench: Bench) -> None:
    server = ChoosyServer(rule=at_most(2), answer=lambda number: "!" if number == 2 else None)
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB, CEM])
        await bench.settled({"held": 1})
        assert bench.books.row(email_id)["last_error"].startswith("delivered to 2 of 3 recipients; ")

        await replayed(bench, email_id)

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
        await replayed(bench, email_id)

    assert server.recipients(email_id) == {ANN: 1, BOB: 1}
    assert bench.books.row(email_id)["last_error"] == (
        "refused recipients: 3 (suppressed: hard_bounce); Every other recipient is suppressed: hard_bounce."
    )


async def test_an_event_of_a_recipient_who_has_the_email_does_not_prove_that_the_others_have_it(bench: Bench) -> None:
    """The event may arrive even before the result of the transaction is recorded."""
    server = ChoosyServer(rule=in_turn(BOB, "451 4.7.1 Greylisted"))
    connection = bench.books.connection

    def mark(_transaction: int) -> None:
        connection.execute("update email_log set proven_by = 'smtp' where recipient_outcomes is null")

    server.answer = mark
    async with choosy_server(server) as provider:
        await bench.start([provider])
        (email_id,) = await bench.enqueue(to=[ANN, BOB])
        await until(lambda: bench.books.statuses() == {"sent": 1} or len(server.contents) == 2)

    assert server.recipients(email_id) == {ANN: 1, BOB: 1}
