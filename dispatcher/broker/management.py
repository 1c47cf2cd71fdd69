"""A client for RabbitMQ's HTTP API. Reads the version, the depths of queues, and reports about exchange and queues.

Counts are up to 5 seconds old. A reply without a count is an error, and never means zero.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeGuard
from urllib.parse import quote, unquote, urlsplit

from dispatcher.config.values import addresses
from dispatcher.domain.outcome import Reason
from dispatcher.domain.values import dataclass
from dispatcher.errors import BrokerUnavailable, ConfigurationError, TopologyError
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.http_response import NoResponse, RequestNotSent
from dispatcher.transport.tls import http_context

TIMEOUT_SECONDS: Final = 5.0
MAX_REPLY_OCTETS: Final = 4 * 1024 * 1024
MAX_COUNT: Final = 2**63 - 1
_VERSION: Final = re.compile(r"[0-9A-Za-z.+~-]{1,40}")
_PORTS: Final = {"http": 15672, "https": 15671}


@dataclass(frozen=True, slots=True)
class QueueDepth:
    messages: int
    ready: int  # not delivered to a consumer
    unacked: int  # delivered to a consumer and not yet acked
    consumers: int


class CountsUnavailable(BrokerUnavailable):
    """The API's answer contains no counts of the queue: they are not yet available, or the queue's node is down."""


class Management:
    """A client for the HTTP API of one node or of a cluster. Prefers the node that most recently answered.

    Follows no redirect and uses no proxy, because a different server would then receive the password.
    """

    def __init__(
        self, url: str, *, vhost: str = "/", ca_file: Path | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """`url`: `http://user:password@host:15672`, or several URLs, comma-separated. The user needs the monitoring
        tag. `timeout_seconds`: the longest time for a node's complete answer, even if the node keeps sending bytes."""
        self._nodes = [_Node(one, ca_file, timeout_seconds) for one in addresses(url)]
        random.shuffle(self._nodes)
        self.vhost = vhost
        self._vhost = quote(vhost, safe="")

    @property
    def _label(self) -> str:
        return self._nodes[0].label

    async def version(self) -> str:
        """RabbitMQ's version. Also shows whether the API answers."""
        status, fields = await self._get("overview")
        version = fields.get("rabbitmq_version")
        if status != HTTPStatus.OK or not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise self._refusal(status)
        return version

    async def depth(self, queue: str) -> QueueDepth:
        """The depth of a queue, up to 5 seconds old. Raises TopologyError, or CountsUnavailable for a new queue."""
        status, fields = await self._get(f"queues/{self._vhost}/{quote(queue, safe='')}")
        if status == HTTPStatus.NOT_FOUND:
            raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy="Run `dispatcher init`.")
        if status != HTTPStatus.OK:
            raise self._refusal(status)
        names = ("messages", "messages_ready", "messages_unacknowledged", "consumers")
        figures = [figure for name in names if is_count(figure := fields.get(name))]
        if len(figures) != len(names):
            raise CountsUnavailable(f'{self._label} reports no message counts for queue "{queue}".')
        return QueueDepth(*figures)

    async def queue(self, name: str) -> Mapping[str, Any] | None:
        return await self._found(f"queues/{self._vhost}/{quote(name, safe='')}")

    async def exchange(self, name: str) -> Mapping[str, Any] | None:
        return await self._found(f"exchanges/{self._vhost}/{quote(name, safe='')}")

    async def bindings(self, queue: str) -> list[Mapping[str, Any]]:
        status, value = await self._request(f"queues/{self._vhost}/{quote(queue, safe='')}/bindings")
        if status != HTTPStatus.OK or not isinstance(value, list):
            raise self._refusal(status)
        return [one for one in value if isinstance(one, dict)]

    async def alarms(self) -> list[tuple[str, str]]:
        """The alarms of all nodes: each node with the resource that it is short of, such as `memory` or `disk`."""
        status, fields = await self._get("health/checks/alarms")
        alarms = [] if status == HTTPStatus.OK and fields.get("status") == "ok" else fields.get("alarms")
        if not isinstance(alarms, list):
            raise self._refusal(status)
        return [(str(one.get("node")), str(one.get("resource"))) for one in alarms if isinstance(one, dict)]

    async def _found(self, path: str) -> Mapping[str, Any] | None:
        status, fields = await self._get(path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK or "name" not in fields:
            raise self._refusal(status)
        return fields

    async def _get(self, path: str) -> tuple[int, Mapping[str, Any]]:
        """The HTTP status and the JSON object of a reply. The object is empty if the reply contains no JSON object."""
        status, value = await self._request(path)
        return status, value if isinstance(value, dict) else {}

    async def _request(self, path: str) -> tuple[int, Any]:
        """The HTTP status and the decoded JSON, if any, of the first reply from a node."""
        words = []
        for node in list(self._nodes):
            try:
                return await node.get(path)
            except BrokerUnavailable as error:
                words.append(error.message)
                self._nodes.append(self._nodes.pop(0))
        raise BrokerUnavailable(" ".join(words))

    def _refusal(self, status: int) -> BrokerUnavailable:
        words: dict[int, str] = {
            HTTPStatus.OK: "does not answer like RabbitMQ",
            HTTPStatus.UNAUTHORIZED: "refuses the user name or password, or the user lacks the monitoring tag",
            HTTPStatus.FORBIDDEN: "refuses this user",
        }
        is_refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return BrokerUnavailable(
            f"{self._label} {words.get(status, f'answers {status}')}.", remedy=_REFUSED if is_refused else None
        )


class _Reports(HttpConnection):
    """A connection for reports: that about a queue lists all its consumers."""

    most_body_octets = MAX_REPLY_OCTETS
    most_octets = 2 * MAX_REPLY_OCTETS


class _Node:
    def __init__(self, url: str, ca_file: Path | None, timeout_seconds: float) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise ConfigurationError([_MISTAKE]) from None
        if not parts.hostname:
            raise ConfigurationError([_MISTAKE])
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._url = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}/api"
        login = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
        self._timeout_seconds = timeout_seconds
        try:
            self._context = http_context(None, ca_file)
        except OSError as error:
            raise ConfigurationError([f"DISPATCHER_CA_FILE cannot be loaded ({type(error).__name__})."]) from error
        self.label = f"RabbitMQ's management API at {parts.hostname}:{port}"

    async def get(self, path: str) -> tuple[int, Any]:
        """The HTTP status and the decoded JSON of the node's reply. The JSON is None if the reply has none."""
        seconds = self._timeout_seconds
        transport = HttpTransport(connections=1, connect_seconds=seconds, context=self._context, kind=_Reports)
        deadline = asyncio.get_running_loop().time() + seconds
        late = f"{self.label} did not answer within {seconds:g} s."
        try:
            reply = await transport.get(f"{self._url}/{path}", self._headers, deadline)
        except RequestNotSent as error:
            words = error.detail.removeprefix("no connection: ").lower()
            is_late = error.reason is Reason.TIMEOUT_BEFORE_SEND
            raise BrokerUnavailable(late if is_late else f"{self.label} cannot be reached: {words}.") from error
        except NoResponse as error:
            is_late = asyncio.get_running_loop().time() >= deadline
            # The text does not repeat bytes that an unknown server sent.
            raise BrokerUnavailable(late if is_late else f"{self.label} did not send a valid HTTP response.") from error
        finally:
            await transport.close()
        try:
            return reply.status, json.loads(reply.body)
        except (ValueError, RecursionError):
            return reply.status, None


_REFUSED: Final = (
    "Correct user and password in DISPATCHER_RABBITMQ_MANAGEMENT_URL, or add the tag: "
    "rabbitmqctl set_user_tags USER monitoring."
)
_MISTAKE: Final = (
    "DISPATCHER_RABBITMQ_MANAGEMENT_URL is not a valid URL. It must look like http://user:password@host:15672."
)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a reply's value is a plausible count: an integer from 0 to `MAX_COUNT`."""
    return type(value) is int and 0 <= value <= MAX_COUNT
