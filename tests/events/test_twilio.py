"""Twilio's signatures, status callbacks and SMS from recipients."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import Bounce, EventKind
from dispatcher.domain.suppression import Reply
from dispatcher.events.contract import EventsRefused, EventsUnreadable, Skipped
from dispatcher.events.twilio import (
    SETTINGS_HEADER,
    SIGNATURE_HEADER,
    TwilioVerifier,
    parse_inbound,
    parse_status,
    sign,
)

NUMBER = "+4915112345678"
# The example of Twilio's documentation on security, and of the tests of its SDK.
TOKEN = "12345"
URL = "https://mycompany.com/myapp.php?foo=1&bar=2"
FORM = {
    "CallSid": "CA1234567890ABCDE",
    "Caller": "+14158675309",
    "Digits": "1234",
    "From": "+14158675309",
    "To": "+18005551212",
}
SIGNATURE = "RSOYDt4T1cUTdK1PDd93/VVr8B8="


def verify(headers: dict[str, str], url: str = URL, form: Any = FORM, secrets: tuple[str, ...] = (TOKEN,)) -> Any:
    verifier, body = TwilioVerifier(secrets), form if isinstance(form, bytes) else urlencode(form).encode()
    return verifier.verify(verifier.check_headers(headers), url, body)


def test_the_documented_example_verifies() -> None:
    assert verify({SIGNATURE_HEADER: SIGNATURE}) == FORM
    assert sign(TOKEN, URL, FORM) == SIGNATURE


@pytest.mark.parametrize("url", [URL.replace(".com", ".com:443"), URL])
def test_the_port_of_the_scheme_makes_no_difference(url: str) -> None:
    assert verify({SIGNATURE_HEADER: SIGNATURE}, url) == FORM
    assert verify({SIGNATURE_HEADER: sign(TOKEN, URL.replace(".com", ".com:443"), FORM)}, url) == FORM


@pytest.mark.parametrize("login", ["user:pass@", "user@", "us%40er:pa%2Fss@"])
@pytest.mark.parametrize("port", ["", ":443"])
def test_twilio_signs_the_url_without_user_and_password(login: str, port: str) -> None:
    url = URL.replace("https://", f"https://{login}").replace(".com", f".com{port}")

    assert verify({SIGNATURE_HEADER: SIGNATURE}, url) == FORM


def test_the_case_of_the_host_is_signed_as_it_is_written() -> None:
    url = "https://Mail.Example.com:8443/v1/events/twilio"
    signed = url.replace(":8443", "")

    assert verify({SIGNATURE_HEADER: sign(TOKEN, signed, FORM)}, url) == FORM


def test_a_shared_key_signs_with_sha_256() -> None:
    headers = {
        SIGNATURE_HEADER: sign("shared", URL, FORM, "sha256"),
        SETTINGS_HEADER: "key=webhooks_sharedkey_1,algorithm=HMAC_SHA256",
    }

    assert verify(headers, secrets=(TOKEN, "shared")) == FORM
    with pytest.raises(EventsRefused):
        verify({SIGNATURE_HEADER: headers[SIGNATURE_HEADER]}, secrets=(TOKEN, "shared"))


@pytest.mark.parametrize(
    ("headers", "url", "form"),
    [
        ({}, URL, FORM),
        ({SIGNATURE_HEADER: ""}, URL, FORM),
        ({SIGNATURE_HEADER: "?"}, URL, FORM),
        ({SIGNATURE_HEADER: "A" * 9999}, URL, FORM),
        ({SIGNATURE_HEADER: "AAAA"}, URL, FORM),
        ({SIGNATURE_HEADER: sign(TOKEN, URL, FORM, "sha256")}, URL, FORM),
        ({SIGNATURE_HEADER: sign("other", URL, FORM)}, URL, FORM),
        ({SIGNATURE_HEADER: SIGNATURE}, URL.replace("foo=1", "foo=2"), FORM),
        ({SIGNATURE_HEADER: SIGNATURE}, URL, {**FORM, "Digits": "1235"}),
        ({SIGNATURE_HEADER: SIGNATURE}, URL, {**FORM, "More": "1"}),
        ({SIGNATURE_HEADER: SIGNATURE}, URL, urlencode([*FORM.items(), ("To", "+1")]).encode()),
        ({SIGNATURE_HEADER: SIGNATURE, SETTINGS_HEADER: "algorithm=NONE"}, URL, FORM),
        ({SIGNATURE_HEADER: sign("", URL, FORM)}, URL, FORM),
    ],
)
def test_a_forged_request_is_refused(headers: dict[str, str], url: str, form: Any) -> None:
    with pytest.raises(EventsRefused):
        verify(headers, url, form)


@pytest.mark.parametrize("body", [b"\xff", b"a", b"&".join([b"a=1"] * 201), b"a=%", b"a=%4", b"a=%g1"])
def test_a_body_that_is_no_form_is_unreadable(body: bytes) -> None:
    with pytest.raises(EventsUnreadable):
        verify({SIGNATURE_HEADER: SIGNATURE}, form=body)


@pytest.mark.parametrize(
    ("status", "code", "kind", "bounce"),
    [
        ("queued", "", EventKind.ACCEPTED, None),
        ("sent", "0", EventKind.ACCEPTED, None),
        ("delivered", "", EventKind.DELIVERED, None),
        ("undelivered", "30005", EventKind.BOUNCED, Bounce.HARD),
        ("undelivered", "30003", EventKind.BOUNCED, Bounce.SOFT),
        ("undelivered", "30007", EventKind.BOUNCED, Bounce.BLOCKED),
        ("failed", "30001", EventKind.REJECTED, None),
        ("failed", "21610", EventKind.UNSUBSCRIBED, None),
    ],
)
def test_a_status_is_an_event(status: str, code: str, kind: EventKind, bounce: Bounce | None) -> None:
    email_id = new_email_id()
    form = {"MessageSid": "SM1", "MessageStatus": status, "ErrorCode": code, "To": NUMBER}

    (event,) = parse_status(str(email_id), form).events

    assert (event.email_id, event.kind, event.bounce, event.recipient) == (email_id, kind, bounce, NUMBER)


def test_a_repeated_status_is_the_same_event() -> None:
    email_id, form = str(new_email_id()), {"MessageSid": "SM1", "MessageStatus": "delivered", "To": NUMBER}

    (first,), (second,) = parse_status(email_id, form).events, parse_status(email_id, form).events
    (third,) = parse_status(email_id, {**form, "MessageSid": "SM2"}).events

    assert first.key(b"1") == second.key(b"1") != third.key(b"1")


@pytest.mark.parametrize(
    ("email_id", "form", "why"),
    [
        ("17", {"MessageStatus": "sent"}, Skipped.FOREIGN),
        ("17", {"MessageStatus": "invented"}, Skipped.UNKNOWN_KIND),
        ("17", {"MessageStatus": "scheduled"}, Skipped.IGNORED),
        ("17", {}, Skipped.MALFORMED),
    ],
)
def test_what_is_not_stored_is_counted(email_id: str, form: dict[str, str], why: Skipped) -> None:
    assert parse_status(email_id, form).skipped == {why: 1}


@pytest.mark.parametrize(
    ("form", "reply"),
    [
        ({"Body": "STOP"}, Reply.STOP),
        ({"Body": "arrêt", "OptOutType": "STOP"}, Reply.STOP),
        ({"Body": "Start"}, Reply.START),
        ({"Body": "HELP", "OptOutType": "HELP"}, None),
        ({}, None),
    ],
)
def test_twilios_own_classification_precedes_the_text(form: dict[str, str], reply: Reply | None) -> None:
    sms = parse_inbound({"MessageSid": "SM" + "0" * 32, "From": NUMBER, **form})

    assert sms is not None
    assert (sms.number, sms.reply) == (NUMBER, reply)


@pytest.mark.parametrize("form", [{"From": "ann"}, {"MessageSid": "x"}, {"From": "whatsapp:+4915112345678"}])
def test_a_request_without_a_number_or_a_message_is_ignored(form: dict[str, str]) -> None:
    assert parse_inbound({"MessageSid": "SM" + "0" * 32, "From": NUMBER, **form}) is None
