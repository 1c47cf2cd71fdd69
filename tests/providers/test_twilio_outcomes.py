"""In every situation, twilio returns the outcome in `docs/providers.md`; the server counts the SMS."""

from __future__ import annotations

import logging
import re
from operator import attrgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import pytest

from dispatcher.config import examine, load
from dispatcher.dev.conformance import a_text
from dispatcher.dev.http_apis import twilio_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.provider_text import without_echo
from dispatcher.errors import ProviderFault
from dispatcher.providers.twilio import TwilioSettings, form_of
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS, SOON_SECONDS, send
from tests.providers.outcome_table import (
    BROKEN,
    EACH_HTTP_API,
    ELSEWHERE,
    FAULT,
    LATE,
    NOT_CONNECTED,
    SILENCE,
    Case,
    outcome_text,
    rows_in_docs,
)
from tests.providers.twilio_place import ACCOUNT, CALLBACK, TOKEN, twilio_place
from tests.waiting import until

NUMBER: Final = "+4915112345678"
SECRETS: Final = (TOKEN, NUMBER, NUMBER[1:], "Your code", "1234.")


def refused(code: int, words: str = "no", status: int = 400) -> Reply:
    return twilio_error(status, code, words)


ACCEPTED: Final = "201 with a SID"
NEITHER: Final = "201 without one, another 2xx, or a redirect (not followed)"
RECIPIENT: Final = "21211, 21214, 21217, 21265, 21408, 21421, 21604, 21608, 21612, 21614: the number"
OPTED_OUT: Final = "21610: the recipient has answered STOP"
SENDER: Final = "21212, 21603, 21606, 21607, 21659, 21660, 21661, 21703: the sender"
CONTENT: Final = "21602, 21618, 21619, 30007, 30038: the text"
LARGE: Final = "413, 21605, 21617: the length"
REFUSED: Final = "another 4xx with Twilio's number of an error"
ACCOUNT_ROW: Final = "401 to 405 without such a number; 20003, 20005, 20006, 20008, 30002, 30010; another 4xx"
THROTTLED: Final = "429; 14107, 20429, 21611, 63038"
SERVER: Final = "408, 500, 503 and other 5xx"
GATEWAY: Final = "502 or 504: a gateway got no response from Twilio"

