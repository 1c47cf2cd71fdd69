"""What SendGrid, Amazon SES, Resend and Twilio report becomes events, once it is verified. No bystander is accused."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

import pytest

from dispatcher.config import load
from dispatcher.domain.event import EventKind, ProviderEvent
from dispatcher.domain.suppression import Reply
from dispatcher.errors import ConfigurationError
from dispatcher.events import resend, sendgrid, ses, twilio
from dispatcher.events.contract import EventsRefused, EventsUnreadable, ParsedEvents, Refusal, Skipped
from dispatcher.events.resend import ResendVerifier
from dispatcher.events.sendgrid import SIGNATURE_HEADER, TIMESTAMP_HEADER, SendGridVerifier
from dispatcher.events.twilio import TwilioVerifier, sign
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.events import EventRow
from tests.events.requests import (
    ANN,
    AT,
    TOPIC,
    ResendSecret,
    SendGridKey,
    delivery,
    dumped,
    resend_event,
    sendgrid_event,
    ses_event,
)

ID: Final = UUID("01938a7e-0000-7000-8000-000000000001")
BOB: Final = "bob@example.org"
HASHER: Final = AddressHasher(bytes(32))
OLD, NEW, FOREIGN = ResendSecret(), ResendSecret(), ResendSecret()


def words(parsed: ParsedEvents) -> str:
    """The kind and the recipient of each event, and why others were skipped: `hard ann, malformed 1`."""
    assert all((each.kind is EventKind.BOUNCED) is (each.bounce is not None) for each in parsed.events)
    events = [f"{each.bounce or each.kind} {(each.recipient or '-').partition('@')[0]}" for each in parsed.events]
    return ", ".join(events + [f"{why} {count}" for why, count in parsed.skipped.items()])


def only(parsed: ParsedEvents) -> ProviderEvent:
    (found,) = parsed.events
    return found


# SendGrid's signatures. The example is in the tests of SendGrid's own libraries.
KEY: Final = (
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE83T4O/n84iotIvIW4mdBgQ/7dAfSmpqIM8kF9mN1flpVKS3GRqe62gw+2fNNRaINXvVpiglSI8eNEc"
    "6wEA3F+g=="
)
SIGNATURE: Final = "MEUCIGHQVtGj+Y3LkG9fLcxf3qfI10QysgDWmMOVmxG0u6ZUAiEAyBiXDWzM+uOe5W0JuG+luQAbPIqHh89M15TluLtEZtM="
HEADERS: Final = {SIGNATURE_HEADER: SIGNATURE, TIMESTAMP_HEADER: "1600112502"}
BODY: Final = (
    b'[{"email":"hello@world.com","event":"dropped","reason":"Bounced Address",'
    b'"sg_event_id":"ZHJvcC0xMDk5NDkxOS1MUnpYbF9OSFN0T0doUTRrb2ZTbV9BLTA",'
    b'"sg_message_id":"LRzXl_NHStOGhQ4kofSm_A.filterdrecv-p3mdw1-756b745b58-kmzbl-18-5F5FC76C-9.0",'
    b'"smtp-id":"<LRzXl_NHStOGhQ4kofSm_A@ismtpd0039p1iad1.sendgrid.net>","timestamp":1600112492}]\r\n'
)


def refusal(verifier: Any, headers: dict[str, str], body: bytes) -> Refusal | None:
    """Why a request is refused; None if it is accepted."""
    try:
        verifier.verify(verifier.check_headers(headers), body)
    except EventsRefused as refused:
        return refused.refusal
    return None


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        *((HEADERS, body) for body in (BODY[:-2], BODY.replace(b"dropped", b"deliver"), b"", b"[]")),
        ({}, BODY),
        *(({**HEADERS, SIGNATURE_HEADER: text}, BODY) for text in ("", "!!!", "é", "AAAA" * 10_000, "AAAA")),
        *(({**HEADERS, TIMESTAMP_HEADER: text}, BODY) for text in ("", "now", "-1", "9" * 5000, "١٦٠", "1600112503")),
    ],
)
def test_sendgrids_own_example_verifies_only_unchanged(headers: dict[str, str], body: bytes) -> None:
    verifier = SendGridVerifier([KEY], max_age_seconds=0)

    assert refusal(verifier, HEADERS, BODY) is None
    assert refusal(verifier, headers, body) is Refusal.SIGNATURE


def test_each_of_two_keys_of_sendgrid_verifies_during_a_rotation_and_a_third_does_not() -> None:
    old, new, foreign = SendGridKey(), SendGridKey(), SendGridKey()
    verifier = SendGridVerifier([old.public, new.public], max_age_seconds=0)

    found = [refusal(verifier, key.headers(b"[]"), b"[]") for key in (old, new, foreign)]

    assert found == [None, None, Refusal.SIGNATURE]


SETTINGS: Final = {
    "SENDGRID_EVENTS_KEYS": ("x", "AAAA", "-----BEGIN PUBLIC KEY-----", KEY[:-8], ","),
    "RESEND_EVENTS_SECRETS": ("x", "whsec_", "whsec_AAAA", OLD.text.removeprefix("whsec_"), f"{OLD.text},x", ","),
    "SES_EVENTS_TOPICS": ("ses-events", "arn:aws:sqs:eu-west-1:123456789012:q", "arn:aws:sns:eu-west-1:12:t", ","),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_no_key_no_secret_or_no_topic_is_refused(name: str) -> None:
    words = " .*Resend's webhooks" if name == "RESEND_EVENTS_SECRETS" else ""
    for text in SETTINGS[name]:
        with pytest.raises(ConfigurationError, match=f"DISPATCHER_{name}{words}"):
            load({f"DISPATCHER_{name}": text})


def test_a_key_that_is_not_on_the_curve_is_refused() -> None:
    (key,) = load({"DISPATCHER_SENDGRID_EVENTS_KEYS": f"{KEY[:60]}AAAA{KEY[64:]}"}).sendgrid_events_keys

    with pytest.raises(ConfigurationError, match="P-256"):
        SendGridVerifier([key], max_age_seconds=0)


@pytest.mark.parametrize(
    ("event", "expected", "code"),
    [
        ({"event": "processed"}, "accepted", None),
        ({"event": "delivered", "response": "250 OK"}, "delivered", "250"),
        ({"event": "deferred", "response": "400 try again", "attempt": "5"}, "deferred", "400"),
        ({"event": "bounce", "type": "bounce", "status": "5.1.1"}, "hard", "5.1.1"),
        ({"event": "bounce", "type": "bounce"}, "hard", None),
        ({"event": "bounce", "type": "blocked", "status": "5.7.1"}, "blocked", "5.7.1"),
        ({"event": "bounce", "type": "bounce", "status": "5.2.2"}, "soft", "5.2.2"),
        ({"event": "bounce", "type": "bounce", "status": "4.0.0"}, "soft", "4.0.0"),
        ({"event": "bounce", "status": "5.1.1"}, "soft", "5.1.1"),
        ({"event": "bounce", "type": ["bounce"], "status": 511}, "soft", None),
        ({"event": "dropped", "reason": "Bounced Address"}, "rejected", None),
        ({"event": "spamreport"}, "complained", None),
        ({"event": "unsubscribe"}, "unsubscribed", None),
        ({"event": "group_unsubscribe", "asm_group_id": 10}, "unsubscribed", "group"),
        ({"event": "open"}, "opened", None),
        ({"event": "click", "url": "https://example.com/"}, "clicked", None),
    ],
)
def test_every_kind_of_sendgrids_events_is_known(event: dict[str, Any], expected: str, code: str | None) -> None:
    parsed = sendgrid.parse(dumped([sendgrid_event(ID, **event)]))

    found = only(parsed)
    assert (found.email_id, found.provider, found.happened_at, found.recipient) == (ID, "sendgrid", AT, ANN)
    assert (words(parsed), found.code) == (f"{expected} ann", code)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        *(({"email_id": value}, Skipped.FOREIGN) for value in (None, "17", [str(ID)])),
        ({"event": "invented"}, Skipped.UNKNOWN_KIND),
        ({"event": "group_resubscribe"}, Skipped.IGNORED),
        *(({"event": value}, Skipped.MALFORMED) for value in (None, ["delivered"])),
        *(({"timestamp": value}, Skipped.MALFORMED) for value in (None, "1600112492", True, -1, 10**12, 10**30)),
    ],
)
def test_an_event_not_ours_or_not_valid_is_counted_and_the_others_are_kept(event: dict[str, Any], why: Skipped) -> None:
    body = json.dumps([sendgrid_event(ID), {**sendgrid_event(ID), **event}, sendgrid_event(ID, "open")]).encode()

    assert words(sendgrid.parse(body)) == f"delivered ann, opened ann, {why} 1"


@pytest.mark.parametrize(
    ("body", "skipped"),
    [
        *((body, 1) for body in (b"[[]]", b"[null]", b"[1]", b'"x"', b"null", b"17", b'[{"event":{}}]')),
        (b'{"event":"delivered"}', 1),
        (b"[]", 0),
    ],
)
def test_json_of_another_form_is_counted(body: bytes, skipped: int) -> None:
    parsed = sendgrid.parse(body)

    assert (parsed.events, parsed.skipped.total()) == ([], skipped)


@pytest.mark.parametrize("body", [b"", b"[", b"x", b"[" * 100_000 + b"]" * 100_000, b"\xff\xfe"])
def test_a_body_that_is_not_json_is_unreadable(body: bytes) -> None:
    with pytest.raises(EventsUnreadable):
        sendgrid.parse(body)


@pytest.mark.parametrize(
    "odd",
    [
        rb'"\ud800"', rb'"\u0000"', b'"\x01"', b'"\xff\xfe"', b"1" * 5000, b"1e999", b"-" + b"9" * 400, b"NaN",
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [b"reason", b"url", b"email", b"response", b"status", b"type", b"other"])
def test_one_odd_value_costs_no_other_event(name: bytes, odd: bytes) -> None:
    event = dumped(sendgrid_event(ID, "bounce"))[:-1]
    parsed = sendgrid.parse(b"[" + event + b',"' + name + b'":' + odd + b"}," + event + b"}]")

    assert len(parsed.events) == 2
    for row in (EventRow.of(each, HASHER) for each in parsed.events):
        assert all("\0" not in text for text in (row.code, row.detail) if text)
        f"{row.code}{row.detail}".encode()


# Notices of Amazon SES.
TIMESTAMP: Final = "2026-11-23T12:00:01.000Z"
BOTH: Final = {"destination": [ANN, BOB]}


def recipient(address: str = ANN, **more: Any) -> dict[str, Any]:
    return {"emailAddress": address, **more}


def bounce(kind: str, subtype: str, *recipients: dict[str, Any], name: str = "eventType") -> Any:
    facts = {"bounceType": kind, "bounceSubType": subtype, "timestamp": TIMESTAMP}
    return ses_event(ID, "Bounce", name, bounce={**facts, "bouncedRecipients": list(recipients or [recipient()])})


def complaint(*recipients: dict[str, Any], mail: Any = None, **more: Any) -> Any:
    facts = {"timestamp": TIMESTAMP, "complainedRecipients": list(recipients), **more}
    return ses_event(ID, "Complaint", complaint=facts, mail=mail or {})


def subscription(**preferences: Any) -> Any:
    return ses_event(ID, "Subscription", subscription={"newTopicPreferences": preferences})


TRANSIENT: Final = ("General", "MailboxFull", "MessageTooLarge", "ContentRejected", "AttachmentRejected")
TOPICS: Final = [{"topicName": "a", "subscriptionStatus": "OptOut"}]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (ses_event(ID, "Send", send={}), "accepted ann"),
        (delivery(ID), "delivered ann"),
        (ses_event(ID, "DeliveryDelay", deliveryDelay={"delayedRecipients": [recipient()]}), "deferred ann"),
        *((bounce("Permanent", name), "hard ann") for name in ("General", "NoEmail", "Suppressed")),
        (bounce("Permanent", "OnAccountSuppressionList"), "hard ann"),
        *((bounce("Transient", name), "soft ann") for name in TRANSIENT),
        (bounce("Undetermined", "Undetermined"), "soft ann"),
        (bounce("permanent?", ""), "soft ann"),
        (bounce("Permanent", "General", name="notificationType"), "hard ann"),  # of a feedback notification
        (complaint(recipient()), "complained ann"),
        (complaint(recipient(), complaintFeedbackType="abuse"), "complained ann"),
        (complaint(recipient(ANN), recipient(BOB)), "complained -"),
        (complaint(), "complained ann"),
        (complaint(mail=BOTH), "complained -"),
        (complaint(recipient(), complaintFeedbackType="not-spam"), "ignored 1"),
        (ses_event(ID, "Reject", reject={"reason": "Bad content"}), "rejected ann"),
        (ses_event(ID, "Reject", reject={"reason": "Bad content"}, mail=BOTH), "rejected ann, rejected bob"),
        (ses_event(ID, "Rendering Failure", failure={"errorMessage": "no attribute"}), "rejected ann"),
        (subscription(unsubscribeAll=True), "unsubscribed ann"),
        (subscription(unsubscribeAll=False, topicSubscriptionStatus=TOPICS), "ignored 1"),
        (ses_event(ID, "Open", open={"timestamp": TIMESTAMP}), "opened ann"),
        (ses_event(ID, "Open", open={"timestamp": TIMESTAMP}, mail=BOTH), "opened -"),
        (ses_event(ID, "Click", click={"timestamp": TIMESTAMP, "link": "https://example.com/"}), "clicked ann"),
        (ses_event(None, "Bounce", "notificationType", bounce={}), "foreign 1"),
        (ses_event("17"), "foreign 1"),
        (ses_event(ID, mail={"tags": {"email_id": [str(ID), str(ID)]}}), "foreign 1"),
        (ses_event(ID, mail={"tags": "x"}), "foreign 1"),
        ({"eventType": "Delivery"}, "foreign 1"),
        (ses_event(ID, "Invented"), "unknown_kind 1"),
        ({"notificationType": "AmazonSnsSubscriptionSucceeded"}, "ignored 1"),
        (ses_event(ID, mail={"timestamp": "yesterday"}), "malformed 1"),
        (ses_event(ID, mail={"timestamp": "9999-12-31T23:59:59-23:59"}), "malformed 1"),
        (ses_event(ID, mail={"timestamp": "0001-01-01T00:00:00+23:59"}), "malformed 1"),
        (ses_event(ID, mail={"timestamp": 17}), "malformed 1"),
        ({"eventType": ["Delivery"]}, "malformed 1"),
        ({}, "malformed 1"),
        ([], "malformed 1"),
        (None, "malformed 1"),
    ],
)
def test_every_kind_of_notice_of_ses_is_known_and_others_are_counted(document: Any, expected: str) -> None:
    parsed = ses.parse(document)

    assert words(parsed) == expected
    assert {(each.email_id, each.provider) for each in parsed.events} <= {(ID, "ses")}


def test_a_bounce_of_several_recipients_is_an_event_for_each_and_its_stored_detail_has_no_address() -> None:
    bob = recipient(f"Bob <{BOB}>", status="5.2.1", diagnosticCode=f"smtp; 550 5.2.1 <{BOB}> disabled\0\u202e")
    notice = bounce("Permanent", "General", recipient(status="5.1.1", action="failed"), bob)

    one, two = ses.parse(notice).events

    assert (one.recipient, one.code, one.happened_at) == (ANN, "5.1.1", AT.replace(second=1))
    assert (two.recipient, two.code) == (f"Bob <{BOB}>", "5.2.1")
    assert EventRow.of(two, HASHER).detail == "Permanent: General: smtp; 550 5.2.1 <address> disabled"
    (rejected,) = ses.parse(ses_event(ID, "Reject", reject={"reason": "Bad content"})).events
    assert rejected.detail == "Bad content"


def enveloped(notice: Any, topic: str = TOPIC) -> str:
    return json.dumps({"Type": "Notification", "TopicArn": topic, "Message": json.dumps(notice)})


RAW: Final = json.dumps(delivery(ID))
BRIDGED: Final = {"version": "0", "detail-type": "Email Delivered", "source": "aws.ses", "detail": delivery(ID)}


@pytest.mark.parametrize(
    ("text", "expected", "expected_of_topic"),
    [
        (enveloped(delivery(ID)), "delivered ann", "delivered ann"),
        (enveloped(delivery(ID), "arn:aws:sns:eu-west-1:999999999999:evil"), "delivered ann", "foreign 1"),
        (RAW, "delivered ann", "foreign 1"),
        (json.dumps(BRIDGED), "delivered ann", "foreign 1"),
        (json.dumps({"TopicArn": TOPIC, **delivery(ID)}), "delivered ann", "foreign 1"),
        (json.dumps({"TopicArn": TOPIC, "Type": "Notification", "Message": delivery(ID)}), "malformed 1", "foreign 1"),
        (json.dumps({"TopicArn": TOPIC, **BRIDGED}), "delivered ann", "foreign 1"),
        (json.dumps({**BRIDGED, "source": "custom.app"}), "foreign 1", "foreign 1"),
        ("Successfully validated", "malformed 1", "malformed 1"),
        ("[]", "malformed 1", "foreign 1"),
        ('{"Type": "Notification", "Message": 17}', "malformed 1", "foreign 1"),
    ],
)
def test_a_queue_may_be_behind_sns_or_eventbridge_and_if_topics_are_set_only_their_messages_count(
    text: str, expected: str, expected_of_topic: str
) -> None:
    assert words(ses.events_of_message(text)) == expected
    assert words(ses.events_of_message(text, [TOPIC])) == expected_of_topic


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Successfully validated SNS topic for Amazon SES event publishing.", "ignored 1"),
        ("", "ignored 1"),
        ('{"eventType": ', "malformed 1"),
        ('{"a":' * 100_000, "malformed 1"),
    ],
)
def test_the_test_message_of_ses_is_ignored_and_broken_json_is_counted(text: str, expected: str) -> None:
    assert words(ses.parse_text(text)) == expected


# Resend's webhooks.
SIGNED_AT: Final = 1_000_000
EVENT: Final = dumped(resend_event(ID))
OF_OLD: Final = OLD.headers(EVENT, SIGNED_AT)
OF_NEW: Final = NEW.headers(EVENT, SIGNED_AT)
OF_FOREIGN: Final = FOREIGN.headers(EVENT, SIGNED_AT)


def with_signature(*signatures: str) -> dict[str, str]:
    return {**OF_OLD, resend.SIGNATURE_HEADER: " ".join(signatures)}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        (OF_OLD, EVENT, None),
        (OF_NEW, EVENT, None),
        (with_signature(*(each[resend.SIGNATURE_HEADER] for each in (OF_FOREIGN, OF_OLD))), EVENT, None),
        (with_signature("v1a,x", OF_OLD[resend.SIGNATURE_HEADER]), EVENT, None),
        (OF_FOREIGN, EVENT, Refusal.SIGNATURE),
        *((OF_OLD, body, Refusal.SIGNATURE) for body in (b"", EVENT + b" ", EVENT.replace(b"delivered", b"bounced"))),
        ({**OF_OLD, resend.ID_HEADER: "msg_other"}, EVENT, Refusal.SIGNATURE),
        *(({**OF_OLD, name: ""}, EVENT, Refusal.SIGNATURE) for name in OF_OLD),
        ({}, EVENT, Refusal.SIGNATURE),
        *(
            (with_signature(text), EVENT, Refusal.SIGNATURE)
            for text in ("v1,", "v1,!!!", "v1,é", "v1,AAAA", f"v1,{'AAAA' * 10_000}", "v1", "v2,AAAA", "AAAA")
        ),
        (with_signature(*["v1,AAAA"] * 100, OF_OLD[resend.SIGNATURE_HEADER]), EVENT, Refusal.SIGNATURE),
        *(
            ({**OF_OLD, resend.TIMESTAMP_HEADER: text}, EVENT, Refusal.SIGNATURE)
            for text in ("now", "-1", "9" * 5000, "\u0661\u0660", f"{SIGNED_AT}.0", f"{SIGNED_AT + 1}")
        ),
    ],
)
def test_only_an_unchanged_request_that_one_of_resends_secrets_signed_is_accepted(
    headers: dict[str, str], body: bytes, expected: Refusal | None
) -> None:
    verifier = ResendVerifier([OLD.text, NEW.text], max_age_seconds=90_000, clock=lambda: SIGNED_AT)

    assert refusal(verifier, headers, body) is expected


@pytest.mark.parametrize(
    ("source", "seconds", "age", "is_fresh"),
    [
        *(("sendgrid", 90_000, *row) for row in ((0, True), (89_999, True), (90_001, False))),
        *(("resend", 90_000, *row) for row in ((299, True), (301, False))),  # five minutes at most
        *((source, 90_000, *row) for source in ("sendgrid", "resend") for row in ((-599, True), (-601, False))),
        ("resend", 60, 61, False),
        ("resend", 0, 1e6, True),
    ],
)
def test_a_signature_is_valid_for_a_time_and_a_little_ahead_of_our_clock(
    source: str, seconds: float, age: float, *, is_fresh: bool
) -> None:
    key, limits = SendGridKey(), {"max_age_seconds": seconds, "clock": lambda: SIGNED_AT + age}
    verifier: Any = ResendVerifier([OLD.text], **limits)  # type: ignore[arg-type]
    headers = OF_OLD
    if source == "sendgrid":
        verifier, headers = SendGridVerifier([key.public], **limits), key.headers(EVENT, SIGNED_AT)  # type: ignore[arg-type]

    assert refusal(verifier, headers, EVENT) is (None if is_fresh else Refusal.STALE)


@pytest.mark.parametrize("separator", [",", ", ", "\n"])
def test_resends_secrets_may_be_separated_by_commas_or_lines(separator: str) -> None:
    setting = {"DISPATCHER_RESEND_EVENTS_SECRETS": f"{OLD.text}{separator}{NEW.text}"}

    assert load(setting).resend_events_secrets == (OLD.text, NEW.text)


def of_resend(kind: str, **more: Any) -> dict[str, Any]:
    return resend_event(ID, f"email.{kind}", **more)


def bounced(kind: Any, subtype: Any = "General", **more: Any) -> dict[str, Any]:
    return of_resend("bounced", bounce={"type": kind, "subType": subtype, "message": "Bounced."}, **more)


OUR_TAG: Final = {"name": "email_id", "value": str(ID)}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (of_resend("sent"), "accepted ann"),
        (of_resend("delivered"), "delivered ann"),
        (of_resend("delivery_delayed"), "deferred ann"),
        *((bounced("Permanent", name), "hard ann") for name in ("General", "NoEmail", "Suppressed", ["x"], None)),
        *((bounced("Transient", name), "soft ann") for name in ("General", "MailboxFull", "MessageTooLarge")),
        *((bounced("Transient", name), "blocked ann") for name in ("ContentRejected", "AttachmentRejected")),
        *((bounced(kind), "soft ann") for kind in ("Undetermined", "permanent?", None, ["Permanent"])),
        (of_resend("bounced", bounce="x"), "soft ann"),
        (of_resend("complained"), "complained ann"),
        (of_resend("failed", failed={"reason": "reached_daily_quota"}), "rejected ann"),
        (of_resend("suppressed", suppressed={"type": "OnAccountSuppressionList"}), "rejected ann"),
        (of_resend("opened"), "opened ann"),
        (of_resend("clicked", click={"link": "https://example.com/"}), "clicked ann"),
        (bounced("Permanent", to=[ANN, BOB]), "hard -"),
        (of_resend("complained", to=[ANN, BOB]), "complained -"),
        (of_resend("failed", to=[ANN, BOB]), "rejected ann, rejected bob"),
        *((of_resend("failed", to=to), "rejected -") for to in (list[str](), None, ANN)),
        (of_resend("delivered", tags=[{"name": "tag_1", "value": "vip"}, OUR_TAG]), "delivered ann"),
        (of_resend("delivered", tags=[OUR_TAG, OUR_TAG]), "foreign 1"),
        *((of_resend("delivered", tags=tags), "foreign 1") for tags in ("x", None, [str(ID)], {"email_id": [str(ID)]})),
        (resend_event(None), "foreign 1"),
        (resend_event("17"), "foreign 1"),
        ({**of_resend("delivered"), "data": None}, "foreign 1"),
        *(({"type": name}, "ignored 1") for name in ("email.scheduled", "email.received", "contact.created")),
        ({"type": "domain.updated"}, "ignored 1"),
        (of_resend("invented"), "unknown_kind 1"),
        *(({**of_resend("sent"), "created_at": at}, "malformed 1") for at in (None, "yesterday", 17)),
        *((document, "malformed 1") for document in ({}, {"type": ["email.sent"]}, [], None, [of_resend("sent")])),
    ],
)
def test_every_kind_of_resends_events_is_known_and_others_are_counted(document: Any, expected: str) -> None:
    parsed = resend.parse(dumped(document))

    assert words(parsed) == expected
    assert {(each.email_id, each.provider, each.happened_at) for each in parsed.events} <= {(ID, "resend", AT)}


@pytest.mark.parametrize(
    ("facts", "code", "detail"),
    [
        (
            {"diagnosticCode": [f"smtp; 550 5.1.1 <{ANN}> unknown"], "type": "Permanent", "subType": "General"},
            "5.1.1",
            "Permanent: General: smtp; 550 5.1.1 <address> unknown",
        ),
        ({"type": "Permanent", "message": "It bounced."}, None, "Permanent: It bounced."),
        ({"reason": "reached_daily_quota", "diagnosticCode": "550"}, None, "reached_daily_quota"),
        ({"diagnosticCode": [17, None, {}], "type": "\ud800"}, None, "?"),
    ],
)
def test_an_event_of_resend_has_the_code_and_the_words_of_the_server_without_addresses(
    facts: dict[str, Any], code: str | None, detail: str
) -> None:
    event = only(resend.parse(json.dumps(of_resend("bounced", bounce=facts)).encode()))

    assert (event.code, EventRow.of(event, HASHER).detail) == (code, detail)


# Twilio. The example is in Twilio's documentation on security, and in the tests of its SDK.
NUMBER: Final = "+4915112345678"
TOKEN: Final = "12345"
URL: Final = "https://mycompany.com/myapp.php?foo=1&bar=2"
FORM: Final = {
    "CallSid": "CA1234567890ABCDE",
    "Caller": "+14158675309",
    "Digits": "1234",
    "From": "+14158675309",
    "To": "+18005551212",
}
SIGNED: Final = {twilio.SIGNATURE_HEADER: "RSOYDt4T1cUTdK1PDd93/VVr8B8="}
SHA_256: Final = {twilio.SETTINGS_HEADER: "key=webhooks_sharedkey_1,algorithm=HMAC_SHA256"}


def signed(token: str = TOKEN, url: str = URL, *more: str) -> dict[str, str]:
    return {twilio.SIGNATURE_HEADER: sign(token, url, FORM, *more)}


def verify_form(headers: dict[str, str], url: str = URL, form: Any = FORM, secrets: tuple[str, ...] = (TOKEN,)) -> Any:
    verifier, body = TwilioVerifier(secrets), form if isinstance(form, bytes) else urlencode(form).encode()
    return verifier.verify(verifier.check_headers(headers), url, body)


PORT_443: Final = URL.replace(".com", ".com:443")
CAPITALS: Final = "https://Mail.Example.com{}/v1/events/twilio"


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        (SIGNED, URL),
        (signed(), URL),
        (SIGNED, PORT_443),  # the port of the scheme makes no difference
        (signed(url=PORT_443), URL),
        (signed(url=PORT_443), PORT_443),
        *((SIGNED, each.replace("//", "//user:pass@")) for each in (URL, PORT_443)),  # Twilio signs no user
        *((SIGNED, each.replace("//", "//user@")) for each in (URL, PORT_443)),
        *((SIGNED, each.replace("//", "//us%40er:pa%2Fss@")) for each in (URL, PORT_443)),
        (signed(url=CAPITALS.format("")), CAPITALS.format(":8443")),  # the host is signed as it is written
        ({**signed("shared", URL, "sha256"), **SHA_256}, URL),
    ],
)
def test_twilios_example_and_other_signatures_of_its_forms_verify(headers: dict[str, str], url: str) -> None:
    assert verify_form(headers, url, secrets=(TOKEN, "shared")) == FORM


@pytest.mark.parametrize(
    ("headers", "url", "form"),
    [
        ({}, URL, FORM),
        *(({twilio.SIGNATURE_HEADER: text}, URL, FORM) for text in ("", "?", "A" * 9999, "AAAA")),
        (signed(TOKEN, URL, "sha256"), URL, FORM),
        (signed("shared", URL, "sha256"), URL, FORM),
        (signed("other"), URL, FORM),
        (SIGNED, URL.replace("foo=1", "foo=2"), FORM),
        *((SIGNED, URL, {**FORM, **changed}) for changed in ({"Digits": "1235"}, {"More": "1"})),
        (SIGNED, URL, urlencode([*FORM.items(), ("To", "+1")]).encode()),
        ({**SIGNED, twilio.SETTINGS_HEADER: "algorithm=NONE"}, URL, FORM),
        (signed(""), URL, FORM),
    ],
)
def test_a_forged_request_of_twilio_is_refused(headers: dict[str, str], url: str, form: Any) -> None:
    with pytest.raises(EventsRefused):
        verify_form(headers, url, form, (TOKEN, "shared"))


@pytest.mark.parametrize("body", [b"\xff", b"a", b"&".join([b"a=1"] * 201), b"a=%", b"a=%4", b"a=%g1"])
def test_a_body_that_is_no_form_is_unreadable(body: bytes) -> None:
    with pytest.raises(EventsUnreadable):
        verify_form(SIGNED, form=body)


@pytest.mark.parametrize(
    ("email_id", "status", "code", "expected"),
    [
        (str(ID), "queued", "", "accepted"),
        (str(ID), "sent", "0", "accepted"),
        (str(ID), "delivered", "", "delivered"),
        (str(ID), "undelivered", "30005", "hard"),
        (str(ID), "undelivered", "30003", "soft"),
        (str(ID), "undelivered", "30007", "blocked"),
        (str(ID), "failed", "30001", "rejected"),
        (str(ID), "failed", "21610", "unsubscribed"),
        ("17", "sent", "", "foreign"),
        ("17", "invented", "", "unknown_kind"),
        ("17", "scheduled", "", "ignored"),
        ("17", "", "", "malformed"),
    ],
)
def test_a_status_of_twilio_is_an_event_or_counted(email_id: str, status: str, code: str, expected: str) -> None:
    form = {"MessageSid": "SM1", "MessageStatus": status, "ErrorCode": code, "To": NUMBER}

    parsed = twilio.parse_status(email_id, form)

    assert words(parsed) == f"{expected} {NUMBER if parsed.events else 1}"
    assert {each.email_id for each in parsed.events} <= {ID}


LINKS: Final = [{"link": f"https://{host}.example/", "timestamp": "now"} for host in "aab"]
REPEATED: Final[dict[str, list[ParsedEvents]]] = {
    "clicks of SendGrid": [sendgrid.parse(dumped(sendgrid_event(ID, "click", url=each["link"]))) for each in LINKS],
    "clicks of Resend": [resend.parse(dumped(of_resend("clicked", click=each))) for each in LINKS],
    "statuses of Twilio": [
        twilio.parse_status(str(ID), {"MessageSid": sid, "MessageStatus": "delivered", "To": NUMBER}) for sid in "112"
    ],
}


@pytest.mark.parametrize("repeated", REPEATED)
def test_a_repeated_event_is_the_same_and_events_of_one_second_about_another_link_or_sms_differ(repeated: str) -> None:
    one, again, other = map(only, REPEATED[repeated])

    assert one.key(b"1") == again.key(b"1") != other.key(b"1")


def test_a_retry_of_sendgrid_is_the_same_event_although_it_has_a_new_id() -> None:
    one, retry = (only(sendgrid.parse(dumped(sendgrid_event(ID, sg_event_id=each)))) for each in "ab")

    assert one.key(None) == retry.key(None)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"Body": "STOP"}, (NUMBER, Reply.STOP)),
        ({"Body": "arrêt", "OptOutType": "STOP"}, (NUMBER, Reply.STOP)),  # Twilio's own classification comes first
        ({"Body": "Start"}, (NUMBER, Reply.START)),
        ({"Body": "HELP", "OptOutType": "HELP"}, (NUMBER, None)),
        ({}, (NUMBER, None)),
        ({"From": "ann"}, None),
        ({"MessageSid": "x"}, None),
        ({"From": "whatsapp:+4915112345678"}, None),
    ],
)
def test_an_sms_from_a_recipient_has_a_number_and_its_reply(form: dict[str, str], expected: object) -> None:
    sms = twilio.parse_inbound({"MessageSid": "SM" + "0" * 32, "From": NUMBER, **form})

    assert (sms and (sms.number, sms.reply)) == expected
