"""Emails that share a call to SendGrid: each gets its own outcome, and arrives as often as that says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Act, Behaviour, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.worker.coalescing import Coalescing
from dispatcher.worker.in_flight_email import LeaseRanOut
from tests.providers import sendgrid_schema
from tests.providers.emails import LATER_SECONDS, an_email
from tests.providers.sendgrid_place import SendGridPlace, sendgrid_place
from tests.worker.travellers import Traveller, set_out, templated, travel

CULPRIT = "customer-37@example.com"
ANOTHER = "customer-61@example.com"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[SendGridPlace]:
    """The sendgrid adapter and the double."""
    async with sendgrid_place(tmp_path, Behaviour()) as opened:
        yield opened


def hundred() -> list[OutgoingEmail]:
    return [templated(number) for number in range(100)]


def calls(place: SendGridPlace) -> int:
    return sum(place.double.begun.values())


def assert_balanced(place: SendGridPlace, travellers: list[Traveller]) -> None:
    """What was accepted arrived once, what was refused never."""
    arrived = place.times()
    for each in travellers:
        expected = 1 if isinstance(each.outcome, Accepted) else 0
        assert arrived[str(each.email.email_id)] == expected, each.outcome
        assert each.is_on_the_wire or not expected


async def test_a_hundred_of_one_template_share_one_call_and_each_arrives_once(place: SendGridPlace) -> None:
    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {type(each.outcome) for each in travellers} == {Accepted}
    assert calls(place) == 1
    assert_balanced(place, travellers)


async def test_the_body_keeps_to_sendgrids_rules_and_each_email_has_what_is_its_own(place: SendGridPlace) -> None:
    emails = [
        templated(1, subject="One", headers={"List-Unsubscribe": "<https://example.org/1>"}, tags=("receipt",)),
        templated(2, to=('"Doe, Ann" <ann@example.com>',), cc=("bob@example.com",), tags=("receipt",)),
        templated(3, to=(), bcc=("cleo@example.com", "dan@example.com"), tags=("receipt",)),
    ]

    await travel(Coalescing(place.provider, 100), emails)

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


async def test_what_is_not_common_makes_a_call_of_its_own(place: SendGridPlace) -> None:
    others: list[dict[str, object]] = [
        {}, {"sender": "Bank <bank@example.org>"}, {"template_id": "d-2"}, {"reply_to": ("desk@example.org",)},
        {"tags": ("news",)},
    ]  # fmt: skip
    emails = [templated(2 * at + twin, **changes) for at, changes in enumerate(others) for twin in (0, 1)]

    travellers = await travel(Coalescing(place.provider, 100), emails)

    assert calls(place) == len(others)
    assert_balanced(place, travellers)


async def test_what_has_no_template_or_has_files_travels_alone(place: SendGridPlace) -> None:
    file = Attachment("a.txt", "text/plain", b"a")
    emails = [an_email(), an_email(), templated(1, attachments=(file,)), templated(2, attachments=(file,))]

    travellers = await travel(Coalescing(place.provider, 100), emails)

    assert calls(place) == 4
    assert_balanced(place, travellers)


async def test_one_that_cannot_be_rendered_costs_the_others_nothing(place: SendGridPlace) -> None:
    travellers = await travel(Coalescing(place.provider, 100), [*hundred(), templated(100, to=("nobody",))])

    assert isinstance(travellers[-1].outcome, Rejected)
    assert travellers[-1].left == 0
    assert {type(each.outcome) for each in travellers[:-1]} == {Accepted}
    assert calls(place) == 1


async def test_two_with_an_address_in_common_never_share_a_call(place: SendGridPlace) -> None:
    emails = [templated(1), templated(2, to=("Customer-1@Example.com",)), templated(3, cc=("customer-1@example.com",))]
    emails += [templated(number) for number in range(4, 10)]

    travellers = await travel(Coalescing(place.provider, 100), emails)

    assert {type(each.outcome) for each in travellers} == {Accepted}
    assert calls(place) == 3
    assert_balanced(place, travellers)


async def test_a_call_holds_no_more_than_was_allowed(place: SendGridPlace) -> None:
    travellers = await travel(Coalescing(place.provider, 10), hundred())

    assert calls(place) == 10
    assert max(len(document["personalizations"]) for document in place.double.received) == 10
    assert_balanced(place, travellers)


async def test_nor_more_recipients_than_sendgrid_takes(place: SendGridPlace) -> None:
    crowd = [templated(n, cc=tuple(f"friend-{n}-{each}@example.com" for each in range(299))) for n in range(7)]

    travellers = await travel(Coalescing(place.provider, 1000), crowd)

    assert calls(place) == 3
    assert_balanced(place, travellers)


@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("culprits", [[CULPRIT], [CULPRIT, ANOTHER]], ids=["one", "two"])
async def test_culprits_among_a_hundred_are_refused_alone_and_the_others_arrive_once(
    place: SendGridPlace, names: bool, culprits: list[str]
) -> None:
    place.double.behaviour.culprits = dict.fromkeys(culprits, "Does not contain a valid address.")
    place.double.behaviour.names_culprits = names

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    refused = [each for each in travellers if isinstance(each.outcome, Rejected)]
    assert [each.email.to[0] for each in refused] == culprits
    assert sum(isinstance(each.outcome, Accepted) for each in travellers) == 100 - len(culprits)
    assert_balanced(place, travellers)
    # Named: the call, each of them, the others. Unnamed: by halves.
    assert calls(place) == 2 + len(culprits) if names else calls(place) <= 1 + 14 * len(culprits)


async def test_a_name_that_is_wrong_is_found_out(place: SendGridPlace) -> None:
    place.double.behaviour.act = sendgrid_error(400, "Does not contain a valid address.", "personalizations.3.to")
    place.double.behaviour.times = 1

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {type(each.outcome) for each in travellers} == {Accepted}
    assert_balanced(place, travellers)


@pytest.mark.parametrize("field", ["from.email", "template_id", "reply_to.email"])
async def test_what_is_common_is_refused_for_all_at_once(place: SendGridPlace, field: str) -> None:
    place.double.behaviour.act = sendgrid_error(400, "no", field)

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {type(each.outcome) for each in travellers} == {Rejected}
    assert calls(place) == 1


async def test_a_call_that_is_too_large_is_halved(place: SendGridPlace) -> None:
    place.double.behaviour.act = Reply(413)
    place.double.behaviour.times = 3

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {type(each.outcome) for each in travellers} == {Accepted}
    assert calls(place) == 7
    assert_balanced(place, travellers)


@pytest.mark.parametrize("act", [Act.CLOSE, Act.HANG])
async def test_a_lost_answer_leaves_every_email_of_the_call_uncertain_and_none_is_posted_again(
    place: SendGridPlace, act: Act
) -> None:
    place.double.behaviour.act, place.double.behaviour.times = act, 1

    travellers = await travel(Coalescing(place.provider, 50), hundred(), seconds=LATER_SECONDS)

    lost = [each for each in travellers if isinstance(each.outcome, Uncertain)]
    assert len(lost) == 50
    assert all(each.is_on_the_wire for each in lost)
    assert calls(place) == 2
    assert set(place.times().values()) == {1}


async def test_429_defers_all_and_one_of_them_tells_of_it(place: SendGridPlace) -> None:
    place.double.behaviour.throttle(60)

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {(type(each.outcome), getattr(each.outcome, "reason", None)) for each in travellers} == {
        (Deferred, Reason.THROTTLED)
    }
    assert [each.attempt.is_told_already for each in travellers] == [False, *[True] * 99]
    assert calls(place) == 1


async def test_an_account_fault_is_everybodys(place: SendGridPlace) -> None:
    place.double.behaviour.key = "SG.another"

    travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {type(each.outcome) for each in travellers} == {ProviderFault}
    assert calls(place) == 1
    assert not place.times()


async def test_words_about_all_repeat_none_of_them(place: SendGridPlace) -> None:
    emails = [templated(number, template_data={"code": f"{number}4711secret"}) for number in range(3)]
    place.double.behaviour.act = sendgrid_error(500, "broke at 14711secret, 04711secret of customer-2")

    travellers = await travel(Coalescing(place.provider, 100), emails)

    for each in travellers:
        assert isinstance(each.outcome, Deferred)
        assert each.outcome.detail is not None
        assert "secret" not in each.outcome.detail
        assert "customer" not in each.outcome.detail


async def test_whoever_may_not_leave_stays_behind_and_the_others_leave_once(place: SendGridPlace) -> None:
    travellers = [Traveller(email) for email in hundred()]
    travellers[40].refusal = LeaseRanOut()

    await set_out(Coalescing(place.provider, 100), travellers)

    others = [each for each in travellers if each is not travellers[40]]
    assert {type(each.outcome) for each in others} == {Accepted}
    task = travellers[40].task
    assert task is not None
    assert isinstance(task.exception(), LeaseRanOut)
    assert str(travellers[40].email.email_id) not in place.times()
    assert_balanced(place, others)


async def test_a_connection_that_fails_is_a_definite_no_for_all(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        await place.double.close()

        travellers = await travel(Coalescing(place.provider, 100), hundred())

    assert {getattr(each.outcome, "reason", None) for each in travellers} == {Reason.CONNECTION_FAILED}
    assert not any(each.is_on_the_wire for each in travellers)
    assert sum(not each.attempt.is_told_already for each in travellers) == 1
