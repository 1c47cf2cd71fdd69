"""In every situation, ses returns the outcome in `docs/providers.md`; the server counts the emails."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import botocore.session
import pytest
from botocore.retries.standard import ThrottledRetryableChecker

from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.errors import ProviderFault
from dispatcher.providers.ses.responses import VERDICTS
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, PATIENCE_SECONDS, SOON_SECONDS, an_email, send, send_until_on_wire
from tests.providers.outcome_table import FAULT, outcome_text, rows_in_docs
from tests.providers.ses_place import ses_place
from tests.waiting import until


def aws_error(status: int, kind: str, message: str = "", **headers: str) -> Reply:
    """An error response in the form of SES v2."""
    return Reply(status, {"message": message}, {"x-amzn-ErrorType": f"{kind}:http://internal.amazon.com/", **headers})


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table in docs/providers.md, and one way to cause the situation of this row.

    Attributes:
        row: The table's first column.
        expected: The outcome's type, and its reason if the type has several; `ProviderFault` for a fault.
        act: What the server does.
        code: The outcome's code.
        detail: A part of the outcome's detail, or of the fault.
        accepted: How often the email is in the server's ledger.
        has_template: The email uses a template.
    """

    row: str
    expected: str
    act: Fault | Reply | None = None
    code: str | None = None
    detail: str = ""
    accepted: int = 0
    has_template: bool = False
    seconds: float = PATIENCE_SECONDS


ACCEPTED: Final = "200 with a MessageId"
NEITHER: Final = "200 without one, another 2xx, or a redirect (not followed)"
THROTTLED: Final = "TooManyRequestsException, ThrottlingException and similar; 429"
QUOTA: Final = "the same about the daily quota; LimitExceededException"
STOPPED: Final = "SendingPausedException, AccountSuspendedException"
SENDER: Final = "MailFromDomainNotVerifiedException; MessageRejected: the sender is not verified"
SANDBOX: Final = "MessageRejected: only recipients are not verified (the sandbox)"
SYNTAX: Final = "BadRequestException or MessageRejected about an address's syntax"
CONTENT: Final = "another MessageRejected or BadRequestException"
LARGE: Final = "BadRequestException about the length; 413"
TEMPLATE: Final = "NotFoundException, and the email names a template"
SET_UP: Final = "another NotFoundException; any error about the configuration set"
ACCOUNT: Final = "credentials, signature, clock, permission; 401, 403, 404, 405, 407"
REFUSED: Final = "another 4xx"
SERVER: Final = "InternalFailure, ServiceUnavailable; 408, 500, 503, another 5xx"
GATEWAY: Final = "502 or 504 without a code of SES's own"
SILENCE: Final = "no response after the request was sent: closed, reset, deadline passed"
BROKEN: Final = "an incomplete response, invalid HTTP, or unexpected JSON"
LOCAL_SIZE: Final = "more than 40 MB, found before sending"
LOCAL_RECIPIENTS: Final = "more than 50 recipients, or a recipient with non-ASCII letters before the @"
LOCAL_SENDER: Final = "a sender with non-ASCII letters before the @"
NOT_CONNECTED: Final = "no connection: refused, unknown host, TLS handshake interrupted, proxy"
NOT_SIGNED: Final = "no credentials; the certificate is not trusted, or TLS failed for another definite reason"
LATE: Final = "the deadline passes before the request is sent"

UNVERIFIED: Final = "Email address is not verified. The following identities failed the check: shop@example.org"
FAILED: Final = "Email address is not verified. The following identities failed the check in region EU-WEST-1: "
EXPIRED: Final = "Signature expired: 20261101T000000Z is now earlier than 20261101T001000Z"
NO_SET: Final = "Configuration set <news> does not exist."
SOON: Final = SOON_SECONDS
PAGE: Final = b"<html><title>504 Gateway Time-out</title></html>"