CASES: Final = [
    Case(ACCEPTED, "accepted", accepted=1),
    Case(ACCEPTED, "accepted", Fault.LAST_ANSWER, accepted=1),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html", accepted=1),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", accepted=1),
    Case(NEITHER, "uncertain", Reply(201, {"sid": "a\nb"}), "201"),
    *(Case(RECIPIENT, "rejected rejected_recipient", refused(code, f"The number {NUMBER} is bad."), f"400 {code}",
           "The number +<private> is bad.")
      for code in (21211, 21214, 21217, 21265, 21408, 21421, 21604, 21608, 21612, 21614)),
    Case(OPTED_OUT, "rejected opted_out", refused(21610, "unsubscribed recipient"), "400 21610",
         "unsubscribed recipient"),
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
    Case(SILENCE, "uncertain", Fault.CLOSE_UNREAD),
    Case(SILENCE, "uncertain", Fault.CLOSE, accepted=1),
    Case(SILENCE, "uncertain", Fault.RESET, accepted=1),
    Case(SILENCE, "uncertain", Fault.HANG, accepted=1, seconds=SOON_SECONDS),
    Case(SILENCE, "uncertain", Fault.DRIP_BODY, "202", accepted=1, seconds=LATER_SECONDS),
    Case(BROKEN, "uncertain", Fault.HALF_HEAD, accepted=1),
    Case(BROKEN, "uncertain", Fault.GARBAGE, accepted=1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
async def test_each_situation_has_the_outcome_of_its_row(
    case: Case, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sms = a_text()
    async with twilio_place(tmp_path, Behaviour(case.act), tls=authority.server, ca_file=authority.ca_file) as place:
        if case.expected == FAULT:
            with pytest.raises(ProviderFault, match=re.escape(case.detail)) as fault:
                await send(place.provider, sms, seconds=case.seconds)
            assert not place.times()
            words = str(fault.value)
        else:
            sending = await send(place.provider, sms, seconds=case.seconds, leaves=True)
            assert sending.outcome is not None
            assert outcome_text(sending.outcome) == case.expected
            assert (sending.left, getattr(sending.outcome, "code", None)) == (1, case.code)
            words = repr(without_echo(sending.outcome, sms))
            assert case.detail in words
            await until(lambda: len(place.times()) == case.accepted)
        assert place.double.begun.total() == 1
    assert [secret for secret in SECRETS if secret in words + caplog.text] == []


def test_the_table_in_the_docs_has_the_same_rows() -> None:
    assert rows_in_docs("Twilio", EACH_HTTP_API) == {(case.row, case.expected) for case in CASES} | ELSEWHERE


async def test_a_closed_port_is_connection_failed(tmp_path: Path) -> None:
    async with twilio_place(tmp_path) as place:
        await place.double.close()

        sending = await send(place.provider, a_text())

    assert sending.outcome is not None
    assert (NOT_CONNECTED, outcome_text(sending.outcome)) in ELSEWHERE
    assert sending.left == 0


async def test_nothing_is_sent_after_the_deadline(tmp_path: Path) -> None:
    async with twilio_place(tmp_path) as place:
        sending = await send(place.provider, a_text(), seconds=0)

        assert sending.outcome is not None
        assert (LATE, outcome_text(sending.outcome)) in ELSEWHERE
        assert not place.double.begun


async def test_an_untrusted_certificate_is_a_fault(tmp_path: Path, authority: Authority) -> None:
    async with twilio_place(tmp_path, tls=authority.server) as place:
        with pytest.raises(ProviderFault, match="certificate"):
            await send(place.provider, a_text())


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


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"sender": ""}, Reason.REJECTED_SENDER, "DISPATCHER_TWILIO_SENDER is not set"),
        ({"to": ("ann@example.com",)}, Reason.REJECTED_RECIPIENT, "a phone number in E.164"),
        ({"text": "a" * 1601}, Reason.INVALID_CONTENT, "text has 1,601 characters; Twilio accepts at most 1,600"),
        ({"text": "a\0"}, Reason.INVALID_CONTENT, "text contains a NUL character"),
        ({"text": ""}, Reason.INVALID_CONTENT, "the SMS has no text"),
    ],
    ids=["no sender", "an address", "too long", "NUL", "no text"],
)
async def test_what_twilio_would_refuse_is_rejected_before_it_is_sent(
    tmp_path: Path, changes: dict[str, object], reason: Reason, words: str
) -> None:
    async with twilio_place(tmp_path) as place:
        sending = await send(place.provider, a_text(**changes))

        assert isinstance(sending.outcome, Rejected)
        assert (sending.outcome.reason, sending.outcome.code) == (reason, None)
        assert words in str(sending.outcome.detail)
        assert not place.double.begun


@pytest.mark.parametrize(
    ("key", "words"),
    [(TOKEN, "Twilio accepts the credentials of the account."), ("other", "Check DISPATCHER_TWILIO_ACCOUNT_SID")],
)
async def test_check_reports_whether_twilio_accepts_the_credentials(tmp_path: Path, key: str, words: str) -> None:
    async with twilio_place(tmp_path, Behaviour(key=key)) as place:
        try:
            report = await place.provider.check()
        except ProviderFault as fault:
            report = str(fault.remedy)

    assert report.startswith(words)


def test_the_settings_need_an_account_and_never_show_its_token(tmp_path: Path) -> None:
    environ = {"DISPATCHER_SMS_PROVIDERS": "twilio", "DISPATCHER_SMS_COUNTRIES": "DE"}
    _, _, mistakes = examine(environ, needs=["providers"])
    why = "is not set, but DISPATCHER_SMS_PROVIDERS lists twilio: set it to the account's"
    assert mistakes == (f"DISPATCHER_TWILIO_ACCOUNT_SID {why} SID.", f"DISPATCHER_TWILIO_AUTH_TOKEN {why} auth token.")

    (tmp_path / "token").write_text(f"{TOKEN}\n")
    settings = load(
        {
            "DISPATCHER_SMS_PROVIDERS": "twilio",
            "DISPATCHER_TWILIO_ACCOUNT_SID": ACCOUNT,
            "DISPATCHER_TWILIO_AUTH_TOKEN_FILE": str(tmp_path / "token"),
        }
    )
    assert settings.of(TwilioSettings).auth_token == TOKEN
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ("environ", "countries"),
    [
        ({"TWILIO_SENDER": "+4915112345678"}, {"DE"}),
        ({"TWILIO_SENDER": "+14165550100"}, {"CA"}),
        ({"TWILIO_SENDER": "+14165550100", "SMS_COUNTRIES": "us, CA"}, {"US", "CA"}),
        ({"TWILIO_SENDER": "+14165550100", "SMS_COUNTRIES": "all"}, None),
        ({"TWILIO_SENDER": "Example", "SMS_COUNTRIES": "AT"}, {"AT"}),
        ({"SMS_PROVIDERS": "sms-capture", "SMS_CAPTURE_DIR": "/tmp"}, None),
        ({"SMS_PROVIDERS": "sms-capture,twilio", "SMS_CAPTURE_DIR": "/tmp", "TWILIO_SENDER": "+4915112345678"}, {"DE"}),
        ({"PROVIDERS": "smtp", "SMTP_URL": "smtp://localhost", "SMS_PROVIDERS": "", "TWILIO_SENDER": "Example"}, None),
    ],
)
def test_the_countries_of_sms_are_those_of_the_senders_unless_they_are_set(
    environ: dict[str, str], countries: set[str] | None
) -> None:
    settings, _, mistakes = examine(an_environ(environ), needs=["providers"])

    assert mistakes == ()
    assert settings.sms_countries == countries


