"""In every situation, sendgrid returns the outcome in `docs/providers.md`; the server counts the emails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import NoFreeConnection
from dispatcher.providers.sendgrid.responses import outcome_of
from dispatcher.transport.http_response import HttpResponse
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.outcome_table import (
    BROKEN,
    EACH_HTTP_API,
    ELSEWHERE,
    FAULT,
    LATE,
    NOT_CONNECTED,
    SILENCE,
    outcome_text,
    rows_in_docs,
)
from tests.providers.sendgrid_place import KEY, sendgrid_place
from tests.waiting import until

UNVERIFIED: Final = (
    "The from address does not match a verified Sender Identity. Mail cannot be sent until this error is resolved."
)
REPEATED: Final = "Each email address in the personalization block should be unique. We found [ann@example.com] twice."
PAGE: Final = Reply(504, b"<html><title>SendGrid - 504 Gateway Timeout</title></html>", {"Content-Type": "text/html"})


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table in docs/providers.md, and one way to cause the situation of this row.

    Attributes:
        row: The table's first column.
        expected: The outcome's type, and its reason if the type has several; `ProviderFault` for a fault.
        act: What the server does.
        code: The outcome's code.
        detail: A part of the outcome's detail.
        accepted: How often the email is in the server's ledger.
        seconds: The attempt's deadline.
    """

    row: str
    expected: str
    act: Fault | Reply | None = None
    code: str | None = None
    detail: str = ""
    accepted: int = 0
    sandbox: bool = False
    seconds: float = PATIENCE_SECONDS
    key: str = KEY


ACCEPTED: Final = "202"
SANDBOX: Final = "200 without a body, in sandbox mode"
NEITHER: Final = "another 2xx, or a redirect (not followed)"
SENDER: Final = "400 or 403 that blames the sender"
RECIPIENT: Final = "400 that blames only recipients"
CONTENT: Final = "another 400, or 422"
LARGE: Final = "413"
REFUSED: Final = "another 4xx, such as 406"
ACCOUNT: Final = "401, another 403, 404, 405, 451"
THROTTLED: Final = "429"
SERVER: Final = "408, 500, 503 and other 5xx"
GATEWAY: Final = "502 or 504: a gateway got no response from SendGrid"

BAD_SENDER: Final = "rejected rejected_sender"
BAD_RECIPIENT: Final = "rejected rejected_recipient"
BAD_CONTENT: Final = "rejected invalid_content"
DOWN: Final = "deferred server_error"

