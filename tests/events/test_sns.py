"""Messages of SNS are verified completely: topic, certificate's URL, certificate, time and signature. Those that name
other certificates do not delay genuine messages, and a proven certificate outlives a restart."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Collection
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest

from dispatcher.config import load
from dispatcher.errors import ConfigurationError
from dispatcher.events.contract import EventsRefused, EventsUnreadable, Refusal, SourceUnavailable
from dispatcher.events.sns import MessageType, SnsVerifier
from dispatcher.events.sns_certificates import CONCURRENT_FETCHES, MAX_CERTIFICATES, MAX_WAITING
from dispatcher.store.connections import Pool
from dispatcher.store.statements import Source
from dispatcher.transport.http_response import HttpResponse
from tests.events.requests import CERTIFICATE_URL, TOPIC, Sns, dumped
from tests.waiting import until

SNS: Final = "https://sns.eu-west-1.amazonaws.com"
PEM: Final = "/SimpleNotificationService-0.pem"
FORGED_PER_SECOND: Final = 240


@pytest.fixture(scope="module")
def made() -> Sns:
    return Sns()


@pytest.fixture
def sns(made: Sns) -> Sns:
    made.fetched, made.is_down, made.status, made.pem = [], False, 200, made.certificate()
    return made


@pytest.fixture
def verifier(sns: Sns) -> SnsVerifier:
    """Accepts messages of one topic, for an hour."""
    return SnsVerifier([TOPIC], max_age_seconds=3600, fetch=sns.fetch)


async def outcome(verifier: SnsVerifier, message: bytes) -> str:
    """What becomes of a message: why it is refused, or else `later` (its sender must retry) or `accepted`."""
    try:
        await verifier.verify(message)
    except EventsRefused as refused:
        return refused.refusal
    except SourceUnavailable:
        return "later"
    return "accepted"


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("subject", [None, "Amazon SES Email Event Notification"])
async def test_a_notification_is_verified(verifier: SnsVerifier, sns: Sns, version: str, subject: str | None) -> None:
    message = await verifier.verify(dumped(sns.message("Grüße\n", version=version, Subject=subject)))

    assert (message.type, message.topic, message.text) == (MessageType.NOTIFICATION, TOPIC, "Grüße\n")
    assert sns.fetched == [CERTIFICATE_URL]


@pytest.mark.parametrize(
    "change",
    [
        {"Message": "{}"}, {"MessageId": "other"}, {"Subject": "added"}, {"SignatureVersion": "1"},
        {"Timestamp": (datetime.now(UTC) - timedelta(minutes=5)).isoformat()},
        {"Signature": base64.b64encode(bytes(256)).decode()},
        {"Signature": ""}, {"Signature": "?"}, {"Signature": "A" * 100_000},
        {"Type": "SubscriptionConfirmation", "Token": "x", "SubscribeURL": f"{SNS}/"},
    ],
)  # fmt: skip
async def test_a_changed_message_is_refused(verifier: SnsVerifier, sns: Sns, change: dict[str, Any]) -> None:
    assert await outcome(verifier, dumped({**sns.message("x"), **change})) is Refusal.SIGNATURE


ELSEWHERE: Final = [
    f"http://sns.eu-west-1.amazonaws.com{PEM}", f"{SNS}.evil.example{PEM}", f"https://evil.example{PEM}", "",
    f"{SNS}@evil.example{PEM}", f"{SNS}:8443{PEM}", f"https://sns-eu-west-1.s3.amazonaws.com{PEM}",
    f"https://sns.s3.amazonaws.com{PEM}", f"https://sns.s3.eu-west-1.amazonaws.com{PEM}", f"{SNS}{PEM}?x",
    f"https://evil.sns.eu-west-1.amazonaws.com{PEM}", f"{SNS}{PEM}#x", f"{SNS}/x{PEM}", f"{SNS}{PEM}\n",
    f"{SNS}/SimpleNotificationService-../x.pem", f"{SNS}/other.pem", f"https://sns.eu-west-1.amazonaws.eu{PEM}",
    f"https://sns.cn-north-1.amazonaws.com.cn{PEM}", f"https://sns.atlantis-1.amazonaws.com{PEM}",
    f"https://sns.eu-west-\N{FULLWIDTH DIGIT ONE}.amazonaws.com{PEM}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(({"SigningCertURL": url}, Refusal.SIGNATURE) for url in ELSEWHERE),
        *(({"Type": kind}, Refusal.SIGNATURE) for kind in ("Invented", ["Notification"], "SubscriptionConfirmation")),
        *(({"Message": message}, Refusal.SIGNATURE) for message in (None, {"eventType": "Delivery"})),
        *(({"SignatureVersion": version}, Refusal.SIGNATURE) for version in ("3", 2)),
        ({"Timestamp": "yesterday"}, Refusal.SIGNATURE),
        ({"TopicArn": "arn:aws:sns:eu-west-1:999999999999:ses-events"}, Refusal.TOPIC),
    ],
)
async def test_a_message_that_cannot_be_genuine_is_refused_without_a_request(
    verifier: SnsVerifier, sns: Sns, change: dict[str, Any], why: Refusal
) -> None:
    assert await outcome(verifier, dumped({**sns.message("x"), **change})) is why
    assert sns.fetched == []


@pytest.mark.parametrize(
    ("partition", "region", "suffix"),
    [
        ("aws", "us-east-1", "amazonaws.com"),
        ("aws", "mx-central-1", "amazonaws.com"),
        ("aws-us-gov", "us-gov-west-1", "amazonaws.com"),
        ("aws-cn", "cn-north-1", "amazonaws.com.cn"),
        ("aws-eusc", "eusc-de-east-1", "amazonaws.eu"),
        ("aws-iso", "us-iso-east-1", "c2s.ic.gov"),
        ("aws-iso-b", "us-isob-east-1", "sc2s.sgov.gov"),
    ],
)
async def test_a_topic_of_every_partition_is_verified_and_confirmed(
    sns: Sns, partition: str, region: str, suffix: str
) -> None:
    topic = f"arn:{partition}:sns:{region}:123456789012:ses-events"
    assert load({"DISPATCHER_SES_EVENTS_TOPICS": topic}).ses_events_topics == (topic,)
    verifier = SnsVerifier([topic], max_age_seconds=3600, fetch=sns.fetch)
    url = f"https://sns.{region}.{suffix}{PEM}"

    message = await verifier.verify(dumped(sns.subscription(TopicArn=topic, SigningCertURL=url)))
    await verifier.confirm(message)

    certificate, confirmation = sns.fetched
    assert certificate == url
    assert confirmation.startswith(f"https://sns.{region}.{suffix}/?Action=ConfirmSubscription")


def test_a_region_that_botocore_does_not_know_is_named(sns: Sns) -> None:
    with pytest.raises(ConfigurationError, match="does not know the region atlantis-1"):
        SnsVerifier(["arn:aws:sns:atlantis-1:123456789012:t"], max_age_seconds=0, fetch=sns.fetch)


@pytest.mark.parametrize("fault", ["expired", "future", "of another key", "missing"])
async def test_a_certificate_that_is_not_valid_is_refused(verifier: SnsVerifier, sns: Sns, fault: str) -> None:
    begins_at = datetime.now(UTC) + timedelta({"expired": -60, "future": 10}.get(fault, -1))
    sns.pem = (Sns() if fault == "of another key" else sns).certificate(begins_at)
    sns.status = 404 if fault == "missing" else 200

    assert await outcome(verifier, dumped(sns.message("x"))) is Refusal.SIGNATURE


@pytest.mark.parametrize(("status", "pem"), [(500, b""), (200, b"<html>"), (301, b"")])
async def test_a_certificate_that_cannot_be_fetched_is_tried_again(sns: Sns, status: int, pem: bytes) -> None:
    verifier = SnsVerifier([TOPIC], max_age_seconds=0, fetch=sns.fetch, retry_seconds=0)
    sns.status, sns.pem = status, pem
    for sns.is_down in (False, True):
        with pytest.raises(SourceUnavailable):
            await verifier.verify(dumped(sns.message("x")))

    sns.status, sns.pem, sns.is_down = 200, sns.certificate(), False
    await verifier.verify(dumped(sns.message("x")))


@pytest.mark.parametrize(("minutes", "is_fresh"), [(-59, True), (-61, False), (9, True), (11, False)])
async def test_a_message_is_valid_for_a_time(verifier: SnsVerifier, sns: Sns, minutes: int, is_fresh: bool) -> None:
    message = sns.message("x", Timestamp=(datetime.now(UTC) + timedelta(minutes=minutes)).isoformat())

    assert await outcome(verifier, dumped(message)) == ("accepted" if is_fresh else Refusal.STALE)


async def test_a_subscription_is_confirmed_at_sns_and_not_at_the_messages_url(verifier: SnsVerifier, sns: Sns) -> None:
    message = await verifier.verify(dumped(sns.subscription(SubscribeURL="https://evil.example/", Token="a&b")))

    await verifier.confirm(message)

    url = urlsplit(sns.fetched[-1])
    assert f"{url.scheme}://{url.netloc}{url.path}" == f"{SNS}/"
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert query == {"Action": "ConfirmSubscription", "Version": "2010-03-31", "TopicArn": TOPIC, "Token": "a&b"}
    sns.status = 400
    with pytest.raises(SourceUnavailable):  # SNS tries again
        await verifier.confirm(message)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        *((body, EventsUnreadable) for body in (b"", b"x", b"[" * 100_000, b'{"Type": "\\ud800"}')),
        *((body, EventsRefused) for body in (b"[]", b"null", b"17", b'"x"', b"{}")),
    ],
)
async def test_a_body_that_is_no_message_is_unreadable_or_refused(
    verifier: SnsVerifier, body: bytes, fault: type[Exception]
) -> None:
    with pytest.raises(fault):
        await verifier.verify(body)


class Amazon:
    """Amazon SNS, which has the genuine certificate, and answers about others only when the test says so."""

    def __init__(self, sns: Sns) -> None:
        self.sns = sns
        self.is_quick = False
        self.genuine = dumped(sns.message("x"))
        self.fetched: Counter[str] = Counter()  # how often each URL was requested
        self._answers = asyncio.Event()

    def verifier(self, source: Source | None = None) -> SnsVerifier:
        return SnsVerifier([TOPIC], max_age_seconds=0, fetch=self.fetch, source=source)

    async def fetch(self, url: str) -> HttpResponse:
        self.fetched[url] += 1
        if url == CERTIFICATE_URL:
            return HttpResponse(200, {}, self.sns.pem)
        if not self.is_quick:
            await self._answers.wait()
        return HttpResponse(200, {}, self.sns.pem) if "Old" in url else HttpResponse(404, {}, b"")

    def answer(self) -> None:
        self._answers.set()
        self._answers = asyncio.Event()

    async def answer_all(self, tasks: Collection[asyncio.Task[str]]) -> None:
        def are_done() -> bool:
            self.answer()
            return all(task.done() for task in tasks)

        await until(are_done)

    def forged(self, name: object) -> bytes:
        """A message with a wrong signature that names another certificate."""
        changed = self.genuine.replace(b'"Message":"x"', b'"Message":"y"')
        assert changed != self.genuine
        return changed.replace(b"0123456789abcdef", str(name).encode())


@pytest.fixture
async def amazon(sns: Sns) -> AsyncIterator[Amazon]:
    """Amazon without earlier requests. Answers all requests at the end."""
    amazon = Amazon(sns)
    yield amazon
    amazon.is_quick = True
    amazon.answer()
    await until(lambda: not [task for task in asyncio.all_tasks() if "Certificates" in repr(task.get_coro())])


@pytest.mark.parametrize("repeats", [1, 2])
async def test_genuine_messages_pass_beside_forged_ones_with_a_new_certificate(amazon: Amazon, repeats: int) -> None:
    verifier, tasks, genuine = amazon.verifier(), [], []
    for second in range(40):
        forged = [amazon.forged(f"{second}x{number // repeats}") for number in range(FORGED_PER_SECOND)]
        new = [asyncio.create_task(outcome(verifier, message)) for message in forged]
        await asyncio.wait(new, timeout=0)
        tasks += new
        genuine.append(await asyncio.create_task(outcome(verifier, amazon.genuine)))
        amazon.answer()
    await amazon.answer_all(tasks)

    assert Counter(genuine)["accepted"] >= 36
    assert amazon.fetched[CERTIFICATE_URL] == 1
    assert {task.result() for task in tasks} <= {"later", Refusal.SIGNATURE}


async def test_a_proven_certificate_needs_no_fetch_after_a_restart(amazon: Amazon, pool: Pool) -> None:
    assert await outcome(amazon.verifier(pool), amazon.genuine) == "accepted"
    restarted = amazon.verifier(pool)
    await restarted.certificates.load()
    forged = [amazon.forged(f"x{number}") for number in range(FORGED_PER_SECOND)]
    tasks = [asyncio.create_task(outcome(restarted, message)) for message in forged]
    await asyncio.wait(tasks, timeout=0)

    assert [await outcome(restarted, amazon.genuine) for _ in range(40)] == ["accepted"] * 40
    assert amazon.fetched[CERTIFICATE_URL] == 1
    await amazon.answer_all(tasks)


async def test_only_a_certificate_that_has_verified_a_message_is_stored(amazon: Amazon, pool: Pool) -> None:
    tasks = [asyncio.create_task(outcome(amazon.verifier(pool), amazon.forged("Old")))]
    await amazon.answer_all(tasks)

    async with pool.connection() as connection:
        stored = await (await connection.execute("select url from dispatcher.sns_certificate")).fetchall()
    assert (tasks[0].result(), stored) == (Refusal.SIGNATURE, [])


async def test_certificates_that_have_verified_no_message_do_not_replace_a_proven_one(amazon: Amazon) -> None:
    verifier = amazon.verifier()
    assert await outcome(verifier, amazon.genuine) == "accepted"
    for number in range(2 * MAX_CERTIFICATES):
        await amazon.answer_all([asyncio.create_task(outcome(verifier, amazon.forged(f"Old{number}")))])

    assert await outcome(verifier, amazon.genuine) == "accepted"
    assert (len(amazon.fetched), amazon.fetched[CERTIFICATE_URL]) == (2 * MAX_CERTIFICATES + 1, 1)


@pytest.mark.parametrize(("status", "becomes"), [(404, Refusal.SIGNATURE), (500, "later")])
async def test_a_certificate_that_cannot_be_fetched_is_asked_for_once_and_delays_no_other_one(
    sns: Sns, amazon: Amazon, status: int, becomes: str
) -> None:
    sns.status = status
    verifier = SnsVerifier([TOPIC], max_age_seconds=0, fetch=sns.fetch)
    failing = [await outcome(verifier, amazon.forged("x")) for _ in range(10)]

    assert (failing, len(sns.fetched)) == ([becomes] * 10, 1)
    sns.status = 200
    assert await outcome(verifier, amazon.genuine) == "accepted"


async def test_few_messages_wait_for_fetches_and_few_fetches_run_at_the_same_time(amazon: Amazon) -> None:
    verifier = amazon.verifier()
    same = [asyncio.create_task(outcome(verifier, amazon.forged("x"))) for _ in range(2 * MAX_WAITING)]
    await until(lambda: sum(task.done() for task in same) == MAX_WAITING)
    names = [amazon.forged(f"x{number // 3}") for number in range(3 * FORGED_PER_SECOND)]
    others = [asyncio.create_task(outcome(verifier, message)) for message in names]
    await until(lambda: sum(task.done() for task in others) > len(others) - MAX_WAITING)

    assert amazon.fetched.total() == CONCURRENT_FETCHES
    await amazon.answer_all(same + others)