CASES: Final = [
    Case(ACCEPTED, "accepted", accepted=1),
    Case(ACCEPTED, "accepted", Fault.LAST_ANSWER, accepted=1),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "without a MessageId (no content type)", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "without a MessageId (text/html)", accepted=1),
    Case(NEITHER, "uncertain", Fault.FLOOD, "202", accepted=1),
    Case(NEITHER, "uncertain", Reply(204), "204"),
    Case(NEITHER, "uncertain", Reply(200, {"MessageId": 5}), "200"),
    Case(NEITHER, "uncertain", Reply(200, {"MessageId": ""}), "200"),
    Case(NEITHER, "uncertain", Reply(200, b'{"MessageId": "broken'), "200"),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", accepted=1),
    Case(THROTTLED, "deferred throttled", aws_error(429, "TooManyRequestsException", "Maximum sending rate exceeded."),
         "TooManyRequestsException", "Maximum sending rate"),
    Case(THROTTLED, "deferred throttled", aws_error(400, "ThrottlingException", "Rate"), "ThrottlingException"),
    Case(THROTTLED, "deferred throttled", Reply(429, b"slow down"), "429", "slow down"),
    Case(QUOTA, FAULT, aws_error(429, "TooManyRequestsException", "Daily message quota exceeded."), detail="Daily"),
    Case(QUOTA, FAULT, aws_error(400, "LimitExceededException", "limit"), detail="higher sending quota"),
    Case(STOPPED, FAULT, aws_error(400, "SendingPausedException", "Paused"), detail="SendingPausedException"),
    Case(STOPPED, FAULT, aws_error(400, "AccountSuspendedException", "Suspended"), detail="SES console"),
    Case(STOPPED, FAULT, aws_error(400, "MessageRejected", "Sending for this account is paused."), detail="paused"),
    Case(SENDER, "rejected rejected_sender", aws_error(400, "MessageRejected", UNVERIFIED), "MessageRejected",
         "failed the check: <address>"),
    Case(SENDER, "rejected rejected_sender", aws_error(400, "MailFromDomainNotVerifiedException", "no"),
         "MailFromDomainNotVerifiedException"),
    Case(CONTENT, "rejected invalid_content", aws_error(400, "MessageRejected", "virus"), "MessageRejected", "virus"),
    Case(SENDER, "rejected rejected_sender", aws_error(400, "MessageRejected", FAILED + "SHOP@example.org"),
         "MessageRejected"),
    Case(SANDBOX, FAULT, aws_error(400, "MessageRejected", FAILED + "ann@example.org"), detail="production access"),
    Case(SYNTAX, "rejected rejected_recipient", aws_error(400, "BadRequestException", "Missing final '@domain'"),
         "BadRequestException"),
    Case(SYNTAX, "rejected rejected_recipient", aws_error(400, "InvalidParameterValue", "Illegal address"),
         "InvalidParameterValue"),
    Case(SET_UP, FAULT, aws_error(400, "ConfigurationSetDoesNotExist", "no"), detail="CONFIGURATION_SET"),
    Case(STOPPED, FAULT, aws_error(400, "AccountSendingPaused", "no"), detail="SES console"),
    Case(ACCOUNT, FAULT, aws_error(403, "InvalidSignatureException", EXPIRED), detail="clock"),
    Case(QUOTA, FAULT, aws_error(400, "MessageRejected", "Daily sending quota exceeded"), detail="higher"),
    Case(LARGE, "rejected too_large", aws_error(400, "BadRequestException", "Message length is more than 41943040"),
         "BadRequestException"),
    Case(LARGE, "rejected too_large", Reply(413), "413"),
    Case(TEMPLATE, "rejected invalid_content", aws_error(404, "NotFoundException", "Template welcome does not exist."),
         "NotFoundException", has_template=True),
    Case(SET_UP, FAULT, aws_error(404, "NotFoundException", NO_SET), detail="CONFIGURATION_SET", has_template=True),
    Case(SET_UP, FAULT, aws_error(404, "NotFoundException", "gone"), detail="CONFIGURATION_SET"),
    Case(SET_UP, FAULT, aws_error(400, "BadRequestException", NO_SET), detail="<news> does not exist"),
    Case(ACCOUNT, FAULT, aws_error(403, "UnrecognizedClientException", "Token invalid."), detail="AWS_ACCESS_KEY_ID"),
    Case(ACCOUNT, FAULT, aws_error(403, "SignatureDoesNotMatch", "no"), detail="AWS_SECRET_ACCESS_KEY"),
    Case(ACCOUNT, FAULT, aws_error(400, "ExpiredTokenException", "no"), detail="credentials"),
    Case(ACCOUNT, FAULT, aws_error(403, "AccessDeniedException", "not authorized on identity/ann@example.com"),
         detail="not authorized on <address>"),
    Case(ACCOUNT, FAULT, aws_error(403, "RequestExpired", "no"), detail="clock"),
    Case(ACCOUNT, FAULT, aws_error(403, "InvalidSignatureException",
         "Signature expired: 20261128T120000Z is now earlier than 20261128T120600Z"),
         detail="Correct this host's clock"),
    Case(ACCOUNT, FAULT, aws_error(403, "SignatureDoesNotMatch",
         "Signature not yet current: 20261128T121100Z is still later than 20261128T120500Z"),
         detail="Correct this host's clock"),
    Case(ACCOUNT, FAULT, Reply(403, b"<html>"), detail="ses:SendEmail"),
    Case(ACCOUNT, FAULT, Reply(404), detail="DISPATCHER_SES_ENDPOINT_URL"),
    Case(REFUSED, "rejected refused", aws_error(400, "BrandNewException", "no"), "BrandNewException"),
    Case(REFUSED, "rejected refused", Reply(418), "418"),
    Case(SERVER, "deferred server_error", aws_error(500, "InternalFailure"), "InternalFailure"),
    Case(SERVER, "deferred server_error", aws_error(503, "ServiceUnavailable"), "ServiceUnavailable"),
    Case(SERVER, "deferred server_error", aws_error(504, "InternalFailure"), "InternalFailure"),
    Case(SERVER, "deferred server_error", Reply(500, b"<html>"), "500"),
    Case(SERVER, "deferred server_error", Reply(408), "408"),
    Case(SERVER, "deferred server_error", Reply(599, b"?"), "599"),
    Case(GATEWAY, "uncertain", Reply(504, PAGE), "504"),
    Case(GATEWAY, "uncertain", Reply(502), "502"),
    Case(SILENCE, "uncertain", Fault.CLOSE_UNREAD),
    Case(SILENCE, "uncertain", Fault.RESET_UNREAD),
    Case(SILENCE, "uncertain", Fault.CLOSE, detail="the connection was closed", accepted=1),
    Case(SILENCE, "uncertain", Fault.RESET, detail="the connection was reset", accepted=1),
    Case(SILENCE, "uncertain", Fault.HANG, detail="no response before the deadline", accepted=1, seconds=LATER_SECONDS),
    Case(SILENCE, "uncertain", Fault.DRIP, detail="no response before the deadline", accepted=1, seconds=LATER_SECONDS),
    Case(SILENCE, "uncertain", Fault.DRIP_BODY, "202", "incomplete at the deadline", accepted=1, seconds=LATER_SECONDS),
    Case(BROKEN, "uncertain", Reply(200, ["MessageId"]), "200"),
    Case(BROKEN, "uncertain", Reply(503, ["?"]), "503", detail="cannot be parsed"),
    Case(BROKEN, "uncertain", Fault.HALF, "202", accepted=1),
    Case(BROKEN, "uncertain", Fault.HALF_HEAD, accepted=1),
    Case(BROKEN, "uncertain", Fault.GARBAGE, accepted=1),
]  # fmt: skip
ELSEWHERE: Final = {
    (LOCAL_SIZE, "rejected too_large"),
    (LOCAL_RECIPIENTS, "rejected rejected_recipient"),
    (LOCAL_SENDER, "rejected rejected_sender"),
    (NOT_CONNECTED, "deferred connection_failed"),
    (NOT_SIGNED, FAULT),
    (LATE, "deferred timeout_before_send"),
}
"""Rows that need no special server. The tests are below, in test_ses_connecting and in test_ses_transport."""


