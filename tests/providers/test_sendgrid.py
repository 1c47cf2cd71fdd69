"""The sendgrid adapter: its outcomes, its waits, and its settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from sendgrid import SendGridAPIClient

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.providers.sendgrid.responses import outcome_of
from dispatcher.transport.http_response import HttpResponse
from tests.providers.emails import an_email, send
from tests.providers.http_outcomes import EMAIL_PARTS, FAULT, Case, HttpOutcomes
from tests.providers.sendgrid_place import KEY, sendgrid_place

UNVERIFIED: Final = (
    "The from address does not match a verified Sender Identity. Mail cannot be sent until this error is resolved."
)
REPEATED: Final = "Each email address in the personalization block should be unique. We found [ann@example.com] twice."
PAGE: Final = Reply(504, b"<html><title>SendGrid - 504 Gateway Timeout</title></html>", {"Content-Type": "text/html"})
ECHO: Final = sendgrid_error(400, "ann@example.com <ann@example.com> is not ann%40example.com", "from ann@example.com")
IN_SANDBOX: Final = {"sandbox": True}


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

TABLE: Final = [
    Case(ACCEPTED, "accepted", accepted=1),
    Case(SANDBOX, "accepted", accepted=1, options=IN_SANDBOX, detail="sandbox mode"),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 unexpected with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html, titled 'Welcome'", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "titled 'Welcome'", accepted=1, options=IN_SANDBOX),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", "307 unexpected", accepted=1),
    Case(NEITHER, "uncertain", Reply(204), "204", "204 unexpected"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED, "from"), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(400, "no valid address", "from.email"), "400", "from.email: no"),
    Case(SENDER, BAD_SENDER, ECHO, "400", "<address>"),
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
    Case(ACCOUNT, FAULT, sendgrid_error(401, "The key is not ann@example.com's"), detail="The key is not <address>"),
    Case(ACCOUNT, FAULT, sendgrid_error(403, "access forbidden"), detail="ForbiddenError access forbidden"),
    Case(ACCOUNT, FAULT, sendgrid_error(404, "not found"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(405, "method not allowed"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(451, "region"), detail="EU"),
    Case(THROTTLED, "deferred throttled", sendgrid_error(429, "too many requests"), "429", "TooManyRequestsError"),
    Case(SERVER, DOWN, sendgrid_error(500, "internal server error"), "500", "InternalServerError"),
    Case(SERVER, DOWN, Reply(503, b"<html>"), "503", "ServiceUnavailableError"),
    Case(SERVER, DOWN, Reply(500, b"ann@example.com"), "500"),
    Case(SERVER, DOWN, Reply(599), "599"),
    Case(SERVER, DOWN, Reply(408), "408"),
    Case(GATEWAY, "uncertain", PAGE, "504", "GatewayTimeoutError with 58 octets of text/html"),
    Case(GATEWAY, "uncertain", Reply(502), "502", "502 with an empty body"),
]  # fmt: skip


class TestOutcomes(HttpOutcomes):
    section, table, place = "SendGrid", TABLE, staticmethod(sendgrid_place)
    secrets = (KEY, *EMAIL_PARTS)
    message_id = r"\S{22}"
    checks = (
        (Behaviour(key=KEY), "SendGrid accepts the API key, and the key may send; emails are delivered."),
        (Behaviour(key="SG.another"), "Check SENDGRID_API_KEY"),
        (Behaviour(Reply(200, {"scopes": ["user.profile.read"]})), "Give the key the scope mail.send"),
        (Behaviour(Reply(200, b"<html>")), "Give the key the scope mail.send"),
        (Behaviour(Reply(500, b"")), "unexpected response"),
    )


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


async def test_python_sendgrids_own_client_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG, SendGrid's client logs the key and the whole email. We do not use this client, but an application in
    our process may use it."""
    caplog.set_level(logging.DEBUG)
    async with sendgrid_place(tmp_path) as place:
        client = SendGridAPIClient(KEY, place.double.url)
        email = {"personalizations": [{"to": [{"email": "ann@example.com"}]}]}
        answer = await asyncio.to_thread(client.send, email)

    assert answer.status_code == 202
    assert [secret for secret in TestOutcomes.secrets if secret in caplog.text] == []
