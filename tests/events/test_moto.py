"""moto's SNS and SQS carry SES's events to PostgreSQL, because our doubles and our code could have the same mistake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import boto3.session
import pytest
from moto.backends import get_backend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

from dispatcher.config import load
from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.events.aws import region_in
from dispatcher.events.contract import EventSink, SourceUnavailable
from dispatcher.events.intake import EventBatcher
from dispatcher.events.sqs import Queue, QueuePoller, QueuePolling
from dispatcher.transport.http_response import HttpResponse
from tests.api.running_api import UNREACHABLE_AMQP_URL, running
from tests.events.requests import delivery, ses_event
from tests.events.scene import Recorder, Scene
from tests.providers.ses_place import REGION, aws_environment
from tests.waiting import until

ID: Final = UUID("01938a7e-0000-7000-8000-000000000001")


@dataclass(frozen=True)
class Amazon:
    """moto's SNS and SQS, with a topic and a queue that is subscribed to it."""

    sns: Any
    sqs: Any
    topic: str
    queue_url: str

    def publish(self, notice: Any) -> None:
        self.sns.publish(TopicArn=self.topic, Message=json.dumps(notice))

    def send(self, *texts: str) -> None:
        for text in texts:
            self.sqs.send_message(QueueUrl=self.queue_url, MessageBody=text)

    def left(self) -> int:
        """How many messages the queue has, visible or not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    async def fetch(self, url: str) -> HttpResponse:
        """Answers a GET request to SNS, as moto does to its own clients: it identifies the service by the host name."""
        parts = urlsplit(url)
        assert parts.netloc == f"sns.{REGION}.amazonaws.com"
        if parts.path.endswith(".pem"):
            certificates = get_backend("sns")[DEFAULT_ACCOUNT_ID][REGION]._message_public_keys
            return HttpResponse(200, {}, certificates[parts.path.removeprefix("/")])
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert query["Action"] == "ConfirmSubscription"
        await asyncio.to_thread(self.sns.confirm_subscription, TopicArn=query["TopicArn"], Token=query["Token"])
        return HttpResponse(200, {}, b"")


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Any, Any]]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with aws_environment(AWS_DEFAULT_REGION=REGION):
        session = boto3.session.Session()
        sns, sqs = (session.client(name, endpoint_url=f"http://{host}:{port}") for name in ("sns", "sqs"))
    yield sns, sqs
    sns.close()
    sqs.close()
    server.stop()


@pytest.fixture
def amazon(clients: tuple[Any, Any]) -> Iterator[Amazon]:
    sns, sqs = clients
    with aws_environment(AWS_DEFAULT_REGION=REGION):
        topic = sns.create_topic(Name="ses-events")["TopicArn"]
        queue_url = sqs.create_queue(QueueName="ses-events")["QueueUrl"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=f"arn:aws:sqs:{REGION}:{DEFAULT_ACCOUNT_ID}:ses-events")
        yield Amazon(sns, sqs, topic, queue_url)
        sns.delete_topic(TopicArn=topic)
        sqs.delete_queue(QueueUrl=queue_url)


def poller(amazon: Amazon, sink: EventSink) -> QueuePoller:
    queue = Queue(amazon.queue_url, wait_seconds=0)
    return QueuePoller(queue, EventBatcher(sink), first_wait_seconds=0.001)


async def test_ten_messages_of_every_form_are_one_batch(amazon: Amazon) -> None:
    sink = Recorder()
    raw = json.dumps(delivery(ID))
    bridged = json.dumps({"detail-type": "Email Delivered", "source": "aws.ses", "detail": delivery(ID)})
    amazon.send(*[raw, bridged] * 3, "Successfully validated", json.dumps(ses_event(None)), "{", "[]")

    await poller(amazon, sink).run_once()

    assert [len(batch) for batch in sink.batches] == [6]
    assert amazon.left() == 0


async def test_messages_stay_in_the_queue_until_postgresql_has_the_events(amazon: Amazon) -> None:
    found: list[int] = []

    class Watching(Recorder):
        async def store(self, events: Any) -> None:
            found.append(await asyncio.to_thread(amazon.left))
            await super().store(events)

    sink = Watching(faults=[StoreUnavailable("away"), StoreUnavailable("away")])
    amazon.send(json.dumps(delivery(ID)))

    await poller(amazon, sink).run_once()

    assert found == [1, 1, 1]
    assert (len(sink.batches), amazon.left()) == (1, 0)


async def test_only_the_message_of_a_locked_email_is_delivered_again(amazon: Amazon) -> None:
    sink = Recorder(faults=[StoreBusy("locked"), StoreBusy("locked")])  # once for the batch, once for the first message
    amazon.send(json.dumps(delivery(ID)), json.dumps(delivery(ID)))

    await poller(amazon, sink).run_once()

    assert (len(sink.batches), amazon.left()) == (1, 1)


async def test_a_queue_that_does_not_exist_or_is_unreachable_is_reported(amazon: Amazon, closed_port: int) -> None:
    with pytest.raises(SourceUnavailable, match=r"NonExistentQueue|QueueDoesNotExist"):
        await QueuePoller(Queue(f"{amazon.queue_url}-other", wait_seconds=0), Recorder()).run_once()
    with (
        aws_environment(AWS_DEFAULT_REGION=REGION, AWS_MAX_ATTEMPTS="1"),
        pytest.raises(SourceUnavailable, match="EndpointConnectionError"),
    ):
        await QueuePoller(Queue(f"http://127.0.0.1:{closed_port}/1/q", wait_seconds=0), Recorder()).run_once()


async def test_the_pollers_of_a_host_store_what_arrives_through_sns_once(amazon: Amazon, scene: Scene) -> None:
    environ = {"DATABASE_URL": scene.url, "SES_EVENTS_QUEUE_URL": amazon.queue_url, "SES_EVENTS_TOPICS": amazon.topic}
    settings = load({f"DISPATCHER_{name}": value for name, value in environ.items()})
    ids = scene.books.enqueue_tried(12)
    polling = asyncio.create_task(QueuePolling(settings).run())

    for email_id in [*ids, *ids[:2]]:
        await asyncio.to_thread(amazon.publish, delivery(email_id))

    await until(lambda: scene.books.count("email_event") == 12)
    await until(lambda: amazon.left() == 0)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    assert (scene.books.statuses(), scene.books.count("email_event")) == ({"sent": 12}, 12)


async def test_a_message_that_sns_posts_passes_the_full_check(amazon: Amazon, scene: Scene) -> None:
    (email_id,) = scene.books.enqueue_tried()
    environ = {"DATABASE_URL": scene.url, "AMQP_URL": UNREACHABLE_AMQP_URL, "API_ADDRESS": "127.0.0.1:0"}
    settings = load({f"DISPATCHER_{name}": value for name, value in environ.items()})
    settings = replace(settings, api_allow_anonymous=True, ses_events_topics=(amazon.topic,))
    async with running(settings, fetch=amazon.fetch) as api:
        amazon.sns.subscribe(TopicArn=amazon.topic, Protocol="http", Endpoint=f"{api.url}/v1/events/ses")
        await asyncio.to_thread(amazon.publish, delivery(email_id))

    assert scene.books.status(email_id) == "sent"


@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("sqs.eu-west-1.amazonaws.com", "eu-west-1"),
        ("eu-west-1.queue.amazonaws.com", "eu-west-1"),
        ("sqs-fips.us-east-2.amazonaws.com", "us-east-2"),
        ("vpce-0a1b-9z.sqs.us-east-1.vpce.amazonaws.com", "us-east-1"),
        ("sqs.us-isob-east-1.sc2s.sgov.gov", "us-isob-east-1"),
        *((host, None) for host in ("queue.amazonaws.com", "127.0.0.1", "localhost", "")),
    ],
)
def test_the_region_of_a_queue_comes_from_the_name_of_its_host(host: str, region: str | None) -> None:
    assert region_in(host) == region