def _named(case: Case) -> str:
    act = str(case.act)
    if isinstance(case.act, Reply):
        act = f"{case.act.status} {dict(case.act.headers)} {case.act.body!r}".replace("x-amzn-ErrorType", "")
    return re.sub(r"[^a-z0-9]+", "-", f"{case.row[:30]} {act}".lower()).strip("-")[:100]


@pytest.mark.parametrize("case", CASES, ids=_named)
async def test_each_situation_has_the_outcome_of_its_row(case: Case, tmp_path: Path, authority: Authority) -> None:
    email = an_email(template_id="welcome", text=None) if case.has_template else an_email()
    async with ses_place(tmp_path, Behaviour(case.act), tls=authority.server, ca_file=authority.ca_file) as place:
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


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "clear"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if isinstance(case.act, Fault) and case.act is not Fault.FLOOD], ids=_named
)
async def test_the_next_email_is_not_affected(case: Case, tls: bool, tmp_path: Path, authority: Authority) -> None:
    """There is only one connection. Whatever happened to an email, the next email gets a usable connection."""
    async with ses_place(
        tmp_path, Behaviour(case.act), tls=authority.server if tls else None, ca_file=authority.ca_file, connections=1
    ) as place:
        first = await send(place.provider, an_email(), seconds=case.seconds, leaves=True)
        place.double.behaviour = Behaviour()
        email = an_email()

        sending = await send(place.provider, email)

        assert outcome_text(first.outcome) == case.expected if first.outcome else False
        assert isinstance(sending.outcome, Accepted)
        assert place.double.requests[str(email.email_id)] == 1


