"""A client for RabbitMQ's HTTP API. Reads the version, the depths of queues, and reports about exchange and queues.

Counts are up to 5 seconds old. A reply without a count is an error, and never means zero. All calls block: if an event
loop is running, call them from a thread.
"""

from __future__ import annotations

import base64
import json
import random
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, TypeGuard
from urllib.parse import quote, unquote, urlsplit

from dispatcher.config.values import addresses
from dispatcher.domain.values import dataclass
from dispatcher.errors import BrokerUnavailable, ConfigurationError, TopologyError
from dispatcher.transport.tls import client_context

TIMEOUT_SECONDS: Final = 5.0
MAX_REPLY_OCTETS: Final = 4 * 1024 * 1024
MAX_COUNT: Final = 2**63 - 1
_VERSION: Final = re.compile(r"[0-9A-Za-z.+~-]{1,40}")
_PORTS: Final = {"http": 15672, "https": 15671}


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of messages and consumers of a queue.

    Attributes:
        messages: All messages: ready and unacked.
        ready: Messages that are not delivered to a consumer.
        unacked: Messages that are delivered to a consumer and not yet acked.
        consumers: The number of consumers.
    """

    messages: int
    ready: int
    unacked: int
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
        """Creates a client. Does not connect yet.

        Args:
            url: `http://user:password@host:15672`, or several URLs, comma-separated. The user needs the monitoring tag.
            ca_file: Certificates to trust instead of the system's, for https://.
            timeout_seconds: The longest time for a node's complete answer, even if the node keeps sending bytes.

        Raises:
            ConfigurationError: A URL or the certificates are invalid.
        """
        self._nodes = [_Node(one, ca_file, timeout_seconds) for one in addresses(url)]
        random.shuffle(self._nodes)
        self.vhost = vhost
        self._vhost = quote(vhost, safe="")
        self.longest_seconds = timeout_seconds * len(self._nodes)

    @property
    def _label(self) -> str:
        return self._nodes[0].label

    def version(self) -> str:
        """RabbitMQ's version. Also shows whether the API answers.

        Raises:
            BrokerUnavailable: The API does not answer, or refuses this user.
        """
        status, fields = self._get("overview")
        version = fields.get("rabbitmq_version")
        if status != HTTPStatus.OK or not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise self._refusal(status)
        return version

    def depth(self, queue: str) -> QueueDepth:
        """The depth of a queue, up to 5 seconds old.

        Raises:
            TopologyError: The queue does not exist.
            CountsUnavailable: The queue is new, or its node is down, so the API has no counts.
            BrokerUnavailable: The API does not answer, or refuses this user.
        """
        status, fields = self._get(f"queues/{self._vhost}/{quote(queue, safe='')}")
        if status == HTTPStatus.NOT_FOUND:
            raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy="Run `dispatcher init`.")
        if status != HTTPStatus.OK:
            raise self._refusal(status)
        names = ("messages", "messages_ready", "messages_unacknowledged", "consumers")
        figures = [figure for name in names if is_count(figure := fields.get(name))]
        if len(figures) != len(names):
            raise CountsUnavailable(f'{self._label} reports no message counts for queue "{queue}".')
        return QueueDepth(*figures)

    def queue(self, name: str) -> Mapping[str, Any] | None:
        """The report about a queue; None if the queue does not exist. Raises BrokerUnavailable, as `depth` does."""
        return self._found(f"queues/{self._vhost}/{quote(name, safe='')}")

    def exchange(self, name: str) -> Mapping[str, Any] | None:
        """The report about an exchange; None if the exchange does not exist.

        Raises BrokerUnavailable, as `depth` does.
        """
        return self._found(f"exchanges/{self._vhost}/{quote(name, safe='')}")

    def bindings(self, queue: str) -> list[Mapping[str, Any]]:
        """The bindings to a queue. Raises BrokerUnavailable, as `depth` does."""
        status, value = self._request(f"queues/{self._vhost}/{quote(queue, safe='')}/bindings")
        if status != HTTPStatus.OK or not isinstance(value, list):
            raise self._refusal(status)
        return [one for one in value if isinstance(one, dict)]

    def alarms(self) -> list[tuple[str, str]]:
        """The alarms of all nodes: each node with the resource that it is short of, such as `memory` or `disk`.

        Raises BrokerUnavailable, as `depth` does.
        """
        status, fields = self._get("health/checks/alarms")
        alarms = [] if status == HTTPStatus.OK and fields.get("status") == "ok" else fields.get("alarms")
        if not isinstance(alarms, list):
            raise self._refusal(status)
        return [(str(one.get("node")), str(one.get("resource"))) for one in alarms if isinstance(one, dict)]

    def _found(self, path: str) -> Mapping[str, Any] | None:
        status, fields = self._get(path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK or "name" not in fields:
            raise self._refusal(status)
        return fields

    def _get(self, path: str) -> tuple[int, Mapping[str, Any]]:
        """The HTTP status and the JSON object of a reply. The object is empty if the reply contains no JSON object."""
        status, value = self._request(path)
        return status, value if isinstance(value, dict) else {}

    def _request(self, path: str) -> tuple[int, Any]:
        """The HTTP status and the decoded JSON of the first reply from a node. The JSON is None if the reply has
        none."""
        words = []
        for node in list(self._nodes):
            try:
                return node.get(path)
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


class _Node:
    """One node's HTTP API."""

    def __init__(self, url: str, ca_file: Path | None, timeout_seconds: float) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise ConfigurationError([_MISTAKE]) from None
        if not parts.hostname:
            raise ConfigurationError([_MISTAKE])
        self._host = parts.hostname
        self._path = f"{parts.path.rstrip('/')}/api"
        self._headers = {"Authorization": _basic(parts.username or "guest", parts.password or "guest")}
        self._timeout_seconds = timeout_seconds
        self._tls = _tls(ca_file) if parts.scheme == "https" else None
        self.label = f"RabbitMQ's management API at {self._host}:{self._port}"

    def get(self, path: str) -> tuple[int, Any]:
        """The HTTP status and the decoded JSON of the node's reply. The JSON is None if the reply has none."""
        connection = self._connection()
        # The connection's timeout applies to each single read, so a server that sends one byte at a time could delay us
        # for ever. The timer limits the whole request.
        is_late = threading.Event()
        cut = threading.Timer(self._timeout_seconds, _cut, [connection, is_late])
        cut.start()
        try:
            connection.connect()
            # If the timer fired before the connection had a socket, `_cut` had nothing to shut down.
            if is_late.is_set():
                raise self._timeout()
            connection.request("GET", f"{self._path}/{path}", headers=self._headers)
            reply = connection.getresponse()
            answer = reply.status, _json(reply.read(MAX_REPLY_OCTETS))
        except (OSError, HTTPException) as error:
            if is_late.is_set():
                raise self._timeout() from error
            if not isinstance(error, OSError):  # the error's text may repeat bytes that an unknown server sent
                raise BrokerUnavailable(f"{self.label} did not send a valid HTTP response.") from None
            words = error.strerror or str(error) or type(error).__name__
            raise BrokerUnavailable(f"{self.label} cannot be reached: {words.lower()}.") from error
        finally:
            cut.cancel()
            # Wait until the timer's thread has ended: the caller may fork, and no other thread may run at a fork.
            cut.join()
            connection.close()
        # A reply that the timer has cut off can look complete, so check the timer, too.
        if is_late.is_set():
            raise self._timeout()
        return answer

    def _timeout(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"{self.label} did not answer within {self._timeout_seconds:g} s.")

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_seconds, context=self._tls)


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


def _cut(connection: HTTPConnection, is_late: threading.Event) -> None:
    """Sets `is_late`, and shuts down the socket, so that a read in another thread returns immediately."""
    is_late.set()
    with suppress(OSError, AttributeError):  # the connection has no socket yet, or its socket is already closed
        connection.sock.shutdown(socket.SHUT_RDWR)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return client_context(ca_file)
    except OSError as error:
        raise ConfigurationError([f"DISPATCHER_CA_FILE cannot be loaded ({type(error).__name__})."]) from error


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
