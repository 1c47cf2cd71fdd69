"""Tests failover and pauses: which provider is tried, whether an attempt is used, and where emails wait. Some providers
cannot send every email."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedBulk, ScriptedProvider, accept, answer, fail

FAULT = fail(ProviderFault("first", "bad credentials of ann@example.org"), after_leaving=True)
CANNOT = "only providers with templates (resend, sendgrid, ses) take template_id; set text or html"
NO_TEMPLATES = Capabilities(copies=1, templates=False)
WITH_TEMPLATES = Capabilities(copies=1, templates=True)
TEMPLATED: Final[dict[str, Any]] = {"template_id": "d-1", "text": None}


def pair(first: Act = accept) -> tuple[ScriptedProvider, ScriptedProvider]:
    one, two = ScriptedProvider("first"), ScriptedProvider("second")
    one.always = first
    return one, two


def refuse(reason: Reason, retry_after: float | None = None) -> Act:
    return answer(Deferred(reason, "not now", "451", retry_after))


def state_of(bench: Bench, provider: str = "scripted") -> str:
    """The provider's breaker state in the database, where other hosts read it."""
    rows = bench.books.select("select state from provider_state where provider = %s", provider)
    return str(rows[0]["state"]) if rows else "unknown"


async def test_outcomes_that_concern_the_email_never_go_to_the_next_provider(bench: Bench) -> None:
    first, second = pair()
    silent, rejected, deferred, *_ = email_ids = bench.books.enqueue(50)
    first.script[silent].append(answer(Uncertain("no answer")))
    first.script[rejected].append(answer(Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550")))
    first.script[deferred].append(refuse(Reason.RECIPIENT_DEFERRED))
    await bench.start([first, second])

    await bench.deliver(email_ids)

    await bench.settled({"sent": 48, "held": 1, "failed": 1})
    assert (len(first.calls), first.calls.count(deferred), second.calls) == (51, 2, [])


async def test_a_refusal_that_concerns_the_provider_goes_to_the_next_at_once_and_uses_an_attempt(bench: Bench) -> None:
    first, second = pair()
    email_ids = bench.books.enqueue(2)
    for email_id, reason in zip(email_ids, (Reason.SERVER_ERROR, Reason.TIMEOUT_BEFORE_SEND), strict=True):
        first.script[email_id].append(refuse(reason))
    await bench.start([first, second])

    await bench.deliver(email_ids)

    await bench.settled({"sent": 2})
    for email_id in email_ids:
        rows = [(row["attempt_number"], row["provider"], row["outcome"]) for row in bench.books.attempts(email_id)]
        assert rows == [(1, "first", "deferred"), (2, "second", "accepted")]
        row = bench.books.row(email_id)
        assert (row["attempt_count"], row["provider"]) == (2, "second")


@pytest.mark.parametrize(
    "act",
    [FAULT, refuse(Reason.THROTTLED, 60.0), refuse(Reason.CONNECTION_FAILED)],
    ids=["fault", "throttled", "unreached"],
)
async def test_a_refusal_that_uses_no_attempt_goes_to_the_next_within_the_attempt(bench: Bench, act: Act) -> None:
    first, second = pair(act)
    worker = await bench.start([first, second])

    email_ids = await bench.enqueue(20)

    await bench.settled({"sent": 20})
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    assert second.accepted == dict.fromkeys(email_ids, 1)
    await until(lambda: worker.in_flight == 0)
    await until(lambda: state_of(bench, "first") in ("open", "half_open", "paused"))


async def test_a_failing_provider_is_paused_and_its_emails_are_released_without_using_an_attempt(bench: Bench) -> None:
    bench.provider.always = refuse(Reason.CONNECTION_FAILED)
    await bench.start()
    email_ids = await bench.enqueue(100)

    await until(lambda: state_of(bench) == "open")
    await until(lambda: bench.books.statuses()["sending"] == 0)
    assert bench.books.count("every_attempt") == 0
    bench.provider.always = accept
    await bench.deliver(email_ids)

    await until(lambda: state_of(bench) == "closed")
    await bench.each_is_sent_once(email_ids)


@pytest.mark.parametrize("reason", [Reason.THROTTLED, Reason.SERVER_ERROR])
async def test_while_no_provider_may_be_tried_messages_go_to_other_consumers(bench: Bench, reason: Reason) -> None:
    bench.provider.always = refuse(reason, 600.0)
    worker = await bench.start()
    await bench.enqueue(20)
    await until(lambda: state_of(bench) == "paused" and bench.books.statuses() == {"pending": 20})

    more = await bench.enqueue(20)

    await bench.rabbit.take_all_within(bench.topology.queue, 20)
    async with asyncio.timeout(10):
        await worker.stop()
    assert bench.books.statuses() == {"pending": 40}
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}
    assert not set(more) & set(bench.provider.calls)


async def test_a_failed_provider_is_reported_without_addresses_and_gets_one_probe_at_a_time(bench: Bench) -> None:
    bench.provider.always = FAULT
    worker = await bench.start()
    email_ids = await bench.enqueue(40)
    await until(lambda: state_of(bench) == "open" and bench.books.statuses() == {"pending": 40})
    (row,) = bench.books.select("select reason from provider_state where state = 'open'")
    assert row["reason"] == "bad credentials of <address>"
    before = len(bench.provider.calls)

    await bench.deliver(email_ids)
    await until(lambda: len(bench.provider.calls) > before)
    await until(lambda: state_of(bench) == "open" and bench.books.statuses() == {"pending": 40})

    assert len(bench.provider.calls) == before + 1
    assert not any(row["attempt_count"] for row in bench.books.rows())
    await worker.stop()

    await bench.start(AMQP_URL="amqp://guest:guest@127.0.0.1:1/")  # a successor resets the state

    await until(lambda: state_of(bench) == "closed")
    await until(lambda: bench.workers[-1].process_slot.is_up)  # although RabbitMQ is unreachable


async def test_a_drain_releases_emails_that_wait_for_tokens(bench: Bench) -> None:
    worker = await bench.start(ceiling=0.1)
    await bench.enqueue(5)
    await until(lambda: bench.books.statuses()["sending"] >= 3)

    async with asyncio.timeout(10):
        await worker.stop()

    assert bench.books.statuses()["sending"] == 0
    assert sum(row["attempt_count"] for row in bench.books.rows()) == len(bench.provider.calls)


async def test_a_low_ceiling_limits_the_numbers_of_leased_emails_and_of_prefetched_messages(bench: Bench) -> None:
    email_ids = bench.books.enqueue(140)
    for at in range(0, 140, 10):  # the first message is acked only after five seconds
        await bench.deliver_together(email_ids[at : at + 10])

    await bench.start(ceiling=2.0, LEASE_SECONDS="10", SEND_TIMEOUT_SECONDS="1")

    await until(lambda: bench.provider.calls)
    assert bench.books.statuses()["sending"] <= 12
    # The window has ten emails, so the worker prefetches ten messages plus 25 %: twelve of the fourteen messages.
    assert await bench.waiting_messages() == 2


async def test_a_worker_runs_on_if_breaker_states_cannot_be_published(bench: Bench) -> None:
    bench.books.connection.execute("alter table provider_state rename to gone")
    try:
        await bench.start(pair(FAULT))

        await bench.enqueue(20)

        await bench.settled({"sent": 20})
    finally:
        bench.books.connection.execute("alter table gone rename to provider_state")


async def refuse_templates(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Rejected:
    """Rejects templated emails before anything is sent, as an adapter without templates does."""
    return Rejected(Reason.INVALID_CONTENT, CANNOT)


@pytest.mark.parametrize("declares", [NO_TEMPLATES, WITH_TEMPLATES], ids=["declared", "found"])
async def test_templated_emails_wait_for_their_provider_and_others_do_not(bench: Bench, declares: Capabilities) -> None:
    sendgrid, smtp = ScriptedProvider("sendgrid"), ScriptedProvider("smtp", declares)
    sendgrid.always = fail(ProviderFault("sendgrid", "bad credentials"), after_leaving=False)
    templated = bench.books.enqueue(20, **TEMPLATED)
    for each in templated:
        smtp.script[each].extend([refuse_templates] * 20)
    worker = await bench.start([sendgrid, smtp])

    await bench.deliver(templated)
    texts = await bench.enqueue(20)

    await bench.settled({"pending": 20, "sent": 20})
    assert smtp.accepted == dict.fromkeys(texts, 1)
    await until(lambda: all(bench.due_in_seconds(each) > 0 for each in templated))
    assert {(row["status"], row["attempt_count"]) for row in bench.books.rows()} == {("pending", 0), ("sent", 1)}
    await until(lambda: worker.in_flight == 0)

    sendgrid.always = accept
    await until(lambda: all(bench.due_in_seconds(each) <= 0 for each in templated))
    await bench.deliver(templated[:1])  # as the relay does; this email tests the provider
    await bench.settled({"pending": 19, "sent": 21})
    await bench.deliver(templated[1:])

    await bench.settled({"sent": 40})
    assert sendgrid.accepted == dict.fromkeys(templated, 1)
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    await bench.nothing_left_on_the_queue()


async def test_an_email_that_no_provider_can_send_fails_at_once_and_names_what_it_needs(bench: Bench) -> None:
    smtp = ScriptedProvider("smtp", NO_TEMPLATES)
    await bench.start([smtp])

    (email_id,) = await bench.enqueue(**TEMPLATED)

    await bench.settled({"failed": 1})
    row = bench.books.row(email_id)
    assert (smtp.calls, row["attempt_count"], row["error_type"]) == ([], 1, "invalid_content")
    assert row["last_error"] == (
        "template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp. "
        "Add one to DISPATCHER_PROVIDERS, or set text or html."
    )
    assert row["dead_letter_due_at"] is not None


async def test_an_email_that_an_adapter_cannot_send_goes_to_the_next_within_the_attempt_or_fails(bench: Bench) -> None:
    first, second = pair(refuse_templates)
    both, *others = email_ids = bench.books.enqueue(20)
    second.script[both].append(refuse_templates)
    worker = await bench.start([first, second])

    await bench.deliver(email_ids)

    await bench.settled({"sent": 19, "failed": 1})
    assert second.accepted == dict.fromkeys(others, 1)
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    row = bench.books.row(both)
    assert (row["provider"], row["last_error"]) == ("second", CANNOT)
    await until(lambda: worker.in_flight == 0)


FORBIDDEN: Final[dict[str, Any]] = {
    "headers": {"X-Order": "17", "X-MC-Subaccount": "x"},
    "allowed_headers": ["X-MC-Subaccount"],
}


async def test_an_email_with_a_header_that_controls_a_provider_fails_unless_the_header_is_allowed(bench: Bench) -> None:
    bulk, smtp = ScriptedBulk("sendgrid", WITH_TEMPLATES), ScriptedProvider("smtp")
    worker = await bench.start([with_bulk_calls(bulk, 10), smtp])

    await bench.enqueue(1, **FORBIDDEN)
    await bench.enqueue(2, **FORBIDDEN, **TEMPLATED)

    await bench.settled({"failed": 3})
    assert (bulk.accepted, smtp.accepted) == ({}, {})
    attempts = bench.books.select("select error_type, error from every_attempt")
    assert [each["error_type"] for each in attempts] == ["invalid_content"] * 3
    assert all(each["error"].startswith("headers.X-MC-Subaccount controls Mailchimp Tran") for each in attempts)
    await worker.stop()

    await bench.start([smtp], ALLOWED_PROVIDER_HEADERS="x-mc-subaccount")
    (allowed,) = await bench.enqueue(1, **FORBIDDEN)

    await bench.settled({"failed": 3, "sent": 1})
    assert smtp.accepted == {allowed: 1}


@pytest.mark.parametrize("kind", [ScriptedProvider, ScriptedBulk])
async def test_an_email_uses_only_the_accounts_of_its_rule_and_waits_for_them_while_others_are_sent(
    bench: Bench, kind: type[ScriptedProvider]
) -> None:
    acme, bulk, rest = (kind(name) for name in ("smtp:acme", "smtp:bulk", "smtp"))
    providers = [with_bulk_calls(each, 10) for each in (acme, bulk, rest)]
    await bench.start(providers, ACCOUNT_RULES="tenant=acme -> smtp:acme; lane=bulk sender=example.com -> smtp:bulk")
    of_acme = bench.books.enqueue(3, tenant_id="acme")
    of_bulk, others = bench.books.enqueue(3), bench.books.enqueue(3)
    await bench.deliver(of_bulk, lane="bulk")
    await bench.deliver([*of_acme, *others])
    await bench.settled({"sent": 9})

    sent = {each.name: set(each.accepted) for each in (acme, bulk, rest)}
    assert sent == {"smtp:acme": {*of_acme}, "smtp:bulk": {*of_bulk}, "smtp": {*others}}

    acme.always = FAULT
    (waiting,) = bench.books.enqueue(1, tenant_id="acme")
    await bench.deliver([waiting, *bench.books.enqueue(5)])
    await until(lambda: state_of(bench, "smtp:acme") == "open" and bench.books.statuses() == {"pending": 1, "sent": 14})
    assert (state_of(bench, "smtp"), bench.due_in_seconds(waiting) > 0) == ("closed", True)


async def test_an_email_that_the_accounts_of_its_rule_cannot_send_fails_and_a_pinned_one_keeps_its_account(
    bench: Bench,
) -> None:
    acme, rest = (ScriptedProvider(name, NO_TEMPLATES) for name in ("resend:acme", "resend"))
    keyed = ScriptedProvider("resend:old", Capabilities(copies=1, templates=True, idempotency_key_seconds=3600.0))
    templated, pinned = bench.books.enqueue(1, tenant_id="acme", **TEMPLATED) + bench.books.enqueue(1, tenant_id="acme")
    at = datetime.now(UTC)
    bench.books.change(pinned, provider="resend:old", attempt_count=1, was_uncertain=True, pinned_at=at)
    await bench.start([acme, rest, keyed], ACCOUNT_RULES="tenant=acme -> resend:acme")

    await bench.deliver([templated, pinned])

    await bench.settled({"failed": 1, "sent": 1})
    assert "configured: resend:acme." in str(bench.books.row(templated)["last_error"])
    assert (keyed.calls, acme.calls, rest.calls) == ([pinned], [], [])