CASES: Final = [
    Case(ACCEPTED, "accepted", accepted=1),
    Case(SANDBOX, "accepted", accepted=1, sandbox=True, detail="sandbox mode"),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 unexpected with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html, titled 'Welcome'", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "titled 'Welcome'", accepted=1, sandbox=True),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", "307 unexpected", accepted=1),
    Case(NEITHER, "uncertain", Reply(204), "204", "204 unexpected"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED, "from"), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(400, "no valid address", "from.email"), "400", "from.email: no"),
    Case(RECIPIENT, BAD_RECIPIENT, sendgrid_error(400, "Does not contain a valid address.",
         "personalizations.0.to.0.email"), "400", "BadRequestsError personalizations.0.to.0.email: Does not"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(400, "The subject is required.", "subject"), "400", "subject: The"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(400, REPEATED, "personalizations.0"), "400", "[<address>] twice"),
    Case(CONTENT, BAD_CONTENT, Reply(400, b"<html>no</html>"), "400", "octets of no type"),
    Case(CONTENT, BAD_CONTENT, Reply(400, {"errors": "?"}), "400"),
    Case(CONTENT, BAD_CONTENT, Reply(400, {"errors": [1, None, {"message": 2}]}), "400"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(422, "no"), "422", "422 no"),
    Case(LARGE, "rejected too_large", sendgrid_error(413, "content too large"), "413", "PayloadTooLargeError"),
    Case(REFUSED, "rejected refused", sendgrid_error(406, "Not Acceptable"), "406"),
    Case(REFUSED, "rejected refused", Reply(418), "418", "with an empty body"),
    Case(ACCOUNT, FAULT, key="SG.another", detail="UnauthorizedError The provided authorization grant is invalid"),
    Case(ACCOUNT, FAULT, sendgrid_error(401, "Maximum credits exceeded"), detail="Maximum credits exceeded"),
    Case(ACCOUNT, FAULT, sendgrid_error(403, "access forbidden"), detail="ForbiddenError access forbidden"),
    Case(ACCOUNT, FAULT, sendgrid_error(404, "not found"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(405, "method not allowed"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(451, "region"), detail="EU"),
    Case(THROTTLED, "deferred throttled", sendgrid_error(429, "too many requests"), "429", "TooManyRequestsError"),
    Case(SERVER, DOWN, sendgrid_error(500, "internal server error"), "500", "InternalServerError"),
    Case(SERVER, DOWN, Reply(503, b"<html>"), "503", "ServiceUnavailableError"),
    Case(SERVER, DOWN, Reply(599), "599"),
    Case(SERVER, DOWN, Reply(408), "408"),
    Case(GATEWAY, "uncertain", PAGE, "504", "GatewayTimeoutError with 58 octets of text/html"),
    Case(GATEWAY, "uncertain", Reply(502), "502", "502 with an empty body"),
    Case(SILENCE, "uncertain", Fault.CLOSE_UNREAD),
    Case(SILENCE, "uncertain", Fault.RESET_UNREAD),
    Case(SILENCE, "uncertain", Fault.CLOSE, accepted=1, detail="no response: the connection was closed"),
    Case(SILENCE, "uncertain", Fault.RESET, accepted=1, detail="no response: the connection was reset"),
    Case(SILENCE, "uncertain", Fault.HANG, accepted=1, seconds=SOON_SECONDS, detail="no response before the deadline"),
    Case(SILENCE, "uncertain", Fault.DRIP, accepted=1, seconds=SOON_SECONDS, detail="no response before the deadline"),
    Case(SILENCE, "uncertain", Fault.DRIP_BODY, "202", "incomplete at the deadline", accepted=1, seconds=LATER_SECONDS),
    Case(BROKEN, "uncertain", Fault.HALF, "202", accepted=1, detail="the response with status 202 was cut off"),
    Case(BROKEN, "uncertain", Fault.HALF_HEAD, accepted=1),
    Case(BROKEN, "uncertain", Fault.GARBAGE, accepted=1),
    Case(ACCEPTED, "accepted", Fault.FLOOD, accepted=1),
    Case(ACCEPTED, "accepted", Fault.LAST_ANSWER, accepted=1),
]  # fmt: skip


def _named(case: Case) -> str:
    act = f"{case.act.status} {case.act.body!r}" if isinstance(case.act, Reply) else f"{case.act or case.key}"
    return re.sub(r"[^a-z0-9]+", "-", f"{case.row} {act} {case.sandbox}".lower()).strip("-")[:80]


@pytest.mark.parametrize("case", CASES, ids=_named)
async def test_each_situation_has_the_outcome_of_its_row(case: Case, tmp_path: Path, authority: Authority) -> None:
    email = an_email()
    behaviour = Behaviour(case.act, key=case.key)
    async with sendgrid_place(
        tmp_path, behaviour, tls=authority.server, ca_file=authority.ca_file, sandbox=case.sandbox
    ) as place:
        if case.expected == FAULT:
            with pytest.raises(ProviderFault, match=re.escape(case.detail)):
                await send(place.provider, email, seconds=case.seconds)
            assert not place.times()
            assert place.double.begun.total() == 1
            return

        sending = await send(place.provider, email, seconds=case.seconds, leaves=True)

        assert sending.outcome is not None
        assert outcome_text(sending.outcome) == case.expected
        assert sending.left == 1
        assert getattr(sending.outcome, "code", None) == case.code
        assert case.detail in (sending.outcome.detail or "")
        assert "@" not in (sending.outcome.detail or "")
        # The double may still be reading after the deadline.
        await until(lambda: len(place.times()) == case.accepted)
        assert place.times()[str(email.email_id)] == case.accepted
        assert place.double.begun.total() == 1


@pytest.mark.parametrize(
    "case", [case for case in CASES if isinstance(case.act, Fault) and case.act is not Fault.FLOOD], ids=_named
)
async def test_the_next_email_is_not_affected(case: Case, tmp_path: Path, authority: Authority) -> None:
    async with sendgrid_place(
        tmp_path, Behaviour(case.act), tls=authority.server, ca_file=authority.ca_file, connections=1
    ) as place:
        await send(place.provider, an_email(), seconds=case.seconds)
        place.double.behaviour = Behaviour()
        email = an_email()

        sending = await send(place.provider, email)

        assert isinstance(sending.outcome, Accepted)
        assert place.double.requests[str(email.email_id)] == 1


async def test_two_hundred_emails_accepted_without_a_response_are_uncertain(
    tmp_path: Path, authority: Authority
) -> None:
    emails = [an_email() for _ in range(200)]
    async with sendgrid_place(
        tmp_path, Behaviour(Fault.CLOSE), tls=authority.server, ca_file=authority.ca_file
    ) as place:
        sendings = await asyncio.gather(*(send(place.provider, email) for email in emails))

        assert [sending.outcome for sending in sendings if not isinstance(sending.outcome, Uncertain)] == []
        assert place.double.ledger().delivered == 200
        assert not place.double.ledger().duplicates
        assert place.double.requests == {str(email.email_id): 1 for email in emails}


async def test_the_message_id_is_recorded(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        sending = await send(place.provider, an_email())

    assert isinstance(sending.outcome, Accepted)
    assert len(sending.outcome.provider_message_id or "") == 22


async def test_a_throttled_email_waits_for_the_reset(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        place.double.behaviour.throttle(30)

        sending = await send(place.provider, an_email())

    assert isinstance(sending.outcome, Deferred)
    assert sending.outcome.reason is Reason.THROTTLED
    assert sending.outcome.retry_after == pytest.approx(30, abs=2)


NOW: Final = "Sat, 21 Nov 2026 07:30:00 GMT"
NOW_SECONDS: Final = 1795246200


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {}, None),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW}, 40),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS - 40), "date": NOW}, 0),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW, "retry-after": "60"}, 60),
        (429, {"retry-after": "7"}, 7),
        (429, {"retry-after": "Sat, 21 Nov 2026 07:31:00 GMT", "date": NOW}, 60),
        (429, {"x-ratelimit-reset": "soon", "retry-after": "-5"}, None),
        (429, {"x-ratelimit-reset": "9" * 4000}, None),
        (503, {"retry-after": "9"}, 9),
        (503, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW}, None),
    ],
)
def test_the_wait_comes_from_the_responses_headers(
    status: int, headers: Mapping[str, str], seconds: float | None
) -> None:
    outcome = outcome_of(HttpResponse(status, headers, b""))

    assert isinstance(outcome, Deferred)
    assert outcome.retry_after == seconds


