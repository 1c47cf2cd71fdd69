"""Verifies the messages that Amazon SNS posts, and confirms subscriptions.

A valid signature shows only that AWS signed the message. Everybody can create a topic, and subscribe our URL to the
topic. So a message is accepted only if its topic is on the list of allowed topics. The list is checked before any
request to AWS. The message contains the URL of the certificate. Only URLs of SNS itself are allowed, because the URLs
of S3 buckets, which anybody can create, look similar.

https://docs.aws.amazon.com/sns/latest/dg/sns-verify-signature-of-message.html
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA1, SHA256

from dispatcher.errors import ConfigurationError
from dispatcher.events import fields
from dispatcher.events.aws import dns_suffix_of
from dispatcher.events.contract import EventsRefused, EventsUnreadable, Refusal, SourceUnavailable
from dispatcher.events.signatures import Freshness, decode
from dispatcher.events.sns_certificates import CONCURRENT_FETCHES, RETRY_SECONDS, Certificates, Fetch
from dispatcher.store.statements import Source
from dispatcher.transport.call import NoFreeConnection
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_proxy import proxy_for
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.version import VERSION

FETCH_SECONDS: Final = 8.0
"""The longest time for a request to AWS. SNS waits at most 15 seconds for our response, and we respond only after the
request to AWS."""
_CERTIFICATE_URL: Final = re.compile(
    r"https://sns\.([a-z0-9-]{1,40})\.([a-z0-9.-]{1,60})/SimpleNotificationService-[A-Za-z0-9]{1,64}\.pem", re.ASCII
)
_HASHES: Final[Mapping[str, SHA1 | SHA256]] = {"1": SHA1(), "2": SHA256()}  # noqa: S303 - SNS's default
_MAX_TOKEN_CHARACTERS: Final = 1024


class MessageType(StrEnum):
    NOTIFICATION = "Notification"
    SUBSCRIPTION = "SubscriptionConfirmation"
    UNSUBSCRIPTION = "UnsubscribeConfirmation"


@dataclass(frozen=True, slots=True)
class SnsMessage:
    """A verified message of Amazon SNS. `token` can confirm a subscription; None for a notification."""

    type: MessageType
    topic: str
    text: str
    token: str | None


def fetcher(ca_file: Path | None) -> Fetch:
    """A function that sends a GET request to AWS. It follows no redirect."""
    transports: dict[str, HttpTransport] = {}  # one for each region: to read all trusted certificates takes 20 ms

    async def fetch(url: str) -> HttpResponse:
        server = urlsplit(url).netloc
        if server not in transports:
            transports[server] = HttpTransport(
                connections=2 * CONCURRENT_FETCHES, ca_file=ca_file, proxy=proxy_for(url)
            )
        deadline = asyncio.get_running_loop().time() + FETCH_SECONDS
        try:
            return await transports[server].get(url, {"User-Agent": f"EmailDispatcher/{VERSION}"}, deadline)
        except (NoFreeConnection, RequestNotSent, NoResponse) as error:
            raise SourceUnavailable(f"Amazon SNS does not respond: {error}.") from error

    return fetch


class SnsVerifier:
    """Verifies the messages of Amazon SNS, and confirms subscriptions to allowed topics."""

    def __init__(
        self,
        topics: Collection[str],
        *,
        max_age_seconds: float,
        fetch: Fetch,
        source: Source | None = None,
        clock: Callable[[], float] = time.time,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`topics`: the ARNs of the allowed topics. `max_age_seconds`: of a signature; 0 for any age. `source`: where
        certificates that have verified a message are stored. Raises ConfigurationError if botocore does not know a
        region."""
        self._endpoints = {topic: endpoint_of(topic) for topic in topics}
        self._freshness = Freshness(max_age_seconds, clock)
        self._fetch = fetch
        self.certificates = Certificates(fetch, clock, source, retry_seconds)  # call `load` before the first message

    async def verify(self, body: bytes | bytearray) -> SnsMessage:
        """Returns the message in a request body. Raises EventsUnreadable, EventsRefused or SourceUnavailable."""
        given = _envelope(body)
        kind, topic = MessageType(given["Type"]), given["TopicArn"]
        if topic not in self._endpoints:
            detail = "The topic is not allowed. Add its ARN to DISPATCHER_SES_EVENTS_TOPICS, or unsubscribe."
            raise EventsRefused(Refusal.TOPIC, detail)
        # The certificate may be of any region of the topic's partition.
        url, partition = _CERTIFICATE_URL.fullmatch(given["SigningCertURL"]), self._endpoints[topic].split(".", 2)[2]
        if url is None or not url[2] == dns_suffix_of(url[1]) == partition:
            raise EventsRefused(Refusal.SIGNATURE, "The certificate's URL is not a URL of Amazon SNS.")
        signed_at = fields.instant(given["Timestamp"])
        if signed_at is None:
            raise EventsRefused(Refusal.SIGNATURE, "The message has no valid timestamp.")
        self._freshness.check(signed_at.timestamp())
        signature = decode(given["Signature"])
        key = await self.certificates.key_of(given["SigningCertURL"])
        try:
            key.verify(signature, _signed_text(kind, given), PKCS1v15(), _HASHES[given["SignatureVersion"]])
        except InvalidSignature:
            raise EventsRefused(Refusal.SIGNATURE, "The signature does not match the message.") from None
        await self.certificates.prove(given["SigningCertURL"])
        return SnsMessage(kind, topic, given["Message"], given.get("Token"))

    async def confirm(self, message: SnsMessage) -> None:
        """Confirms the subscription for which SNS sent this message, by a call to SNS in the topic's region.
        Idempotent. The URL in the message is not used, because this process sends requests only to URLs that it
        builds."""
        token = message.token or ""
        if not 0 < len(token) <= _MAX_TOKEN_CHARACTERS:
            raise EventsRefused(Refusal.SIGNATURE, "The message has no token.")
        query = {"Action": "ConfirmSubscription", "Version": "2010-03-31", "TopicArn": message.topic, "Token": token}
        response = await self._fetch(f"{self._endpoints[message.topic]}/?{urlencode(query)}")
        if response.status != 200:
            raise SourceUnavailable(
                f"Amazon SNS answered with status {response.status}, and did not confirm the subscription."
            )


