"""Some providers cannot send every email. Tests which provider the worker tries, which emails wait, and which fail
immediately."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import pytest

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedProvider, accept, fail

AWAY = fail(ProviderFault("sendgrid", "bad credentials"), after_leaving=False)
NO_TEMPLATES = Capabilities(copies=1, templates=False)
TEMPLATED: Final[dict[str, Any]] = {"template_id": "d-1", "text": None}


async def refuse_templates(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Rejected:
    """Rejects templated emails before anything is sent, as an adapter without templates does."""
    return Rejected(
        Reason.INVALID_CONTENT,
        "only providers with templates (resend, sendgrid, ses) take template_id; set text or html",
    )


def pair(first: Act = accept) -> tuple[ScriptedProvider, ScriptedProvider]:
    """Two providers: `sendgrid` has templates and always acts like `first`; `smtp` has no templates."""
    sendgrid, smtp = ScriptedProvider("sendgrid"), ScriptedProvider("smtp", NO_TEMPLATES)
    sendgrid.always = first
    return sendgrid, smtp


def waiting_seconds(bench: Bench, email_id: UUID) -> float:
    """Seconds until a pending email is due; negative if it is due already."""
    (row,) = bench.books.select(
        "select extract(epoch from publish_due_at - clock_timestamp())::float8 as seconds from email_log"
        " where email_id = %s and status = 'pending'",
        email_id,
    )
    return float(row["seconds"])


@pytest.mark.parametrize("declares", [NO_TEMPLATES, Capabilities(copies=1, templates=True)], ids=["declared", "found"])
async def test_templated_emails_wait_for_the_provider_with_templates_while_others_use_the_next_provider(
    bench: Bench, declares: Capabilities
) -> None:
    sendgrid, smtp = ScriptedProvider("sendgrid"), ScriptedProvider("smtp", declares)
    sendgrid.always = AWAY
    templated = bench.books.enqueue(20, **TEMPLATED)
    for each in templated:
        smtp.script[each].extend([refuse_templates] * 20)
    worker = await bench.start([sendgrid, smtp])

    await bench.deliver(templated)
    texts = await bench.enqueue(20)

    await bench.settled({"pending": 20, "sent": 20})
    assert smtp.accepted == dict.fromkeys(texts, 1)
    await until(lambda: all(waiting_seconds(bench, each) > 0 for each in templated))
    assert {(row["status"], row["attempt_count"]) for row in bench.books.rows()} == {("pending", 0), ("sent", 1)}
    await until(lambda: worker.in_flight == 0)

    sendgrid.always = accept
    await until(lambda: all(waiting_seconds(bench, each) <= 0 for each in templated))
    await bench.deliver(templated[:1])  # as the relay does; this email tests the provider
    await bench.settled({"pending": 19, "sent": 21})
    await bench.deliver(templated[1:])

    await bench.settled({"sent": 40})
    assert sendgrid.accepted == dict.fromkeys(templated, 1)
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    await bench.nothing_left_on_the_queue()


async def test_emails_that_wait_for_their_provider_do_not_fill_the_window(bench: Bench) -> None:
    sendgrid, smtp = pair(AWAY)
    await bench.start([sendgrid, smtp], PREFETCH="2")
    await bench.enqueue(10, **TEMPLATED)

    texts = await bench.enqueue(10)

    await bench.settled({"pending": 10, "sent": 10})
    assert smtp.accepted == dict.fromkeys(texts, 1)
    assert {row["lease_token"] for row in bench.books.rows()} == {1}  # each email was leased only once


async def test_an_email_that_no_configured_provider_can_send_fails_at_once_and_names_what_it_needs(
    bench: Bench,
) -> None:
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


async def test_an_email_that_an_adapter_cannot_send_goes_to_the_next_provider_within_the_attempt(
    bench: Bench,
) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = refuse_templates
    worker = await bench.start([first, second])

    email_ids = await bench.enqueue(20)

    await bench.settled({"sent": 20})
    assert second.accepted == dict.fromkeys(email_ids, 1)
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    await until(lambda: worker.in_flight == 0)


async def test_an_email_that_every_adapter_refuses_fails_with_the_last_refusal(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = second.always = refuse_templates
    await bench.start([first, second])

    (email_id,) = await bench.enqueue()

    await bench.settled({"failed": 1})
    row = bench.books.row(email_id)
    assert (row["provider"], row["attempt_count"]) == ("second", 1)
    assert (
        row["last_error"] == "only providers with templates (resend, sendgrid, ses) take template_id; set text or html"
    )
