"""The ses adapter: its outcomes, its proxy, and its report on the account."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import botocore.session
import orjson
import pytest
from botocore.retries.standard import ThrottledRetryableChecker

from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply, octets_of
from dispatcher.dev.http_double import running_double
from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.ses.responses import VERDICTS, outcome_of
from dispatcher.transport.http_response import HttpResponse
from tests.providers.conftest import Authority
from tests.providers.emails import SOON_SECONDS, an_email, outcome_text, send
from tests.providers.http_outcomes import EMAIL_PARTS, FAULT, Case, HttpOutcomes, Rows
from tests.providers.listeners import listening, proxy, stay_silent
from tests.providers.ses_place import ACCESS_KEY, SECRET_KEY, ses_place, ses_provider
from tests.waiting import until


def aws_error(status: int, kind: str, message: str = "") -> Reply:
    """An error response in the form of SES v2."""
    return Reply(status, {"message": message}, {"x-amzn-ErrorType": f"{kind}:http://internal.amazon.com/"})


ECHO: Final = aws_error(400, "MessageRejected", "ann@example.com <ann@example.com> is not ann%40example.com")
A_TEMPLATE: Final = {"template_id": "welcome", "text": None}
ROWS: Final = Rows(
    not_connected="no connection: refused, unknown host, TLS handshake interrupted, proxy",
    untrusted="no credentials; the certificate is not trusted, or TLS failed for another definite reason",
    late="the deadline passes before the request is sent",
    silence="no response after the request was sent: closed, reset, deadline passed",
    broken="an incomplete response, invalid HTTP, or unexpected JSON",
    section="SES",
)

NEITHER: Final = "200 without one, another 2xx, or a redirect (not followed)"
THROTTLED: Final = "TooManyRequestsException, ThrottlingException and similar; 429"
QUOTA: Final = "the same about the daily quota; LimitExceededException"
STOPPED: Final = "SendingPausedException, AccountSuspendedException"
SENDER: Final = "MailFromDomainNotVerifiedException; MessageRejected: the sender is not verified"
SANDBOX: Final = "MessageRejected: only recipients are not verified (the sandbox)"
SYNTAX: Final = "BadRequestException or MessageRejected about an address's syntax"
CONTENT: Final = "another MessageRejected or BadRequestException"
LARGE: Final = "BadRequestException about the length; 413"
SET_UP: Final = "another NotFoundException; any error about the configuration set"
ACCOUNT: Final = "credentials, signature, clock, permission; 401, 403, 404, 405, 407"
REFUSED: Final = "another 4xx"
SERVER: Final = "InternalFailure, ServiceUnavailable; 408, 500, 503, another 5xx"
GATEWAY: Final = "502 or 504 without a code of SES's own"

LOCAL_RECIPIENTS: Final = "more than 50 recipients, or a recipient with non-ASCII letters before the @"

UNVERIFIED: Final = "Email address is not verified. The following identities failed the check: shop@example.org"
FAILED: Final = "Email address is not verified. The following identities failed the check in region EU-WEST-1: "
EXPIRED: Final = "Signature expired: 20261101T000000Z is now earlier than 20261101T001000Z"
NO_SET: Final = "Configuration set <news> does not exist."
PAGE: Final = b"<html><title>504 Gateway Time-out</title></html>"

TABLE: Final = [
    Case("200 with a MessageId", "accepted", accepted=1),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "without a MessageId (no content type)", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "without a MessageId (text/html)", accepted=1),
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
    Case(CONTENT, "rejected invalid_content", ECHO, "MessageRejected", "<address>"),
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
    Case("NotFoundException, and the email names a template", "rejected invalid_content",
         aws_error(404, "NotFoundException", "Template welcome does not exist."), "NotFoundException",
         changes=A_TEMPLATE),
    Case(SET_UP, FAULT, aws_error(404, "NotFoundException", NO_SET), detail="CONFIGURATION_SET", changes=A_TEMPLATE),
    Case(SET_UP, FAULT, aws_error(404, "NotFoundException", "gone"), detail="CONFIGURATION_SET"),
    Case(SET_UP, FAULT, aws_error(400, "BadRequestException", NO_SET), detail="<news> does not exist"),
    Case(ACCOUNT, FAULT, aws_error(403, "UnrecognizedClientException", "Token invalid."), detail="AWS_ACCESS_KEY_ID"),
    Case(ACCOUNT, FAULT, aws_error(403, "SignatureDoesNotMatch", "no"), detail="AWS_SECRET_ACCESS_KEY"),
    Case(ACCOUNT, FAULT, aws_error(400, "ExpiredTokenException", "no"), detail="credentials"),
    Case(ACCOUNT, FAULT, aws_error(403, "AccessDeniedException", "not authorized on identity/ann@example.com"),
         detail="not authorized on <address>"),
    Case(ACCOUNT, FAULT, aws_error(403, "RequestExpired", "no"), detail="clock"),
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
    Case(SERVER, "deferred server_error", Reply(500, b"ann@example.com"), "500"),
    Case(SERVER, "deferred server_error", Reply(408), "408"),
    Case(SERVER, "deferred server_error", Reply(599, b"?"), "599"),
    Case(GATEWAY, "uncertain", Reply(504, PAGE), "504"),
    Case(GATEWAY, "uncertain", Reply(502), "502"),
    Case(ROWS.broken, "uncertain", Reply(200, ["MessageId"]), "200"),
    Case(ROWS.broken, "uncertain", Reply(503, ["?"]), "503", detail="cannot be parsed"),
]  # fmt: skip

SENDS: Final = {"SendingEnabled": True, "ProductionAccessEnabled": True}
QUOTA_OF_DAY: Final = {"Max24HourSend": 50000.0, "MaxSendRate": 14.0, "SentLast24Hours": 12.0}
THE_ACCOUNT: Final = {**SENDS, "SendQuota": QUOTA_OF_DAY}
USED_UP: Final = {**SENDS, "SendQuota": {"Max24HourSend": 200, "SentLast24Hours": 200}}
DENIED: Final = aws_error(403, "AccessDeniedException", "arn:aws:ses:eu-west-1:1:identity/ann@example.com is not yours")
SANDBOXED: Final = {**THE_ACCOUNT, "ProductionAccessEnabled": False}


@asynccontextmanager
async def account_place(_folder: Path, behaviour: Behaviour) -> AsyncIterator[SimpleNamespace]:
    """The ses adapter, with a server that answers only the question about the account."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /v2/email/account HTTP/1.1\r\n")
        assert isinstance(behaviour.fault, Reply)
        writer.write(octets_of(behaviour.fault))

    async with listening(serve) as port, ses_provider(f"http://127.0.0.1:{port}") as provider:
        yield SimpleNamespace(provider=provider)


