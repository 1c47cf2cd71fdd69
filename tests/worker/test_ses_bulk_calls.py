"""In bulk calls to SES, each email gets the outcome of its own entry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import botocore.session
import pytest

from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.ses.responses import BY_ENTRY
from dispatcher.worker.bulk_calls import BulkSender
from dispatcher.worker.in_flight_email import LeaseExpired
from tests.providers.ses_place import SesPlace, ses_place
from tests.worker.bulk_sends import BulkSend, send_all, start_all, templated

BULK = "/v2/email/outbound-bulk-emails"
SENT: tuple[type, Reason | None] = (Accepted, None)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[SesPlace]:
    """The ses adapter and an SES double."""
    async with ses_place(tmp_path) as opened:
        yield opened


def some(count: int) -> list[OutgoingEmail]:
    return [templated(number) for number in range(count)]


def kind(send: BulkSend) -> tuple[type, Reason | None]:
    return type(send.outcome), getattr(send.outcome, "reason", None)


async def test_fifty_emails_are_one_bulk_call_with_separate_tags_and_message_ids(place: SesPlace) -> None:
    sends = await send_all(BulkSender(place.provider, 1000), some(120))

    assert {kind(each) for each in sends} == {SENT}
    assert place.double.begun == {BULK: 3}
    assert place.times() == {str(each.email.email_id): 1 for each in sends}
    names = {each.outcome.provider_message_id for each in sends if isinstance(each.outcome, Accepted)}
    assert len(names) == 120


async def test_each_email_has_its_own_entry(place: SesPlace) -> None:
    headers = {"List-Unsubscribe": "<https://example.org/1>"}
    emails = [templated(1, headers=headers, tags=("a b",)), templated(2, to=("Ann Ü <ann@example.com>",))]

    await send_all(BulkSender(place.provider, 50), emails)

    (document,) = place.double.received
    first, second = document["BulkEmailEntries"]
    assert document["FromEmailAddress"] == "Shop <shop@example.org>"
    assert document["DefaultContent"]["Template"]["TemplateName"] == "d-1"
    assert first == {
        "Destination": {"ToAddresses": ["customer-1@example.com"]},
        "ReplacementTags": [
            {"Name": "email_id", "Value": str(emails[0].email_id)}, {"Name": "tag_1", "Value": "a_b"}
        ],
        "ReplacementEmailContent": {"ReplacementTemplate": {"ReplacementTemplateData": '{"order":"A1"}'}},
        "ReplacementHeaders": [{"Name": "List-Unsubscribe", "Value": "<https://example.org/1>"}],
    }  # fmt: skip
    assert second["Destination"]["ToAddresses"][0].isascii()


async def test_no_call_has_more_than_fifty_recipients(place: SesPlace) -> None:
    crowd = [templated(n, cc=tuple(f"friend-{n}-{each}@example.com" for each in range(19))) for n in range(5)]

    sends = await send_all(BulkSender(place.provider, 50), crowd)

    assert {kind(each) for each in sends} == {SENT}
    assert sum(place.double.begun.values()) == 3


async def test_each_entrys_status_is_the_outcome_of_its_email(place: SesPlace) -> None:
    words = {
        1: "MESSAGE_REJECTED", 3: "TRANSIENT_FAILURE", 5: "ACCOUNT_THROTTLED", 7: "MAIL_FROM_DOMAIN_NOT_VERIFIED",
        9: "FAILED", 11: "ACCOUNT_SUSPENDED", 13: "A_WORD_OF_TOMORROW", 15: "ACCOUNT_THROTTLED",
    }  # fmt: skip
    place.double.behaviour.culprits = {f"customer-{number}@example.com": word for number, word in words.items()}

    sends = await send_all(BulkSender(place.provider, 50), some(20))

    expected: dict[int, tuple[type, Reason | None]] = {
        1: (Rejected, Reason.INVALID_CONTENT), 3: (Deferred, Reason.SERVER_ERROR), 5: (Deferred, Reason.THROTTLED),
        7: (Rejected, Reason.REJECTED_SENDER), 9: (Deferred, Reason.REFUSED), 11: (ProviderFault, None),
        13: (Uncertain, Reason.OUTCOME_UNKNOWN), 15: (Deferred, Reason.THROTTLED),
    }  # fmt: skip
    assert [kind(each) for each in sends] == [expected.get(number, SENT) for number in range(20)]
    assert place.times() == {str(each.email.email_id): 1 for n, each in enumerate(sends) if n not in words}
    # Two entries of one call were throttled. The breaker counts them as one failure.
    assert [n for n, each in enumerate(sends) if each.attempt.is_already_counted] == [15]


def test_every_entry_status_is_mapped_to_an_outcome() -> None:
    model = botocore.session.Session().get_service_model("sesv2")

    assert {"SUCCESS", *BY_ENTRY} == set(model.shape_for("BulkEmailStatus").enum)


async def test_a_call_refused_as_a_whole_is_split_in_halves_and_the_others_arrive_once(place: SesPlace) -> None:
    place.double.behaviour.fault = Reply(400, {"message": "Bad"}, {"x-amzn-ErrorType": "BadRequestException"})
    place.double.behaviour.times = 3

    sends = await send_all(BulkSender(place.provider, 50), some(20))

    assert {kind(each) for each in sends} == {SENT}
    assert set(place.times().values()) == {1}
    assert sum(place.double.begun.values()) == 7


async def test_a_missing_template_fails_every_email_with_one_call(place: SesPlace) -> None:
    place.double.behaviour.fault = Reply(404, {"message": "no template"}, {"x-amzn-ErrorType": "NotFoundException"})

    sends = await send_all(BulkSender(place.provider, 50), some(20))

    assert {kind(each) for each in sends} == {(Rejected, Reason.INVALID_CONTENT)}
    assert sum(place.double.begun.values()) == 1


@pytest.mark.parametrize(
    "act", [Fault.CLOSE, Reply(200, {"BulkEmailEntryResults": [{"Status": "SUCCESS", "MessageId": "1"}]}), Fault.HTML]
)
async def test_a_lost_or_incomplete_answer_leaves_all_emails_uncertain(place: SesPlace, act: Fault | Reply) -> None:
    place.double.behaviour.fault = act

    sends = await send_all(BulkSender(place.provider, 50), some(20))

    assert {kind(each) for each in sends} == {(Uncertain, Reason.OUTCOME_UNKNOWN)}
    assert all(each.is_on_the_wire for each in sends)
    assert sum(place.double.begun.values()) == 1


async def test_an_email_that_may_not_be_sent_is_dropped(place: SesPlace) -> None:
    sends = [BulkSend(email) for email in some(20)]
    sends[4].refusal = LeaseExpired()

    await start_all(BulkSender(place.provider, 50), sends)

    others = sends[:4] + sends[5:]
    assert {kind(each) for each in others} == {SENT}
    assert place.times() == {str(each.email.email_id): 1 for each in others}