@pytest.mark.parametrize("sender", ["", "Example", "12345", "MG" + 32 * "0", "+15551234567"])
def test_a_sender_that_shows_no_country_needs_the_countries(sender: str) -> None:
    environ = an_environ({"TWILIO_SENDER": sender})

    (mistake,) = examine(environ, needs=["providers"])[2]

    assert mistake.startswith("DISPATCHER_SMS_COUNTRIES is not set, and no default sender of SMS is a number")
    # A process that only accepts SMS starts, and leaves the countries to the hosts that send.
    settings, _, mistakes = examine(environ)
    assert (mistakes, settings.sms_countries) == ((), None)


@pytest.mark.parametrize("text", ["UK", "DE,+1", "Germany", "001", ","])
def test_countries_that_do_not_exist_are_a_mistake(text: str) -> None:
    (mistake,) = examine({"DISPATCHER_SMS_COUNTRIES": text})[2]

    assert mistake == (
        "DISPATCHER_SMS_COUNTRIES must be two-letter codes of countries (ISO 3166), such as DE,AT,GB, or all."
    )


def an_environ(changes: dict[str, str]) -> dict[str, str]:
    """The environment of a host with twilio, with these variables without their prefix."""
    account = {"SMS_PROVIDERS": "twilio", "TWILIO_ACCOUNT_SID": ACCOUNT, "TWILIO_AUTH_TOKEN": TOKEN}
    return {f"DISPATCHER_{name}": value for name, value in {**account, **changes}.items()}


def test_a_callback_url_may_have_a_password_which_is_never_shown() -> None:
    url = "https://twilio:pa55word@mail.example.org/v1/events/twilio"

    settings = load({"DISPATCHER_SMS_PROVIDERS": "twilio", "DISPATCHER_TWILIO_ACCOUNT_SID": ACCOUNT,
                     "DISPATCHER_TWILIO_AUTH_TOKEN": TOKEN, "DISPATCHER_TWILIO_CALLBACK_URL": url})  # fmt: skip

    assert settings.of(TwilioSettings).callback_url == url
    assert "pa55word" not in repr(settings)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DISPATCHER_PROVIDERS": "twilio"}, "list it in DISPATCHER_SMS_PROVIDERS"),
        ({"DISPATCHER_SMS_PROVIDERS": "smtp"}, "list it in DISPATCHER_PROVIDERS"),
        ({"DISPATCHER_TWILIO_ACCOUNT_SID": "SK" + "0" * 32}, "must be AC followed by 32 hexadecimal digits"),
        ({"DISPATCHER_TWILIO_SENDER": "a name of many words"}, "DISPATCHER_TWILIO_SENDER must be a number"),
        ({"DISPATCHER_TWILIO_CALLBACK_URL": "http://mail.example.org/"}, "use https://"),
        ({"DISPATCHER_TWILIO_CALLBACK_URL": "https://mail.example.org/?a=1"}, "must have no ?query"),
        ({"DISPATCHER_TWILIO_CALLBACK_URL": "https://mail.example.org/#a"}, "or #fragment"),
    ],
)
def test_a_setting_that_cannot_work_is_reported_with_the_remedy(environ: dict[str, str], words: str) -> None:
    _, _, mistakes = examine(environ)

    assert any(words in mistake for mistake in mistakes), mistakes