async def test_two_hundred_emails_accepted_without_a_response_are_uncertain(
    tmp_path: Path, authority: Authority
) -> None:
    emails = [an_email() for _ in range(200)]
    async with ses_place(tmp_path, Behaviour(Fault.CLOSE), tls=authority.server, ca_file=authority.ca_file) as place:
        sendings = await asyncio.gather(*(send_until_on_wire(place.provider, email) for email in emails))

        assert [sending.outcome for sending in sendings if not isinstance(sending.outcome, Uncertain)] == []
        assert place.double.ledger().delivered == 200
        assert not place.double.ledger().duplicates
        assert place.double.requests == {str(email.email_id): 1 for email in emails}


async def test_the_message_id_is_recorded(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        sending = await send(place.provider, an_email())

    assert isinstance(sending.outcome, Accepted)
    assert (sending.outcome.provider_message_id or "").startswith("0100")


@pytest.mark.parametrize("name", ["é", "a\r\nb", "x" * 1000])
async def test_an_invalid_message_id_is_not_recorded(name: str, tmp_path: Path) -> None:
    async with ses_place(tmp_path, Behaviour(Reply(200, {"MessageId": name}))) as place:
        sending = await send(place.provider, an_email())

    assert sending.outcome == Accepted(None)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"x-amz-retry-after": "1500"}, 1.5),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "9" * 4000}, None),
    ],
)
async def test_the_wait_comes_from_the_responses_headers(
    headers: dict[str, str], seconds: float | None, tmp_path: Path
) -> None:
    throttled = aws_error(429, "TooManyRequestsException", "Maximum sending rate exceeded.", **headers)
    async with ses_place(tmp_path, Behaviour(throttled)) as place:
        sending = await send(place.provider, an_email())

    assert isinstance(sending.outcome, Deferred)
    assert sending.outcome.retry_after == seconds


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"attachments": (OutgoingAttachment("a", "text/plain", bytes(31_000_000)),)},
            (LOCAL_SIZE, "rejected too_large"),
        ),
        ({"to": [f"a{number}@example.com" for number in range(51)]}, (LOCAL_RECIPIENTS, "rejected rejected_recipient")),
        ({"bcc": ("юзер@example.com",)}, (LOCAL_RECIPIENTS, "rejected rejected_recipient")),
        ({"sender": "магазин@example.org"}, (LOCAL_SENDER, "rejected rejected_sender")),
    ],
)
async def test_emails_that_ses_never_accepts_are_not_sent(
    changes: dict[str, object], expected: tuple[str, str], tmp_path: Path
) -> None:
    async with ses_place(tmp_path) as place:
        sending = await send(place.provider, an_email(**changes))

        assert sending.outcome is not None
        assert expected in ELSEWHERE
        assert outcome_text(sending.outcome) == expected[1]
        assert sending.left == 0
        assert not place.double.begun


async def test_a_non_ascii_reply_to_is_not_sent(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        sending = await send(place.provider, an_email(reply_to=("помощь@example.org",)))

    assert isinstance(sending.outcome, Rejected)
    assert sending.outcome.reason is Reason.INVALID_CONTENT


def test_every_exception_in_the_model_has_a_verdict() -> None:
    model = botocore.session.Session().get_service_model("sesv2").operation_model("SendEmail")

    codes = {shape.metadata.get("error", {}).get("code", shape.name) for shape in model.error_shapes}

    assert len(codes) >= 8
    assert codes - set(VERDICTS) == set()


def test_botocores_throttling_errors_are_ours() -> None:
    # SES uses LimitExceededException for the account's quota, not for throttling.
    codes = {*ThrottledRetryableChecker._THROTTLED_ERROR_CODES} - {"LimitExceededException"}

    assert {VERDICTS[code] for code in codes} == {Deferred(Reason.THROTTLED)}


def test_the_table_in_the_docs_has_the_same_rows() -> None:
    assert rows_in_docs("SES") == {(case.row, case.expected) for case in CASES} | ELSEWHERE
