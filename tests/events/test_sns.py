"""Messages of SNS are verified completely: topic, certificate's URL, certificate, time and signature."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dispatcher.config import load
from dispatcher.errors import ConfigurationError
from dispatcher.events.contract import EventsRefused, EventsUnreadable, Refusal, SourceUnavailable
from dispatcher.events.sns import MessageType, SnsVerifier
from tests.events.requests import CERTIFICATE_URL, TOPIC, Sns, dumped


@pytest.fixture(scope="module")
def amazon() -> Sns:
    """SNS, whose key is made once."""
    return Sns()


@pytest.fixture
def sns(amazon: Sns) -> Sns:
    """SNS without earlier requests."""
    amazon.fetched, amazon.is_down, amazon.status, amazon.pem = [], False, 200, amazon.certificate()
    return amazon


@pytest.fixture
def verifier(sns: Sns) -> SnsVerifier:
    """Accepts messages of one topic, for an hour."""
    return SnsVerifier([TOPIC], max_age_seconds=3600, fetch=sns.fetch)


async def refusal(verifier: SnsVerifier, message: Any) -> Refusal:
    """Why a message is refused."""
    with pytest.raises(EventsRefused) as refused:
        await verifier.verify(dumped(message))
    return refused.value.refusal


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("subject", [None, "Amazon SES Email Event Notification"])
async def test_a_notification_is_verified(verifier: SnsVerifier, sns: Sns, version: str, subject: str | None) -> None:
    message = await verifier.verify(dumped(sns.message("Grüße\n", version=version, Subject=subject)))

    assert (message.type, message.topic, message.text) == (MessageType.NOTIFICATION, TOPIC, "Grüße\n")
    assert sns.fetched == [CERTIFICATE_URL]


@pytest.mark.parametrize(
    "change",
    [
        {"Message": "{}"},
        {"MessageId": "other"},
        {"Subject": "added"},
        {"Timestamp": (datetime.now(UTC) - timedelta(minutes=5)).isoformat()},
        {"SignatureVersion": "1"},
        {"Signature": base64.b64encode(bytes(256)).decode()},
        {"Signature": ""},
        {"Signature": "?"},
        {"Signature": "A" * 100_000},
        {"Type": "SubscriptionConfirmation", "Token": "x", "SubscribeURL": "https://sns.eu-west-1.amazonaws.com/"},
    ],
)
async def test_a_changed_message_is_refused(verifier: SnsVerifier, sns: Sns, change: dict[str, Any]) -> None:
    assert await refusal(verifier, {**sns.message("x"), **change}) is Refusal.SIGNATURE


@pytest.mark.parametrize(
    "change",
    [
        {"Type": "Invented"},
        {"Type": ["Notification"]},
        {"Message": None},
        {"Message": {"eventType": "Delivery"}},
        {"SignatureVersion": "3"},
        {"SignatureVersion": 2},
        {"Timestamp": "yesterday"},
        {"Type": "SubscriptionConfirmation"},
    ],
)
async def test_a_message_that_lacks_a_field_is_refused_without_a_request(
    verifier: SnsVerifier, sns: Sns, change: dict[str, Any]
) -> None:
    assert await refusal(verifier, {**sns.message("x"), **change}) is Refusal.SIGNATURE
    assert sns.fetched == []


async def test_a_message_of_another_topic_is_refused_without_a_request(verifier: SnsVerifier, sns: Sns) -> None:
    message = sns.message("x", TopicArn="arn:aws:sns:eu-west-1:999999999999:ses-events")

    assert await refusal(verifier, message) is Refusal.TOPIC
    assert sns.fetched == []


@pytest.mark.parametrize(
    "url",
    [
        "http://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com.evil.example/SimpleNotificationService-0.pem",
        "https://evil.example/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com@evil.example/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com:8443/SimpleNotificationService-0.pem",
        "https://sns-eu-west-1.s3.amazonaws.com/SimpleNotificationService-0.pem",
        "https://sns.s3.amazonaws.com/SimpleNotificationService-0.pem",
        "https://sns.s3.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem",
        "https://evil.sns.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem?x",
        "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem#x",
        "https://sns.eu-west-1.amazonaws.com/x/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-../x.pem",
        "https://sns.eu-west-1.amazonaws.com/other.pem",
        "https://sns.eu-west-1.amazonaws.eu/SimpleNotificationService-0.pem",
        "https://sns.cn-north-1.amazonaws.com.cn/SimpleNotificationService-0.pem",
        "https://sns.atlantis-1.amazonaws.com/SimpleNotificationService-0.pem",
        "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0.pem\n",
        "https://sns.eu-west-\N{FULLWIDTH DIGIT ONE}.amazonaws.com/SimpleNotificationService-0.pem",
        "",
    ],
)
async def test_a_certificate_from_elsewhere_is_never_fetched(verifier: SnsVerifier, sns: Sns, url: str) -> None:
    assert await refusal(verifier, sns.message("x", SigningCertURL=url)) is Refusal.SIGNATURE
    assert sns.fetched == []


REGIONS = [
    ("aws", "us-east-1", "amazonaws.com"),
    ("aws", "mx-central-1", "amazonaws.com"),
    ("aws-us-gov", "us-gov-west-1", "amazonaws.com"),
    ("aws-cn", "cn-north-1", "amazonaws.com.cn"),
    ("aws-eusc", "eusc-de-east-1", "amazonaws.eu"),
    ("aws-iso", "us-iso-east-1", "c2s.ic.gov"),
    ("aws-iso-b", "us-isob-east-1", "sc2s.sgov.gov"),
]


@pytest.mark.parametrize(("partition", "region", "suffix"), REGIONS)
async def test_a_topic_of_every_partition_is_verified_and_confirmed(
    sns: Sns, partition: str, region: str, suffix: str
) -> None:
    topic = f"arn:{partition}:sns:{region}:123456789012:ses-events"
    assert load({"DISPATCHER_SES_EVENTS_TOPICS": topic}).ses_events_topics == (topic,)
    verifier = SnsVerifier([topic], max_age_seconds=3600, fetch=sns.fetch)
    url = f"https://sns.{region}.{suffix}/SimpleNotificationService-0.pem"

    message = await verifier.verify(dumped(sns.subscription(TopicArn=topic, SigningCertURL=url)))
    await verifier.confirm(message)

    certificate, confirmation = sns.fetched
    assert certificate == url
    assert confirmation.startswith(f"https://sns.{region}.{suffix}/?Action=ConfirmSubscription")


async def test_a_certificate_of_another_region_of_the_partition_is_accepted(verifier: SnsVerifier, sns: Sns) -> None:
    url = "https://sns.ap-southeast-2.amazonaws.com/SimpleNotificationService-0.pem"

    await verifier.verify(dumped(sns.message("x", SigningCertURL=url)))

    assert sns.fetched == [url]


def test_a_region_that_botocore_does_not_know_is_named(sns: Sns) -> None:
    with pytest.raises(ConfigurationError, match="does not know the region atlantis-1"):
        SnsVerifier(["arn:aws:sns:atlantis-1:123456789012:t"], max_age_seconds=0, fetch=sns.fetch)


async def test_a_certificate_is_fetched_once_for_many_messages(verifier: SnsVerifier, sns: Sns) -> None:
    await asyncio.gather(*(verifier.verify(dumped(sns.message(f"{number}"))) for number in range(50)))

    assert sns.fetched == [CERTIFICATE_URL]


@pytest.mark.parametrize("begins_in_days", [-60, 10])
async def test_an_expired_or_future_certificate_is_refused(
    verifier: SnsVerifier, sns: Sns, begins_in_days: int
) -> None:
    sns.pem = sns.certificate(datetime.now(UTC) + timedelta(begins_in_days))

    assert await refusal(verifier, sns.message("x")) is Refusal.SIGNATURE


async def test_a_certificate_of_another_key_is_refused(verifier: SnsVerifier, sns: Sns) -> None:
    sns.pem = Sns().certificate()

    assert await refusal(verifier, sns.message("x")) is Refusal.SIGNATURE


@pytest.mark.parametrize(("status", "pem"), [(500, b""), (200, b"<html>"), (301, b"")])
async def test_a_certificate_that_cannot_be_fetched_is_tried_again(sns: Sns, status: int, pem: bytes) -> None:
    verifier = SnsVerifier([TOPIC], max_age_seconds=0, fetch=sns.fetch, retry_seconds=0)
    sns.status, sns.pem = status, pem
    with pytest.raises(SourceUnavailable):
        await verifier.verify(dumped(sns.message("x")))
    sns.is_down = True
    with pytest.raises(SourceUnavailable):
        await verifier.verify(dumped(sns.message("x")))

    sns.status, sns.pem, sns.is_down = 200, sns.certificate(), False
    await verifier.verify(dumped(sns.message("x")))


async def test_a_certificate_that_does_not_exist_is_refused(verifier: SnsVerifier, sns: Sns) -> None:
    sns.status = 404

    assert await refusal(verifier, sns.message("x")) is Refusal.SIGNATURE


@pytest.mark.parametrize(("minutes", "is_fresh"), [(-59, True), (-61, False), (9, True), (11, False)])
async def test_a_message_is_valid_for_a_time(verifier: SnsVerifier, sns: Sns, minutes: int, is_fresh: bool) -> None:
    message = sns.message("x", Timestamp=(datetime.now(UTC) + timedelta(minutes=minutes)).isoformat())

    if is_fresh:
        await verifier.verify(dumped(message))
    else:
        assert await refusal(verifier, message) is Refusal.STALE


async def test_a_subscription_is_confirmed_at_sns_and_not_at_the_url_in_the_message(
    verifier: SnsVerifier, sns: Sns
) -> None:
    message = await verifier.verify(dumped(sns.subscription(SubscribeURL="https://evil.example/", Token="a&b")))

    await verifier.confirm(message)

    url = urlsplit(sns.fetched[-1])
    assert (url.scheme, url.netloc, url.path) == ("https", "sns.eu-west-1.amazonaws.com", "/")
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert query == {"Action": "ConfirmSubscription", "Version": "2010-03-31", "TopicArn": TOPIC, "Token": "a&b"}


async def test_a_subscription_that_sns_does_not_confirm_is_tried_again(verifier: SnsVerifier, sns: Sns) -> None:
    message = await verifier.verify(dumped(sns.subscription()))
    sns.status = 400

    with pytest.raises(SourceUnavailable):
        await verifier.confirm(message)


@pytest.mark.parametrize("body", [b"", b"x", b"[" * 100_000, b'{"Type": "\\ud800"}'])
async def test_a_body_that_is_not_json_is_unreadable(verifier: SnsVerifier, body: bytes) -> None:
    with pytest.raises(EventsUnreadable):
        await verifier.verify(body)


@pytest.mark.parametrize("body", [b"[]", b"null", b"17", b'"x"', b"{}"])
async def test_json_of_another_form_is_refused(verifier: SnsVerifier, body: bytes) -> None:
    with pytest.raises(EventsRefused):
        await verifier.verify(body)


@pytest.mark.parametrize(
    "text", ["ses-events", "arn:aws:sqs:eu-west-1:123456789012:q", "arn:aws:sns:eu-west-1:12:t", ","]
)
def test_a_setting_that_is_not_a_topic_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_SES_EVENTS_TOPICS"):
        load({"DISPATCHER_SES_EVENTS_TOPICS": text})
