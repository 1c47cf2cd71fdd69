"""Notices of Amazon SES become events, whichever way they arrive. A bystander is never suppressed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.events.contract import Skipped
from dispatcher.events.ses import events_of_message, parse, parse_text
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.events import EventRow
from tests.events.requests import ANN, TOPIC, delivery, ses_event

ID = UUID("01938a7e-0000-7000-8000-000000000001")
BOB = "bob@example.org"
AT = datetime(2026, 11, 23, 12, 0, 1, tzinfo=UTC)
TIMESTAMP = "2026-11-23T12:00:01.000Z"


def recipient(address: Any = ANN, **more: Any) -> dict[str, Any]:
    """A recipient of a notice."""
    return {"emailAddress": address, **more}


def bounce(kind: str, subtype: str, *recipients: dict[str, Any]) -> Any:
    """A notice of a bounce."""
    facts = {"bounceType": kind, "bounceSubType": subtype, "timestamp": TIMESTAMP}
    return ses_event(ID, "Bounce", bounce={**facts, "bouncedRecipients": list(recipients or [recipient()])})


def complaint(*recipients: dict[str, Any], **more: Any) -> Any:
    """A notice of a complaint."""
    return ses_event(
        ID, "Complaint", complaint={"timestamp": TIMESTAMP, "complainedRecipients": list(recipients), **more}
    )


def only(document: Any) -> ProviderEvent:
    """The event of a notice with one event."""
    (found,) = parse(document).events
    return found


def skipped(document: Any) -> dict[Skipped, int]:
    """The reasons of a notice without events."""
    parsed = parse(document)
    assert parsed.events == []
    return dict(parsed.skipped)


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (ses_event(ID, "Send", send={}), EventKind.ACCEPTED),
        (delivery(ID), EventKind.DELIVERED),
        (
            ses_event(
                ID, "DeliveryDelay", deliveryDelay={"delayType": "MailboxFull", "delayedRecipients": [recipient()]}
            ),
            EventKind.DEFERRED,
        ),
        (bounce("Permanent", "NoEmail"), EventKind.BOUNCED),
        (complaint(recipient()), EventKind.COMPLAINED),
        (ses_event(ID, "Reject", reject={"reason": "Bad content"}), EventKind.REJECTED),
        (
            ses_event(ID, "Rendering Failure", failure={"templateName": "welcome", "errorMessage": "no attribute"}),
            EventKind.REJECTED,
        ),
        (
            ses_event(ID, "Subscription", subscription={"newTopicPreferences": {"unsubscribeAll": True}}),
            EventKind.UNSUBSCRIBED,
        ),
        (ses_event(ID, "Open", open={"timestamp": TIMESTAMP}), EventKind.OPENED),
        (ses_event(ID, "Click", click={"timestamp": TIMESTAMP, "link": "https://example.com/"}), EventKind.CLICKED),
    ],
)
def test_every_kind_of_notice_is_known(document: Any, kind: EventKind) -> None:
    found = only(document)

    assert (found.email_id, found.provider, found.kind, found.recipient) == (ID, "ses", kind, ANN)
    assert found.bounce is (Bounce.HARD if kind is EventKind.BOUNCED else None)


@pytest.mark.parametrize(
    ("kind", "subtype", "permanence"),
    [
        *(
            ("Permanent", name, Bounce.HARD)
            for name in ("General", "NoEmail", "Suppressed", "OnAccountSuppressionList")
        ),
        *(
            ("Transient", name, Bounce.SOFT)
            for name in ("General", "MailboxFull", "MessageTooLarge", "ContentRejected", "AttachmentRejected")
        ),
        ("Undetermined", "Undetermined", Bounce.SOFT),
        ("permanent?", "", Bounce.SOFT),
    ],
)
def test_only_a_permanent_bounce_is_hard(kind: str, subtype: str, permanence: Bounce) -> None:
    assert only(bounce(kind, subtype)).bounce is permanence


def test_a_bounce_of_several_recipients_is_an_event_for_each() -> None:
    bob = recipient(f"Bob <{BOB}>", status="5.2.1", diagnosticCode=f"smtp; 550 5.2.1 <{BOB}> disabled")
    notice = bounce("Permanent", "General", recipient(status="5.1.1", action="failed"), bob)

    one, two = parse(notice).events

    assert (one.recipient, one.code, one.happened_at) == (ANN, "5.1.1", AT)
    assert (two.recipient, two.code) == (f"Bob <{BOB}>", "5.2.1")
    stored = EventRow.of(two, AddressHasher(bytes(32)))
    assert stored.detail == "Permanent: General: smtp; 550 5.2.1 <address> disabled"


def test_a_complaint_that_lists_several_recipients_names_none_of_them() -> None:
    assert only(complaint(recipient(ANN), recipient(BOB))).recipient is None


def test_a_complaint_about_one_recipient_names_the_recipient() -> None:
    assert only(complaint(recipient(), complaintFeedbackType="abuse")).recipient == ANN


def test_a_complaint_without_a_list_names_the_only_destination() -> None:
    assert only(complaint()).recipient == ANN
    assert only({**complaint(), **ses_event(ID, "Complaint", mail={"destination": [ANN, BOB]})}).recipient is None


def test_not_spam_is_no_complaint() -> None:
    assert skipped(complaint(recipient(), complaintFeedbackType="not-spam")) == {Skipped.IGNORED: 1}


def test_a_change_of_list_topics_is_no_unsubscription() -> None:
    preferences = {
        "unsubscribeAll": False,
        "topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptOut"}],
    }

    assert skipped(ses_event(ID, "Subscription", subscription={"newTopicPreferences": preferences})) == {
        Skipped.IGNORED: 1
    }


def test_an_open_of_an_email_with_several_recipients_names_none() -> None:
    notice = ses_event(ID, "Open", open={"timestamp": TIMESTAMP}, mail={"destination": [ANN, BOB]})

    assert only(notice).recipient is None


def test_a_rejected_email_is_rejected_for_every_recipient() -> None:
    notice = ses_event(ID, "Reject", reject={"reason": "Bad content"}, mail={"destination": [ANN, BOB]})

    assert [(each.recipient, each.detail) for each in parse(notice).events] == [
        (ANN, "Bad content"),
        (BOB, "Bad content"),
    ]


def test_feedback_notifications_have_the_same_form() -> None:
    facts = {"bounceType": "Permanent", "bouncedRecipients": [recipient()], "timestamp": TIMESTAMP}

    assert only(ses_event(ID, "Bounce", "notificationType", bounce=facts)).bounce is Bounce.HARD


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (ses_event(None, "Bounce", "notificationType", bounce={}), Skipped.FOREIGN),
        (ses_event("17"), Skipped.FOREIGN),
        (ses_event(ID, mail={"tags": {"email_id": [str(ID), str(ID)]}}), Skipped.FOREIGN),
        (ses_event(ID, mail={"tags": "x"}), Skipped.FOREIGN),
        ({"eventType": "Delivery"}, Skipped.FOREIGN),
        (ses_event(ID, "Invented"), Skipped.UNKNOWN_KIND),
        ({"notificationType": "AmazonSnsSubscriptionSucceeded"}, Skipped.IGNORED),
        (ses_event(ID, mail={"timestamp": "yesterday"}), Skipped.MALFORMED),
        (ses_event(ID, mail={"timestamp": "9999-12-31T23:59:59-23:59"}), Skipped.MALFORMED),
        (ses_event(ID, mail={"timestamp": "0001-01-01T00:00:00+23:59"}), Skipped.MALFORMED),
        (ses_event(ID, mail={"timestamp": 17}), Skipped.MALFORMED),
        ({"eventType": ["Delivery"]}, Skipped.MALFORMED),
        ({}, Skipped.MALFORMED),
        ([], Skipped.MALFORMED),
        (None, Skipped.MALFORMED),
    ],
)
def test_a_notice_that_is_not_ours_or_not_valid_is_counted(document: Any, why: Skipped) -> None:
    assert skipped(document) == {why: 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Successfully validated SNS topic for Amazon SES event publishing.", Skipped.IGNORED),
        ("", Skipped.IGNORED),
        ('{"eventType": ', Skipped.MALFORMED),
        ('{"a":' * 100_000, Skipped.MALFORMED),
    ],
)
def test_the_test_message_is_ignored_and_broken_json_is_counted(text: str, why: Skipped) -> None:
    parsed = parse_text(text)

    assert (parsed.events, parsed.skipped) == ([], {why: 1})


def enveloped(notice: Any, topic: str = TOPIC) -> str:
    """A notice in SNS's envelope."""
    return json.dumps({"Type": "Notification", "TopicArn": topic, "Message": json.dumps(notice)})


