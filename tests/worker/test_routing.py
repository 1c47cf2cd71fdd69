"""Tests failover and pauses: which provider is tried, whether an attempt is used, and where emails wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, NoFreeConnection
from dispatcher.routing.breaker import FAILURES_IN_A_ROW
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedProvider, accept, answer, fail

FAULT = fail(ProviderFault("first", "bad credentials of ann@example.org"), after_leaving=True)


def pair() -> tuple[ScriptedProvider, ScriptedProvider]:
    return ScriptedProvider("first"), ScriptedProvider("second")


def refuse(reason: Reason, retry_after: float | None = None) -> Act:
    """Refuses an email for this reason: the provider did not accept it."""
    return answer(Deferred(reason, "not now", "451", retry_after))


def state_of(bench: Bench, provider: str = "scripted") -> str:
    """The provider's breaker state in the database, where other hosts read it."""
    rows = bench.books.select("select state from provider_state where provider = %s", provider)
    return str(rows[0]["state"]) if rows else "unknown"


async def test_the_second_provider_is_not_tried_while_the_first_works(bench: Bench) -> None:
    first, second = pair()
    await bench.start([first, second])

    await bench.enqueue(50)

    await bench.settled({"sent": 50})
    assert (len(first.calls), second.calls) == (50, [])


@pytest.mark.parametrize("reason", [Reason.SERVER_ERROR, Reason.TIMEOUT_BEFORE_SEND])
async def test_a_refusal_that_concerns_the_provider_goes_to_the_next_at_once_and_uses_an_attempt(
    bench: Bench, reason: Reason
) -> None:
    first, second = pair()
    first.always = refuse(reason, retry_after=30.0)
    await bench.start([first, second])

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})
    rows = [(row["attempt_number"], row["provider"], row["outcome"]) for row in bench.books.attempts(email_id)]
    assert rows == [(1, "first", "deferred"), (2, "second", "accepted")]
    assert (bench.books.row(email_id)["attempt_count"], bench.books.row(email_id)["provider"]) == (2, "second")


@pytest.mark.parametrize(
    "act",
    [FAULT, refuse(Reason.THROTTLED, 60.0), refuse(Reason.CONNECTION_FAILED)],
    ids=["fault", "throttled", "unreached"],
)
async def test_a_refusal_that_uses_no_attempt_goes_to_the_next_provider_within_the_attempt(
    bench: Bench, act: Act
) -> None:
    first, second = pair()
    first.always = act
    worker = await bench.start([first, second])

    email_ids = await bench.enqueue(20)

    await bench.settled({"sent": 20})
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    assert second.accepted == dict.fromkeys(email_ids, 1)
    await until(lambda: worker.in_flight == 0)
    await until(lambda: state_of(bench, "first") in ("open", "half_open", "paused"))


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Uncertain("no answer"), "held"), (Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550"), "failed")],
)
async def test_missing_answers_and_refusals_of_the_email_never_go_to_the_next_provider(
    bench: Bench, outcome: Outcome, status: str
) -> None:
    first, second = pair()
    first.always = answer(outcome)
    await bench.start([first, second])

    await bench.enqueue(FAILURES_IN_A_ROW - 1)

    await bench.settled({status: FAILURES_IN_A_ROW - 1})
    assert second.calls == []


async def test_a_deferral_that_concerns_the_email_is_retried_with_the_first_provider(bench: Bench) -> None:
    first, second = pair()
    (email_id,) = bench.books.enqueue(1)
    first.script[email_id].append(refuse(Reason.RECIPIENT_DEFERRED))
    await bench.start([first, second])

    await bench.deliver([email_id])

    await bench.settled({"sent": 1})
    assert (first.calls, second.calls) == ([email_id, email_id], [])


async def test_if_every_provider_fails_the_email_waits_between_rounds_and_attempts_are_limited(
    bench: Bench,
) -> None:
    first, second = pair()
    first.always = second.always = refuse(Reason.SERVER_ERROR)
    await bench.start([first, second], MAX_ATTEMPTS="4")

    (email_id,) = await bench.enqueue()

    await bench.settled({"failed": 1})
    providers = [row["provider"] for row in bench.books.attempts(email_id)]
    assert providers == ["first", "second", "first", "second"]


@pytest.mark.parametrize("providers", [1, 2, 3])
async def test_an_email_is_tried_for_the_same_time_with_any_number_of_providers(bench: Bench, providers: int) -> None:
    """The settings are the defaults, divided by 300: five minutes become a second."""
    failing = [ScriptedProvider(f"provider{number}") for number in range(providers)]
    for provider in failing:
        provider.always = refuse(Reason.SERVER_ERROR)
    await bench.start(failing, RETRY_BASE_SECONDS="0.02", RETRY_CAP_SECONDS="0.8")

    (email_id,) = await bench.enqueue()

    await bench.settled({"failed": 1})
    attempts = bench.books.attempts(email_id)
    assert [row["provider"] for row in attempts] == [failing[number % providers].name for number in range(8)]
    assert (attempts[-1]["started_at"] - attempts[0]["started_at"]).total_seconds() >= 1