def test_without_the_servers_clock_our_clock_is_used() -> None:
    reset_at = int(time.time()) + 40

    before = time.time()
    outcome = outcome_of(HttpResponse(429, {"x-ratelimit-reset": str(reset_at)}, b""))
    after = time.time()

    assert isinstance(outcome, Deferred)
    assert outcome.retry_after is not None
    assert reset_at - after <= outcome.retry_after <= reset_at - before


def test_an_invalid_message_id_is_not_recorded() -> None:
    for text in ("", "a\x00b", "é", "x" * 1000):
        outcome = outcome_of(HttpResponse(202, {"x-message-id": text}, b""))

        assert outcome == Accepted(None)


async def test_a_closed_port_is_connection_failed(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        await place.double.close()

        sending = await send(place.provider, an_email())

    assert sending.outcome is not None
    assert (NOT_CONNECTED, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_an_untrusted_certificate_is_a_fault(tmp_path: Path, authority: Authority) -> None:
    async with sendgrid_place(tmp_path, tls=authority.server) as place:
        with pytest.raises(ProviderFault, match="certificate"):
            await send(place.provider, an_email())

        assert not place.double.begun


async def test_nothing_is_sent_after_the_deadline(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        await send(place.provider, an_email())

        sending = await send(place.provider, an_email(), seconds=0)

        assert sending.outcome is not None
        assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
        assert sending.left == 0
        assert place.double.begun.total() == 1


async def test_a_wait_without_a_free_connection_does_not_count_against_sendgrid(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path, Behaviour(Fault.HANG), connections=1) as place:
        first = asyncio.create_task(send(place.provider, an_email()))
        await until(lambda: place.double.requests.total() == 1)

        with pytest.raises(NoFreeConnection):
            await send(place.provider, an_email(), seconds=SOON_SECONDS)

        place.double.drop_connections()
        assert isinstance((await first).outcome, Uncertain)
        assert place.double.requests.total() == 1


async def test_an_email_that_cannot_be_rendered_is_never_sent(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        sending = await send(place.provider, an_email(subject=""))

        assert isinstance(sending.outcome, Rejected)
        assert sending.outcome.reason is Reason.INVALID_CONTENT
        assert not place.double.begun


async def test_check_reports_a_key_that_may_send(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        words = await place.provider.check()

    assert words == "SendGrid accepts the API key, and the key may send; emails are delivered."


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(key="SG.another"), "Check SENDGRID_API_KEY"),
        (Behaviour(Reply(200, {"scopes": ["user.profile.read"]})), "Give the key the scope mail.send"),
        (Behaviour(Reply(200, b"<html>")), "Give the key the scope mail.send"),
        (Behaviour(Reply(500, b"")), "unexpected response"),
    ],
)
async def test_check_reports_each_problem(behaviour: Behaviour, words: str, tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path, behaviour) as place:
        with pytest.raises(ProviderFault, match=re.escape(words)):
            await place.provider.check()


async def test_check_of_an_unreachable_server_is_a_fault(tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path) as place:
        await place.double.close()

        with pytest.raises(ProviderFault, match="cannot be reached"):
            await place.provider.check()


def test_the_table_in_the_docs_has_the_same_rows() -> None:
    assert rows_in_docs("SendGrid", EACH_HTTP_API) == {(case.row, case.expected) for case in CASES} | ELSEWHERE