def endpoint_of(topic: str) -> str:
    """The URL of SNS in a topic's region. Raises ConfigurationError if botocore does not know the region."""
    region = topic.split(":")[3]  # the setting's parser has checked the allowed topics
    if (suffix := dns_suffix_of(region)) is None:
        mistake = f"DISPATCHER_SES_EVENTS_TOPICS: the installed version of botocore does not know the region {region}."
        raise ConfigurationError([f"{mistake} Correct the ARN, or install a newer version."])
    return f"https://sns.{region}.{suffix}"


def _envelope(body: bytes | bytearray) -> dict[str, Any]:
    """The message in a request body, with all required fields. Its signature is not verified yet."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EventsUnreadable("The request is not JSON.") from None
    required = ["TopicArn", "SigningCertURL", "Timestamp", "Signature", "SignatureVersion", "Message", "MessageId"]
    if not isinstance(given, dict) or given.get("Type") not in tuple(MessageType):
        detail = "The request is not an SNS message. Turn off raw message delivery of the subscription."
        raise EventsRefused(Refusal.SIGNATURE, detail)
    if given["Type"] != MessageType.NOTIFICATION:
        required += ["Token", "SubscribeURL"]
    if not all(isinstance(given.get(name), str) for name in required) or given["SignatureVersion"] not in _HASHES:
        raise EventsRefused(Refusal.SIGNATURE, "The message lacks a field that the signature needs.")
    return given


def _signed_text(kind: MessageType, given: Mapping[str, Any]) -> bytes:
    names = ["Message", "MessageId", "Timestamp", "TopicArn", "Type"]
    if kind is not MessageType.NOTIFICATION:
        names += ["SubscribeURL", "Token"]
    elif isinstance(given.get("Subject"), str):
        names += ["Subject"]
    return "".join(f"{name}\n{given[name]}\n" for name in sorted(names)).encode()