async def test_a_provider_that_fails_as_a_whole_is_paused_and_its_emails_are_released_without_using_an_attempt(
    bench: Bench,
) -> None:
    bench.provider.always = refuse(Reason.CONNECTION_FAILED)
    await bench.start()
    email_ids = bench.books.enqueue(300)
    await bench.deliver(email_ids)

    await until(lambda: state_of(bench) == "open")
    await until(lambda: bench.books.statuses()["sending"] == 0)
    assert bench.books.count("every_attempt") == 0
    bench.provider.always = accept
    await bench.deliver(email_ids)

    await bench.settled({"sent": 300})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    await until(lambda: state_of(bench) == "closed")
    await bench.nothing_left_on_the_queue()


async def test_while_no_provider_may_be_tried_for_long_the_messages_go_to_other_consumers(bench: Bench) -> None:
    bench.provider.always = refuse(Reason.THROTTLED, 600.0)
    await bench.start()
    await bench.enqueue(20)

    await until(lambda: state_of(bench) == "paused" and bench.books.statuses() == {"pending": 20})

    more = await bench.enqueue(20)
    assert len([await taken(bench) for _ in more]) == 20
    assert not any(row["attempt_count"] for row in bench.books.rows())
    assert not set(more) & set(bench.provider.calls)


async def taken(bench: Bench) -> bytes:
    """Takes a message off the send queue, as another consumer would; returns its body."""
    async with asyncio.timeout(20):
        while (message := await bench.rabbit.take(bench.topology.queue)) is None:
            pass
    return message.body


async def test_nothing_is_sent_during_a_pause_and_everything_after_it(bench: Bench) -> None:
    provider = Throttling(seconds=1.5)
    worker = await bench.start([provider])
    email_ids = bench.books.enqueue(200)
    await bench.deliver(email_ids)
    await until(lambda: provider.refused and not bench.books.statuses()["sending"])
    await bench.deliver(email_ids)

    await bench.settled({"sent": 200})

    # The provider may still refuse emails that were on the wire at the first refusal. After these emails, the worker
    # makes no call before the requested time.
    assert set(provider.refused.values()) == {1}
    assert min(provider.accepted_at) >= provider.until
    assert provider.accepted == dict.fromkeys(email_ids, 1)
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    await until(lambda: worker.in_flight == 0)