class TestOutcomes(HttpOutcomes):
    section, table, place, rows = "SES", TABLE, staticmethod(ses_place), ROWS
    account = staticmethod(account_place)
    local = frozenset(
        {
            ("more than 40 MB, found before sending", "rejected too_large"),
            (LOCAL_RECIPIENTS, "rejected rejected_recipient"),
            ("a sender with non-ASCII letters before the @", "rejected rejected_sender"),
        }
    )
    secrets = (ACCESS_KEY, SECRET_KEY, *EMAIL_PARTS)
    message_id = r"0100\S+"
    resets = False
    refused = (
        ({"attachments": (OutgoingAttachment("a", "text/plain", bytes(31_000_000)),)}, "too_large", ""),
        ({"to": [f"a{number}@example.com" for number in range(51)]}, "rejected_recipient", ""),
        ({"bcc": ("юзер@example.com",)}, "rejected_recipient", ""),
        ({"sender": "магазин@example.org"}, "rejected_sender", ""),
        ({"reply_to": ("помощь@example.org",)}, "invalid_content", ""),
    )
    checks = (
        (Behaviour(Reply(200, THE_ACCOUNT)), "answers: 14 emails per second, 12 of 50,000 sent in 24 hours."),
        (Behaviour(Reply(200, SANDBOXED)), "sandbox: SES delivers to verified addresses only."),
        (Behaviour(Reply(200, SENDS)), "SES in eu-west-1 answers: quota unknown."),
        (Behaviour(DENIED), "may not read the account's state (ses:GetAccount)."),
        (Behaviour(Reply(200, {**THE_ACCOUNT, "SendingEnabled": False})), "disabled sending"),
        (Behaviour(Reply(200, USED_UP)), "quota of 200 emails per day is used up"),
        (Behaviour(aws_error(403, "InvalidClientTokenId", "ann@example.com")), "Check AWS's credentials"),
        (Behaviour(aws_error(429, "TooManyRequestsException", "slow")), "SES cannot be used: slow"),
        (Behaviour(Reply(500, b"<html>")), "SES cannot be used"),
        (Behaviour(Reply(200, b"<html>")), "not SES v2. Check DISPATCHER_SES_ENDPOINT_URL"),
        (Behaviour(Reply(200, ["?"])), "SES"),
    )