RAW = json.dumps(delivery(ID))
BRIDGED = json.dumps({"version": "0", "detail-type": "Email Delivered", "source": "aws.ses", "detail": delivery(ID)})


@pytest.mark.parametrize("text", [RAW, enveloped(delivery(ID)), BRIDGED], ids=["raw", "sns", "eventbridge"])
def test_a_queue_may_be_behind_sns_or_eventbridge(text: str) -> None:
    (found,) = events_of_message(text).events

    assert (found.email_id, found.kind) == (ID, EventKind.DELIVERED)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (enveloped(delivery(ID)), 1),
        (enveloped(delivery(ID), "arn:aws:sns:eu-west-1:999999999999:evil"), 0),
        (RAW, 0),
        (BRIDGED, 0),
        (json.dumps({"TopicArn": TOPIC, **delivery(ID)}), 0),
        (json.dumps({"TopicArn": TOPIC, "Type": "Notification", "Message": delivery(ID)}), 0),
        (json.dumps({"TopicArn": TOPIC, **json.loads(BRIDGED)}), 0),
    ],
)
def test_if_topics_are_set_only_their_messages_count(text: str, count: int) -> None:
    parsed = events_of_message(text, [TOPIC])

    assert (len(parsed.events), parsed.skipped[Skipped.FOREIGN]) == (count, 1 - count)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({"detail-type": "x", "source": "custom.app", "detail": delivery(ID)}), Skipped.FOREIGN),
        ("Successfully validated", Skipped.MALFORMED),
        ("[]", Skipped.MALFORMED),
        ('{"Type": "Notification", "Message": 17}', Skipped.MALFORMED),
    ],
)
def test_other_messages_in_the_queue_are_counted(text: str, why: Skipped) -> None:
    parsed = events_of_message(text)

    assert (parsed.events, parsed.skipped) == ([], {why: 1})


_odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_kinds = st.sampled_from(
    ["Send", "Delivery", "DeliveryDelay", "Bounce", "Complaint", "Reject", "Rendering Failure", "Subscription", "Open"]
)
_facts = st.sampled_from(
    [
        *("bouncedRecipients", "recipients", "complainedRecipients", "delayedRecipients", "timestamp", "bounceType"),
        *("link", "smtpResponse", "newTopicPreferences", "reason"),
    ]
)
_fields = st.sampled_from(
    ["bounce", "delivery", "complaint", "deliveryDelay", "reject", "open", "subscription", "failure"]
)


@given(
    _kinds, _fields, st.dictionaries(_facts, _odd), st.dictionaries(st.sampled_from(["destination", "timestamp"]), _odd)
)
def test_no_json_raises(kind: str, field: str, facts: dict[str, Any], mail: dict[str, Any]) -> None:
    parsed = parse_text(json.dumps({**ses_event(ID, kind, mail=mail), field: facts}))

    assert parsed.events or parsed.skipped
    for each in parsed.events:
        EventRow.of(each, AddressHasher(bytes(32)))
