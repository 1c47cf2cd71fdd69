"""The twilio adapter: its outcomes, its forms, and its settings."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs

import pytest

from dispatcher.dev.conformance import a_text
from dispatcher.dev.http_apis import twilio_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.provider_text import without_echo
from dispatcher.providers.twilio import form_of
from tests.providers.http_outcomes import FAULT, Case, HttpOutcomes
from tests.providers.http_places import CALLBACK, TOKEN, twilio_place

NUMBER: Final = "+4915112345678"


def refused(code: int, words: str = "no", status: int = 400) -> Reply:
    return twilio_error(status, code, words)


NEITHER: Final = "201 without one, another 2xx, or a redirect (not followed)"
RECIPIENT: Final = "21211, 21214, 21217, 21265, 21408, 21421, 21604, 21608, 21612, 21614: the number"
SENDER: Final = "21212, 21603, 21606, 21607, 21659, 21660, 21661, 21703: the sender"
CONTENT: Final = "21602, 21618, 21619, 30007, 30038: the text"
LARGE: Final = "413, 21605, 21617: the length"
REFUSED: Final = "another 4xx with Twilio's number of an error"
ACCOUNT_ROW: Final = "401 to 405 without such a number; 20003, 20005, 20006, 20008, 30002, 30010; another 4xx"
THROTTLED: Final = "429; 14107, 20429, 21611, 63038"
SERVER: Final = "408, 500, 503 and other 5xx"
GATEWAY: Final = "502 or 504: a gateway got no response from Twilio"

TABLE: Final = [
    Case("201 with a SID", "accepted", accepted=1),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html", accepted=1),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", accepted=1),
    Case(NEITHER, "uncertain", Reply(201, {"sid": "a\nb"}), "201"),
    *(Case(RECIPIENT, "rejected rejected_recipient", refused(code, f"The number {NUMBER} is bad."), f"400 {code}",
           "The number +<private> is bad.")
      for code in (21211, 21214, 21217, 21265, 21408, 21421, 21604, 21608, 21612, 21614)),
    Case("21610: the recipient has answered STOP", "rejected opted_out", refused(21610, "unsubscribed recipient"),
         "400 21610", "unsubscribed recipient"),
    *(Case(SENDER, "rejected rejected_sender", refused(code), f"400 {code}")
      for code in (21212, 21603, 21606, 21607, 21659, 21660, 21661, 21703)),
    *(Case(CONTENT, "rejected invalid_content", refused(code), f"400 {code}")
      for code in (21602, 21618, 21619, 30007, 30038)),
    *(Case(LARGE, "rejected too_large", refused(code), f"400 {code}") for code in (21605, 21617)),
    Case(LARGE, "rejected too_large", Reply(413), "413"),
    Case(REFUSED, "rejected refused", refused(29999), "400 29999"),
    Case(REFUSED, "rejected refused", refused(29999, status=418), "418 29999"),
    Case(ACCOUNT_ROW, FAULT, refused(20003, "Authenticate", 401), detail="DISPATCHER_TWILIO_ACCOUNT_SID"),
    Case(ACCOUNT_ROW, FAULT, Reply(402), detail="Top up"),
    Case(ACCOUNT_ROW, FAULT, refused(20005, "not active", 403), detail="status"),
    Case(ACCOUNT_ROW, FAULT, Reply(404), detail="DISPATCHER_TWILIO_URL"),
    Case(ACCOUNT_ROW, FAULT, Reply(405), detail="DISPATCHER_TWILIO_URL"),
    Case(ACCOUNT_ROW, FAULT, Reply(400, b"<html>"), detail="DISPATCHER_TWILIO_URL"),
    *(Case(ACCOUNT_ROW, FAULT, refused(code), detail="permissions") for code in (20006, 20008, 30002, 30010)),
    Case(THROTTLED, "deferred throttled", refused(20429, "Too Many Requests", 429), "429 20429"),
    *(Case(THROTTLED, "deferred throttled", refused(code), f"400 {code}") for code in (14107, 21611, 63038)),
    Case(SERVER, "deferred server_error", refused(20500, "Internal Server Error", 500), "500 20500"),
    Case(SERVER, "deferred server_error", Reply(503), "503"),
    Case(SERVER, "deferred server_error", Reply(408), "408"),
    Case(GATEWAY, "uncertain", Reply(502), "502"),
    Case(GATEWAY, "uncertain", Reply(504, b"<html>"), "504"),
]  # fmt: skip


class TestOutcomes(HttpOutcomes):
    section, table, place, message = "Twilio", TABLE, staticmethod(twilio_place), staticmethod(a_text)
    secrets = (TOKEN, NUMBER, NUMBER[1:], "Your code", "1234.")
    message_id = r"SM[0-9a-f]{32}"
    resets = False
    refused = (
        ({"sender": ""}, "rejected_sender", "DISPATCHER_TWILIO_SENDER is not set"),
        ({"to": ("ann@example.com",)}, "rejected_recipient", "a phone number in E.164"),
        ({"text": "a" * 1601}, "invalid_content", "text has 1,601 characters; Twilio accepts at most 1,600"),
        ({"text": "a\0"}, "invalid_content", "text contains a NUL character"),
        ({"text": ""}, "invalid_content", "the SMS has no text"),
    )
    checks = (
        (Behaviour(key=TOKEN), "Twilio accepts the credentials of the account."),
        (Behaviour(key="other"), "Check DISPATCHER_TWILIO_ACCOUNT_SID"),
    )

    @staticmethod
    def shown(outcome: Outcome, email: OutgoingEmail) -> Outcome:
        return without_echo(outcome, email)


def fields(sms: OutgoingEmail, sender: str = "", *, callback: str | None = None, expires: float | None = None) -> Any:
    return {name: value for name, (value,) in parse_qs(form_of(sms, sender, callback, expires).decode()).items()}


def test_the_form_has_the_number_the_sender_and_the_text() -> None:
    sms = a_text(sender="")

    assert fields(a_text()) == {"To": NUMBER, "From": "+4915799912345", "Body": "Your code is 1234."}
    assert fields(sms, "Example") == {"To": NUMBER, "From": "Example", "Body": "Your code is 1234."}
    pool = f"MG{'0' * 32}"
    assert fields(sms, pool) == {"To": NUMBER, "MessagingServiceSid": pool, "Body": "Your code is 1234."}


def test_the_url_for_callbacks_names_the_sms() -> None:
    sms = a_text()

    assert fields(sms, callback=CALLBACK)["StatusCallback"] == f"{CALLBACK}?email_id={sms.email_id}"


@pytest.mark.parametrize(("seconds", "sent"), [(59.9, "59"), (0.2, "1"), (1e6, "36000")])
def test_twilio_discards_an_sms_that_expires_while_it_waits(seconds: float, sent: str) -> None:
    assert fields(a_text(), expires=seconds)["ValidityPeriod"] == sent