@pytest.mark.parametrize("name", ["é", "a\r\nb", "x" * 1000])
def test_an_invalid_message_id_is_not_recorded(name: str) -> None:
    answer = HttpResponse(200, {}, orjson.dumps({"MessageId": name}))

    assert outcome_of(answer, has_template=False) == Accepted(None)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"x-amz-retry-after": "1500"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "9" * 4000}, None),
    ],
)
def test_the_wait_comes_from_response_headers(headers: dict[str, str], seconds: float | None) -> None:
    throttled = HttpResponse(429, {"x-amzn-errortype": "TooManyRequestsException", **headers}, b"{}")

    assert outcome_of(throttled, has_template=False) == Deferred(
        Reason.THROTTLED, code="TooManyRequestsException", retry_after=seconds
    )


def test_every_exception_in_the_model_has_a_verdict() -> None:
    model = botocore.session.Session().get_service_model("sesv2").operation_model("SendEmail")

    codes = {shape.metadata.get("error", {}).get("code", shape.name) for shape in model.error_shapes}

    assert len(codes) >= 8
    assert codes - set(VERDICTS) == set()


def test_botocores_throttling_errors_are_ours() -> None:
    # SES uses LimitExceededException for the account's quota, not for throttling.
    codes = {*ThrottledRetryableChecker._THROTTLED_ERROR_CODES} - {"LimitExceededException"}

    assert {VERDICTS[code] for code in codes} == {Deferred(Reason.THROTTLED)}


NOWHERE: Final = "https://127.0.0.1:1"


async def test_requests_go_through_the_proxy(tmp_path: Path, authority: Authority) -> None:
    heads: list[bytes] = []
    async with (
        running_double(tmp_path, tls=authority.server) as double,
        proxy(b"HTTP/1.1 200 OK\r\n\r\n", double, heads) as url,
        ses_provider(
            double.url.replace("127.0.0.1", "localhost"),
            ca_file=authority.ca_file,
            environment={"HTTPS_PROXY": url.replace("://", "://ann:s%40fe@")},
        ) as provider,
    ):
        email = an_email()
        sending = await send(provider, email)
        again = await send(provider, an_email())

        assert isinstance(sending.outcome, Accepted)
        assert isinstance(again.outcome, Accepted)
        assert sending.left == 1
        assert double.requests[str(email.email_id)] == 1
        (head,) = heads
        assert head.startswith(b"CONNECT localhost:%d HTTP/1.1\r\n" % double.port)
        assert b"\r\nProxy-Authorization: Basic %b\r\n" % base64.b64encode(b"ann:s@fe") in head


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 502 No\r\n\r\n",
        b"HTTP/1.1 407 No\r\n\r\n",
        b"",
        b"what?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nand more",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,
    ],
    ids=["502", "407", "nothing", "invalid HTTP", "more than its answer", "no end"],
)
async def test_a_proxys_refusal_is_a_definite_failure(answer: bytes) -> None:
    async with proxy(answer) as url, ses_provider(NOWHERE, environment={"HTTPS_PROXY": url}) as provider:
        sending = await send(provider, an_email())

    assert (outcome_text(sending.outcome), sending.left) == ("deferred connection_failed", 0)
    assert "the proxy answered" in str(getattr(sending.outcome, "detail", None))


async def test_a_silent_proxy_ends_at_the_deadline() -> None:
    async with listening(stay_silent) as port:
        environment = {"HTTPS_PROXY": f"http://127.0.0.1:{port}"}
        async with ses_provider(NOWHERE, environment=environment) as provider:
            sending = await send(provider, an_email(), seconds=SOON_SECONDS)

    assert (outcome_text(sending.outcome), sending.left) == ("deferred timeout_before_send", 0)


async def test_emails_use_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with ses_place(tmp_path, Behaviour(latency_seconds=SOON_SECONDS), connections=50) as place:
        sendings = [asyncio.create_task(send(place.provider, an_email())) for _ in range(50)]
        await until(lambda: place.double.begun.total() == 50)
        threads = {thread.name for thread in set(threading.enumerate()) - before}
        await asyncio.gather(*sendings)

    assert {name for name in threads if not name.startswith("asyncio")} <= {"aws-credentials"}