class Throttling(ScriptedProvider):
    """Throttles for a given time after its first call, and records all calls."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.until = 0.0
        self.refused: Counter[UUID] = Counter()
        self.accepted_at: list[float] = []

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        now = asyncio.get_running_loop().time()
        self.until = self.until or now + self.seconds
        if now < self.until:
            self.refused[email.email_id] += 1
            attempt.mark_on_wire()
            return Deferred(Reason.THROTTLED, "slow down", "429", self.until - now)
        self.accepted_at.append(now)
        return await super().send(email, attempt)


async def test_a_fault_is_reported_without_addresses(bench: Bench) -> None:
    bench.provider.always = FAULT
    await bench.start()

    await bench.enqueue(3)

    await until(lambda: state_of(bench) == "open")
    (row,) = bench.books.select("select reason from provider_state where state = 'open'")
    assert row["reason"] == "bad credentials of <address>"


async def test_a_failed_provider_gets_one_probe_at_a_time(bench: Bench) -> None:
    bench.provider.always = FAULT
    await bench.start()
    email_ids: list[UUID] = await bench.enqueue(40)
    await until(lambda: state_of(bench) == "open" and bench.books.statuses() == {"pending": 40})
    before = len(bench.provider.calls)

    await bench.deliver(email_ids)
    await until(lambda: len(bench.provider.calls) > before)
    await until(lambda: state_of(bench) == "open" and bench.books.statuses() == {"pending": 40})

    assert len(bench.provider.calls) == before + 1
    assert not any(row["attempt_count"] for row in bench.books.rows())


async def test_a_new_worker_resets_the_breaker_states_of_its_predecessor(bench: Bench) -> None:
    bench.provider.always = FAULT
    worker = await bench.start()
    await bench.enqueue()
    await until(lambda: state_of(bench) == "open")
    await worker.stop()

    await bench.start()

    await until(lambda: state_of(bench) == "closed")


async def test_a_drain_releases_emails_that_wait_for_tokens(bench: Bench) -> None:
    worker = await bench.start(ceiling=0.1)
    await bench.enqueue(5)
    await until(lambda: bench.books.statuses()["sending"] >= 3)

    async with asyncio.timeout(10):
        await worker.stop()

    assert bench.books.statuses()["sending"] == 0
    assert sum(row["attempt_count"] for row in bench.books.rows()) == len(bench.provider.calls)


async def send_after_waiting_for_a_connection(
    provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt
) -> Outcome:
    """Waits for a connection, then accepts the email."""
    await provider.wait(email.email_id)
    attempt.connection_acquired()
    return await accept(provider, email, attempt)


async def test_an_email_that_waits_for_a_connection_is_not_sent_after_the_provider_asked_for_a_pause(
    bench: Bench,
) -> None:
    first, *others = bench.books.enqueue(20)
    bench.provider.always = send_after_waiting_for_a_connection
    await bench.start()
    await bench.deliver(others)
    await until(lambda: bench.provider.waiting == set(others))
    bench.provider.script[first].append(refuse(Reason.THROTTLED, 600.0))
    await bench.deliver([first])
    await until(lambda: state_of(bench) == "paused")

    bench.provider.let_go()

    await until(lambda: bench.books.statuses() == {"pending": 20})
    assert not bench.provider.accepted
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}


async def test_an_email_that_waits_for_a_connection_goes_to_the_next_provider_after_a_failure(bench: Bench) -> None:
    first, second = pair()
    failing, *others = bench.books.enqueue(20)
    first.always = send_after_waiting_for_a_connection
    first.script[failing].append(FAULT)
    await bench.start([first, second])
    await bench.deliver(others)
    await until(lambda: first.waiting == set(others))
    await bench.deliver([failing])
    await until(lambda: second.accepted == {failing: 1})

    first.let_go()

    await bench.settled({"sent": 20})
    assert not first.accepted
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}


async def test_an_email_that_gets_no_connection_waits_again_and_uses_no_attempt(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.script[email_id].extend([fail(NoFreeConnection(), after_leaving=False)] * (2 * FAILURES_IN_A_ROW))
    await bench.start()

    await bench.deliver([email_id])

    await bench.settled({"sent": 1})
    assert len(bench.provider.calls) == 2 * FAILURES_IN_A_ROW + 1
    assert (bench.books.row(email_id)["attempt_count"], state_of(bench)) == (1, "closed")


async def test_a_provider_that_is_unavailable_for_minutes_is_paused_and_fails_no_email(bench: Bench) -> None:
    bench.provider.always = refuse(Reason.SERVER_ERROR, 600.0)
    worker = await bench.start()

    await bench.enqueue(20)

    await until(lambda: state_of(bench) == "paused" and bench.books.statuses() == {"pending": 20})
    await worker.stop()  # until then, a late lease statement may still commit
    assert bench.books.statuses() == {"pending": 20}
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}


async def test_a_drain_while_consuming_is_paused_ends_at_once(bench: Bench) -> None:
    bench.provider.always = refuse(Reason.THROTTLED, 600.0)
    worker = await bench.start()
    await bench.enqueue(20)
    await until(lambda: state_of(bench) == "paused" and bench.books.statuses() == {"pending": 20})

    async with asyncio.timeout(10):
        await worker.stop()

    assert worker.task.done()


async def test_a_low_ceiling_limits_the_number_of_leased_emails(bench: Bench) -> None:
    await bench.start(ceiling=2.0, LEASE_SECONDS="2", SEND_TIMEOUT_SECONDS="1")

    await bench.enqueue(40)

    await until(lambda: bench.provider.calls)
    assert bench.books.statuses()["sending"] <= 3
    assert bench.books.statuses()["pending"] >= 35


async def test_a_low_ceiling_limits_the_number_of_prefetched_messages(bench: Bench) -> None:
    email_ids = bench.books.enqueue(140)
    for at in range(0, 140, 10):  # the first message is acked only after five seconds
        await bench.deliver_together(email_ids[at : at + 10])

    await bench.start(ceiling=2.0, LEASE_SECONDS="10", SEND_TIMEOUT_SECONDS="1")

    await until(lambda: bench.provider.calls)
    # The window has ten emails, so the worker prefetches ten messages plus 25 %: twelve of the fourteen messages.
    assert await bench.waiting_messages() == 2


async def test_a_worker_runs_on_if_breaker_states_cannot_be_published(bench: Bench) -> None:
    bench.books.connection.execute("alter table provider_state rename to gone")
    try:
        first, second = pair()
        first.always = FAULT
        await bench.start([first, second])

        await bench.enqueue(20)

        await bench.settled({"sent": 20})
    finally:
        bench.books.connection.execute("alter table gone rename to provider_state")
