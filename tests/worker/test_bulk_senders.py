"""In bulk calls to SendGrid and SES, each email gets a separate outcome. An accepted email arrived once; a refused
email never arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import botocore.session
import pytest

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Provider
from dispatcher.providers.ses.responses import BY_ENTRY
from dispatcher.worker.bulk_calls import BulkSender
from dispatcher.worker.in_flight_email import LeaseExpired
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, Sending, an_email
from tests.providers.http_places import SendGridPlace
from tests.providers.ses_place import SesPlace, ses_place

CULPRIT = "customer-37@example.com"
ANOTHER = "customer-61@example.com"
Place = SendGridPlace | SesPlace
Kind = tuple[type, Reason | None]
SENT: Final[Kind] = (Accepted, None)


def templated(number: int, **changes: Any) -> OutgoingEmail:
    usual = {"to": (f"customer-{number}@example.com",), "template_id": "d-1", "template_data": {"order": f"A{number}"}}
    return an_email(**{"subject": "", "text": None, **usual, **changes})


class BulkSend(Sending):
    """One email's attempt. `refusal`: what `mark_on_wire` raises; `fault`: what the adapter raised."""

    def __init__(self, email: OutgoingEmail, seconds: float) -> None:
        super().__init__(seconds)
        self.email = email
        self.refusal: Exception | None = None
        self.fault: Exception | None = None

    @property
    def kind(self) -> Kind:
        return type(self.fault or self.outcome), getattr(self.outcome, "reason", None)

    def mark_on_wire(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        super().mark_on_wire()
        assert self.left == 1, "`mark_on_wire` was called twice"

    async def send(self, provider: Provider) -> None:
        try:
            self.outcome = await provider.send(self.email, self)
        except (ProviderFault, LeaseExpired) as fault:
            self.fault = fault


async def send_all(
    place: Place,
    most_emails: int,
    emails: Iterable[OutgoingEmail],
    *,
    seconds: float = PATIENCE_SECONDS,
    refused_at: int | None = None,
) -> list[BulkSend]:
    """Sends all emails at the same moment; returns when each email has an outcome. Asserts that each accepted email
    arrived once, and no refused email arrived. `refused_at`: the position of an email whose lease has expired."""
    provider = BulkSender(place.provider, most_emails)
    sends = [BulkSend(email, seconds) for email in emails]
    if refused_at is not None:
        sends[refused_at].refusal = LeaseExpired()
    await asyncio.gather(*(each.send(provider) for each in sends))
    arrived = place.times()
    for each in sends:
        if not isinstance(each.outcome, Uncertain):
            expected = 1 if isinstance(each.outcome, Accepted) else 0
            assert arrived[str(each.email.email_id)] == expected, each.outcome
            assert each.left or not expected
    return sends


def some(count: int) -> list[OutgoingEmail]:
    return [templated(number) for number in range(count)]


def kinds(sends: Iterable[BulkSend]) -> set[Kind]:
    return {each.kind for each in sends}


def calls(place: Place) -> int:
    return sum(place.double.begun.values())


@pytest.fixture
async def ses(tmp_path: Path) -> AsyncIterator[SesPlace]:
    async with ses_place(tmp_path / "ses") as opened:
        yield opened


def common_fields() -> list[OutgoingEmail]:
    others: list[dict[str, Any]] = [{}, {"sender": "Bank <bank@example.org>"}, {"template_id": "d-2"}]
    others += [{"reply_to": ("desk@example.org",)}, {"tags": ("news",)}]
    return [templated(2 * at + twin, **changes) for at, changes in enumerate(others) for twin in (0, 1)]


def alone() -> list[OutgoingEmail]:
    file = Attachment("a.txt", "text/plain", b"a")
    return [an_email(), an_email(), templated(1, attachments=(file,)), templated(2, attachments=(file,))]


def same_address() -> list[OutgoingEmail]:
    twins = [templated(1), templated(2, to=("Customer-1@Example.com",)), templated(3, cc=("customer-1@example.com",))]
    return [*twins, *(templated(number) for number in range(4, 10))]


def crowd(count: int, friends: int) -> list[OutgoingEmail]:
    return [templated(n, cc=tuple(f"friend-{n}-{each}@example.com" for each in range(friends))) for n in range(count)]


@pytest.mark.parametrize(
    ("most_emails", "emails", "expected"),
    [
        (100, lambda: some(100), 1),
        (10, lambda: some(100), 10),
        (1000, lambda: crowd(7, 299), 3),  # SendGrid allows a thousand recipients
        (100, common_fields, 5),
        (100, alone, 4),
        (100, same_address, 3),
    ],
    ids=["one template", "limit of emails", "limit of recipients", "common fields", "alone", "same address"],
)
async def test_emails_to_sendgrid_share_a_call_if_limits_and_fields_allow(
    place: SendGridPlace, most_emails: int, emails: Callable[[], list[OutgoingEmail]], expected: int
) -> None:
    sends = await send_all(place, most_emails, emails())

    assert kinds(sends) == {SENT}
    assert calls(place) == expected
    assert max(len(document["personalizations"]) for document in place.double.received) <= max(most_emails, 100)


async def test_an_email_that_cannot_be_rendered_does_not_affect_the_others(place: SendGridPlace) -> None:
    *others, invalid = await send_all(place, 100, [*some(100), templated(100, to=("nobody",))])

    assert isinstance(invalid.outcome, Rejected)
    assert (invalid.left, kinds(others), calls(place)) == (0, {SENT}, 1)


@pytest.mark.parametrize("names", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("culprits", [[CULPRIT], [CULPRIT, ANOTHER]], ids=["one", "two"])
async def test_culprits_are_refused_alone(place: SendGridPlace, names: bool, culprits: list[str]) -> None:
    place.double.behaviour.culprits = dict.fromkeys(culprits, "Does not contain a valid address.")
    place.double.behaviour.names_culprits = names

    sends = await send_all(place, 100, some(100))

    assert [each.email.to[0] for each in sends if isinstance(each.outcome, Rejected)] == culprits
    assert sum(each.kind == SENT for each in sends) == 100 - len(culprits)
    # If SendGrid's error names the suspects, the sender makes the first call, one call per suspect, and one call for
    # all other emails. Otherwise the sender repeatedly splits the call into halves.
    assert calls(place) == 2 + len(culprits) if names else calls(place) <= 1 + 14 * len(culprits)


@pytest.mark.parametrize("act", [Fault.CLOSE, Fault.HANG])
async def test_a_lost_answer_leaves_a_whole_call_uncertain_and_unrepeated(place: SendGridPlace, act: Fault) -> None:
    place.double.behaviour.fault, place.double.behaviour.times = act, 1

    sends = await send_all(place, 50, some(100), seconds=LATER_SECONDS)

    lost = [each for each in sends if isinstance(each.outcome, Uncertain)]
    assert len(lost) == 50
    assert all(each.left for each in lost)
    assert calls(place) == 2
    assert set(place.times().values()) == {1}


async def test_a_text_about_the_whole_call_repeats_no_email_content(place: SendGridPlace) -> None:
    emails = [templated(number, template_data={"code": f"{number}4711secret"}) for number in range(3)]
    place.double.behaviour.fault = sendgrid_error(500, "broke at 14711secret, 04711secret of customer-2")

    for each in await send_all(place, 100, emails):
        assert isinstance(each.outcome, Deferred)
        assert each.outcome.detail is not None
        assert "secret" not in each.outcome.detail
        assert "customer" not in each.outcome.detail


async def test_an_email_that_may_not_be_sent_is_dropped_alone(place: SendGridPlace, ses: SesPlace) -> None:
    for used in (place, ses):
        sends = await send_all(used, 50, some(50), refused_at=4)

        assert isinstance(sends.pop(4).fault, LeaseExpired)
        assert kinds(sends) == {SENT}


async def test_a_failed_connection_is_a_definite_refusal_for_all_emails(place: SendGridPlace) -> None:
    await place.double.close()

    sends = await send_all(place, 100, some(100))

    assert kinds(sends) == {(Deferred, Reason.CONNECTION_FAILED)}
    assert not any(each.left for each in sends)
    assert sum(not each.is_already_counted for each in sends) == 1


async def test_a_call_to_ses_has_at_most_fifty_emails_and_recipients(ses: SesPlace) -> None:
    assert kinds(await send_all(ses, 50, crowd(5, 19))) == {SENT}
    assert calls(ses) == 3
    ses.double.begun.clear()

    sends = await send_all(ses, 1000, some(120))

    assert kinds(sends) == {SENT}
    assert ses.double.begun == {"/v2/email/outbound-bulk-emails": 3}
    names = {each.outcome.provider_message_id for each in sends if isinstance(each.outcome, Accepted)}
    assert len(names) == 120


async def test_each_ses_entrys_status_is_the_outcome_of_its_email(ses: SesPlace) -> None:
    entries: dict[int, tuple[str, Kind]] = {
        1: ("MESSAGE_REJECTED", (Rejected, Reason.INVALID_CONTENT)),
        3: ("TRANSIENT_FAILURE", (Deferred, Reason.SERVER_ERROR)),
        5: ("ACCOUNT_THROTTLED", (Deferred, Reason.THROTTLED)),
        7: ("MAIL_FROM_DOMAIN_NOT_VERIFIED", (Rejected, Reason.REJECTED_SENDER)),
        9: ("FAILED", (Deferred, Reason.REFUSED)),
        11: ("ACCOUNT_SUSPENDED", (ProviderFault, None)),
        13: ("A_WORD_OF_TOMORROW", (Uncertain, Reason.OUTCOME_UNKNOWN)),
        15: ("ACCOUNT_THROTTLED", (Deferred, Reason.THROTTLED)),
    }
    culprits = {f"customer-{number}@example.com": word for number, (word, _) in entries.items()}
    ses.double.behaviour.culprits = culprits

    sends = await send_all(ses, 50, some(20))

    assert [each.kind for each in sends] == [entries.get(number, ("", SENT))[1] for number in range(20)]
    assert sum(ses.times().values()) == 20 - len(entries)
    # Two entries of one call were throttled. The breaker counts them as one failure.
    assert [n for n, each in enumerate(sends) if each.is_already_counted] == [15]
    model = botocore.session.Session().get_service_model("sesv2")
    assert {"SUCCESS", *BY_ENTRY} == set(model.shape_for("BulkEmailStatus").enum)


BAD_REQUEST = Reply(400, {"message": "Bad"}, {"x-amzn-ErrorType": "BadRequestException"})
NO_TEMPLATE = Reply(404, {"message": "no template"}, {"x-amzn-ErrorType": "NotFoundException"})
INCOMPLETE = Reply(200, {"BulkEmailEntryResults": [{"Status": "SUCCESS", "MessageId": "1"}]})
LOST: Final[Kind] = (Uncertain, Reason.OUTCOME_UNKNOWN)


INVALID: Final[Kind] = (Rejected, Reason.INVALID_CONTENT)
WRONG_SUSPECT = sendgrid_error(400, "Does not contain a valid address.", "personalizations.3.to")


@pytest.mark.parametrize(
    ("is_ses", "fault", "times", "kind", "expected"),
    [
        pytest.param(False, WRONG_SUSPECT, 1, SENT, 3, id="wrong suspect"),
        pytest.param(False, Reply(413), 3, SENT, 7, id="too large: halves"),
        pytest.param(
            False, sendgrid_error(400, "no", "from.email"), None, (Rejected, Reason.REJECTED_SENDER), 1, id="sender"
        ),
        pytest.param(False, sendgrid_error(400, "no", "template_id"), None, INVALID, 1, id="template"),
        pytest.param(False, sendgrid_error(400, "no", "reply_to.email"), None, INVALID, 1, id="reply-to"),
        pytest.param(False, Reply(401, b"{}"), None, (ProviderFault, None), 1, id="account"),
        pytest.param(False, sendgrid_error(429, "no"), None, (Deferred, Reason.THROTTLED), 1, id="throttled"),
        pytest.param(False, sendgrid_error(503, "no"), None, (Deferred, Reason.SERVER_ERROR), 1, id="server error"),
        pytest.param(True, BAD_REQUEST, 3, SENT, 7, id="SES: refused: halves"),
        pytest.param(True, NO_TEMPLATE, None, INVALID, 1, id="SES: no template"),
        pytest.param(True, Fault.CLOSE, None, LOST, 1, id="SES: lost"),
        pytest.param(True, INCOMPLETE, None, LOST, 1, id="SES: incomplete"),
        pytest.param(True, Fault.HTML, None, LOST, 1, id="SES: not JSON"),
    ],
)
async def test_a_call_that_is_refused_or_lost_as_a_whole_is_made_again_in_parts_or_decides_all_its_emails(
    place: SendGridPlace,
    ses: SesPlace,
    is_ses: bool,
    fault: Fault | Reply,
    times: int | None,
    kind: Kind,
    expected: int,
) -> None:
    used: Place = ses if is_ses else place
    used.double.behaviour.fault, used.double.behaviour.times = fault, times

    sends = await send_all(used, 20 if is_ses else 100, some(20 if is_ses else 100))

    assert (kinds(sends), calls(used)) == ({kind}, expected)
    assert not is_ses or all(each.left for each in sends) or kind[0] is Rejected
    if kind[0] is Deferred:  # one email reports it
        assert [each.is_already_counted for each in sends] == [False, *[True] * 99]
