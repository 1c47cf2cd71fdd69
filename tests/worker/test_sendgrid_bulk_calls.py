"""In bulk calls to SendGrid, each email gets a separate outcome. An accepted email arrived once; a refused email never
arrived."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.worker.bulk_calls import BulkSender
from dispatcher.worker.in_flight_email import LeaseExpired
from tests.providers import sendgrid_schema
from tests.providers.emails import LATER_SECONDS, an_email
from tests.providers.sendgrid_place import SendGridPlace, sendgrid_place
from tests.worker.bulk_sends import BulkSend, send_all, start_all, templated

CULPRIT = "customer-37@example.com"
ANOTHER = "customer-61@example.com"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[SendGridPlace]:
    """The sendgrid adapter and a SendGrid double."""
    async with sendgrid_place(tmp_path, Behaviour()) as opened:
        yield opened


def hundred() -> list[OutgoingEmail]:
    return [templated(number) for number in range(100)]


def calls(place: SendGridPlace) -> int:
    return sum(place.double.begun.values())


def assert_balanced(place: SendGridPlace, sends: list[BulkSend]) -> None:
    """Asserts that each accepted email arrived once, and no refused email arrived."""
    arrived = place.times()
    for each in sends:
        expected = 1 if isinstance(each.outcome, Accepted) else 0
        assert arrived[str(each.email.email_id)] == expected, each.outcome
        assert each.is_on_the_wire or not expected


async def test_a_hundred_emails_of_one_template_are_one_bulk_call_and_arrive_once(place: SendGridPlace) -> None:
    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {type(each.outcome) for each in sends} == {Accepted}
    assert calls(place) == 1
    assert_balanced(place, sends)


async def test_the_request_follows_sendgrids_rules_and_each_email_has_its_own_values(place: SendGridPlace) -> None:
    emails = [
        templated(1, subject="One", headers={"List-Unsubscribe": "<https://example.org/1>"}, tags=("receipt",)),
        templated(2, to=('"Doe, Ann" <ann@example.com>',), cc=("bob@example.com",), tags=("receipt",)),
        templated(3, to=(), bcc=("cleo@example.com", "dan@example.com"), tags=("receipt",)),
    ]

    await send_all(BulkSender(place.provider, 100), emails)

    (document,) = place.double.received
    sendgrid_schema.check(document)
    people = document.pop("personalizations")
    assert document == {
        "from": {"email": "shop@example.org", "name": "Shop"}, "template_id": "d-1", "categories": ["receipt"]
    }  # fmt: skip
    owners = [one["custom_args"]["email_id"] for one in people]
    assert owners == [str(emails[at].email_id) for at in (0, 1, 2, 2)]
    assert [one["headers"]["Message-ID"] for one in people] == [f"<{owner}@example.org>" for owner in owners]
    assert people[0]["subject"] == "One"
    assert people[0]["headers"]["List-Unsubscribe"] == "<https://example.org/1>"
    assert people[1]["to"] == [{"email": "ann@example.com", "name": '"Doe, Ann"'}]
    assert people[1]["cc"] == [{"email": "bob@example.com"}]
    assert [one["dynamic_template_data"]["order"] for one in people] == ["A1", "A2", "A3", "A3"]


async def test_emails_with_different_common_fields_are_in_different_calls(place: SendGridPlace) -> None:
    others: list[dict[str, object]] = [
        {}, {"sender": "Bank <bank@example.org>"}, {"template_id": "d-2"}, {"reply_to": ("desk@example.org",)},
        {"tags": ("news",)},
    ]  # fmt: skip
    emails = [templated(2 * at + twin, **changes) for at, changes in enumerate(others) for twin in (0, 1)]

    sends = await send_all(BulkSender(place.provider, 100), emails)

    assert calls(place) == len(others)
    assert_balanced(place, sends)


async def test_emails_without_a_template_or_with_attachments_are_sent_alone(place: SendGridPlace) -> None:
    file = Attachment("a.txt", "text/plain", b"a")
    emails = [an_email(), an_email(), templated(1, attachments=(file,)), templated(2, attachments=(file,))]

    sends = await send_all(BulkSender(place.provider, 100), emails)

    assert calls(place) == 4
    assert_balanced(place, sends)


async def test_an_email_that_cannot_be_rendered_does_not_affect_the_others(place: SendGridPlace) -> None:
    sends = await send_all(BulkSender(place.provider, 100), [*hundred(), templated(100, to=("nobody",))])

    assert isinstance(sends[-1].outcome, Rejected)
    assert sends[-1].left == 0
    assert {type(each.outcome) for each in sends[:-1]} == {Accepted}
    assert calls(place) == 1


async def test_two_emails_with_a_common_address_are_never_in_one_call(place: SendGridPlace) -> None:
    emails = [templated(1), templated(2, to=("Customer-1@Example.com",)), templated(3, cc=("customer-1@example.com",))]
    emails += [templated(number) for number in range(4, 10)]

    sends = await send_all(BulkSender(place.provider, 100), emails)

    assert {type(each.outcome) for each in sends} == {Accepted}
    assert calls(place) == 3
    assert_balanced(place, sends)


async def test_a_call_has_at_most_the_allowed_number_of_emails(place: SendGridPlace) -> None:
    sends = await send_all(BulkSender(place.provider, 10), hundred())

    assert calls(place) == 10
    assert max(len(document["personalizations"]) for document in place.double.received) == 10
    assert_balanced(place, sends)


async def test_a_call_has_at_most_the_recipients_that_sendgrid_allows(place: SendGridPlace) -> None:
    crowd = [templated(n, cc=tuple(f"friend-{n}-{each}@example.com" for each in range(299))) for n in range(7)]

    sends = await send_all(BulkSender(place.provider, 1000), crowd)

    assert calls(place) == 3
    assert_balanced(place, sends)


@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("culprits", [[CULPRIT], [CULPRIT, ANOTHER]], ids=["one", "two"])
async def test_culprits_among_a_hundred_are_refused_alone_and_the_others_arrive_once(
    place: SendGridPlace, names: bool, culprits: list[str]
) -> None:
    place.double.behaviour.culprits = dict.fromkeys(culprits, "Does not contain a valid address.")
    place.double.behaviour.names_culprits = names

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    refused = [each for each in sends if isinstance(each.outcome, Rejected)]
    assert [each.email.to[0] for each in refused] == culprits
    assert sum(isinstance(each.outcome, Accepted) for each in sends) == 100 - len(culprits)
    assert_balanced(place, sends)
    # If SendGrid's error names the suspects, the sender makes the first call, one call per suspect, and one call for
    # all other emails. Otherwise the sender repeatedly splits the call into halves.
    assert calls(place) == 2 + len(culprits) if names else calls(place) <= 1 + 14 * len(culprits)


async def test_a_wrongly_named_suspect_is_cleared(place: SendGridPlace) -> None:
    place.double.behaviour.fault = sendgrid_error(400, "Does not contain a valid address.", "personalizations.3.to")
    place.double.behaviour.times = 1

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {type(each.outcome) for each in sends} == {Accepted}
    assert_balanced(place, sends)


@pytest.mark.parametrize("field", ["from.email", "template_id", "reply_to.email"])
async def test_a_refused_common_field_fails_all_emails_at_once(place: SendGridPlace, field: str) -> None:
    place.double.behaviour.fault = sendgrid_error(400, "no", field)

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {type(each.outcome) for each in sends} == {Rejected}
    assert calls(place) == 1


async def test_a_call_that_is_too_large_is_split_in_halves(place: SendGridPlace) -> None:
    place.double.behaviour.fault = Reply(413)
    place.double.behaviour.times = 3

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {type(each.outcome) for each in sends} == {Accepted}
    assert calls(place) == 7
    assert_balanced(place, sends)


@pytest.mark.parametrize("act", [Fault.CLOSE, Fault.HANG])
async def test_a_lost_answer_leaves_every_email_of_the_call_uncertain_and_none_is_sent_again(
    place: SendGridPlace, act: Fault
) -> None:
    place.double.behaviour.fault, place.double.behaviour.times = act, 1

    sends = await send_all(BulkSender(place.provider, 50), hundred(), seconds=LATER_SECONDS)

    lost = [each for each in sends if isinstance(each.outcome, Uncertain)]
    assert len(lost) == 50
    assert all(each.is_on_the_wire for each in lost)
    assert calls(place) == 2
    assert set(place.times().values()) == {1}


async def test_429_defers_all_emails_and_one_reports_it(place: SendGridPlace) -> None:
    place.double.behaviour.throttle(60)

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {(type(each.outcome), getattr(each.outcome, "reason", None)) for each in sends} == {
        (Deferred, Reason.THROTTLED)
    }
    assert [each.attempt.is_already_counted for each in sends] == [False, *[True] * 99]
    assert calls(place) == 1


async def test_an_account_fault_concerns_every_email_of_the_call(place: SendGridPlace) -> None:
    place.double.behaviour.key = "SG.another"

    sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {type(each.outcome) for each in sends} == {ProviderFault}
    assert calls(place) == 1
    assert not place.times()


async def test_a_text_about_the_whole_call_repeats_no_email_content(place: SendGridPlace) -> None:
    emails = [templated(number, template_data={"code": f"{number}4711secret"}) for number in range(3)]
    place.double.behaviour.fault = sendgrid_error(500, "broke at 14711secret, 04711secret of customer-2")

    sends = await send_all(BulkSender(place.provider, 100), emails)

    for each in sends:
        assert isinstance(each.outcome, Deferred)
        assert each.outcome.detail is not None
        assert "secret" not in each.outcome.detail
        assert "customer" not in each.outcome.detail


async def test_an_email_that_may_not_be_sent_is_dropped_and_the_others_are_sent_once(place: SendGridPlace) -> None:
    sends = [BulkSend(email) for email in hundred()]
    sends[40].refusal = LeaseExpired()

    await start_all(BulkSender(place.provider, 100), sends)

    others = [each for each in sends if each is not sends[40]]
    assert {type(each.outcome) for each in others} == {Accepted}
    task = sends[40].task
    assert task is not None
    assert isinstance(task.exception(), LeaseExpired)
    assert str(sends[40].email.email_id) not in place.times()
    assert_balanced(place, others)


async def test_a_failed_connection_is_a_definite_refusal_for_all_emails(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        await place.double.close()

        sends = await send_all(BulkSender(place.provider, 100), hundred())

    assert {getattr(each.outcome, "reason", None) for each in sends} == {Reason.CONNECTION_FAILED}
    assert not any(each.is_on_the_wire for each in sends)
    assert sum(not each.attempt.is_already_counted for each in sends) == 1
