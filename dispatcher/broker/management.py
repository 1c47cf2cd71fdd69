"""RabbitMQ's HTTP API: whether it answers, how many messages a queue holds, what it reports of exchange and queues.

Its figures lag by up to 5 seconds. A reply that lacks a figure is a failure, never a zero. Blocking: call it from a
thread where a loop runs.
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
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, TypeGuard
from urllib.parse import quote, unquote, urlsplit

from dispatcher.config.values import addresses
from dispatcher.errors import BrokerUnavailable, ConfigurationError, TopologyError
from dispatcher.transport.tls import client_context

TIMEOUT_SECONDS: Final = 5.0
MAX_REPLY_OCTETS: Final = 4 * 1024 * 1024
MOST: Final = 2**63 - 1
_VERSION: Final = re.compile(r"[0-9A-Za-z.+~-]{1,40}")
_PORTS: Final = {"http": 15672, "https": 15671}


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How full a queue is.

    Attributes:
        messages: All of them.
        ready: Those that wait.
        unacked: Those that consumers hold.
        consumers: How many consume.
    """

    messages: int
    ready: int
    unacked: int
    consumers: int


class NoFigures(BrokerUnavailable):
    """The API answers, but without a queue's figures: they lag behind, or the queue's node is away."""


class Management:
    """A client for the HTTP API of one node, or of a cluster's nodes: the one that answered last, else any other.

    Follows no redirect and uses no proxy: either would learn the password.
    """

    def __init__(
        self, url: str, *, vhost: str = "/", ca_file: Path | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: `http://user:password@host:15672`, or several of them, comma-separated; the user needs the monitoring
                tag.
            ca_file: Certificates to trust instead of the system's, for https://.
            timeout_seconds: For a node's whole answer, however slowly it comes.

        Raises:
            ConfigurationError: a URL cannot be used, or the certificates.
        """
        self._nodes = [_Node(one, ca_file, timeout_seconds) for one in addresses(url)]
        random.shuffle(self._nodes)
        self._vhost = quote(vhost, safe="")
        self.longest_seconds = timeout_seconds * len(self._nodes)

    @property
    def _place(self) -> str:
        return self._nodes[0].place

    def version(self) -> str:
        """RabbitMQ's version, and so whether the API answers.

        Raises:
            BrokerUnavailable: it does not, or not to this user.
        """
        status, fields = self._get("overview")
        version = fields.get("rabbitmq_version")
        if status != HTTPStatus.OK or not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise self._refusal(status)
        return version

    def depth(self, queue: str) -> QueueDepth:
        """How full a queue is, or was up to 5 seconds ago.

        Raises:
            TopologyError: there is no such queue.
            NoFigures: they are not there yet for a new queue, nor while the queue's node is away.
            BrokerUnavailable: the API does not answer, or not to this user.
        """
        status, fields = self._get(f"queues/{self._vhost}/{quote(queue, safe='')}")
        if status == HTTPStatus.NOT_FOUND:
            raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy="Run `dispatcher init`.")
        if status != HTTPStatus.OK:
            raise self._refusal(status)
        names = ("messages", "messages_ready", "messages_unacknowledged", "consumers")
        figures = [figure for name in names if is_figure(figure := fields.get(name))]
        if len(figures) != len(names):
            raise NoFigures(f'{self._place} has no figures for queue "{queue}".')
        return QueueDepth(*figures)

    def queue(self, name: str) -> Mapping[str, Any] | None:
        """All that is reported of a queue; None if there is no such queue. Raises as `depth` does."""
        return self._found(f"queues/{self._vhost}/{quote(name, safe='')}")

    def exchange(self, name: str) -> Mapping[str, Any] | None:
        """All that is reported of an exchange; None if there is no such exchange. Raises as `depth` does."""
        return self._found(f"exchanges/{self._vhost}/{quote(name, safe='')}")

    def bindings(self, queue: str) -> list[Mapping[str, Any]]:
        """What leads to a queue. Raises as `depth` does."""
        status, value = self._ask(f"queues/{self._vhost}/{quote(queue, safe='')}/bindings")
        if status != HTTPStatus.OK or not isinstance(value, list):
            raise self._refusal(status)
        return [one for one in value if isinstance(one, dict)]

    def _found(self, path: str) -> Mapping[str, Any] | None:
        status, fields = self._get(path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK or "name" not in fields:
            raise self._refusal(status)
        return fields

    def _get(self, path: str) -> tuple[int, Mapping[str, Any]]:
        """The status and the JSON object of a reply; an empty one where it holds none."""
        status, value = self._ask(path)
        return status, value if isinstance(value, dict) else {}

    def _ask(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of the reply of the first node that gives one; None where it holds no JSON."""
        words = []
        for node in list(self._nodes):
            try:
                return node.ask(path)
            except BrokerUnavailable as error:
                words.append(error.message)
                self._nodes.append(self._nodes.pop(0))
        raise BrokerUnavailable(" ".join(words))

    def _refusal(self, status: int) -> BrokerUnavailable:
        words: dict[int, str] = {
            HTTPStatus.OK: "does not answer as RabbitMQ does",
            HTTPStatus.UNAUTHORIZED: "refuses the user name or the password, or the user has no monitoring tag",
            HTTPStatus.FORBIDDEN: "refuses this user",
        }
        is_refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return BrokerUnavailable(
            f"{self._place} {words.get(status, f'answers {status}')}.", remedy=_REFUSED if is_refused else None
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
        self.place = f"RabbitMQ's management API at {self._host}:{self._port}"

    def ask(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a reply; None where it holds none."""
        connection = self._connection()
        # The connection's own timeout is for each piece, and a server may drip them for ever.
        is_late = threading.Event()
        cut = threading.Timer(self._timeout_seconds, _cut, [connection, is_late])
        cut.start()
        try:
            connection.connect()
            if is_late.is_set():  # before there was anything to cut
                raise self._silence()
            connection.request("GET", f"{self._path}/{path}", headers=self._headers)
            reply = connection.getresponse()
            answer = reply.status, _json(reply.read(MAX_REPLY_OCTETS))
        except (OSError, HTTPException) as error:
            if is_late.is_set():
                raise self._silence() from error
            if not isinstance(error, OSError):  # its text would repeat what an unknown server sent
                raise BrokerUnavailable(f"{self.place} does not speak HTTP.") from None
            words = error.strerror or str(error) or type(error).__name__
            raise BrokerUnavailable(f"{self.place} cannot be reached: {words.lower()}.") from error
        finally:
            cut.cancel()
            # No thread may be left where a fork follows.
            cut.join()
            connection.close()
        # What was cut off may look like a whole answer that says nothing.
        if is_late.is_set():
            raise self._silence()
        return answer

    def _silence(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"{self.place} does not answer within {self._timeout_seconds:g} s.")

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_seconds, context=self._tls)


_REFUSED: Final = (
    "Correct user and password in DISPATCHER_RABBITMQ_MANAGEMENT_URL, or give that user the tag: "
    "rabbitmqctl set_user_tags USER monitoring."
)
_MISTAKE: Final = (
    "DISPATCHER_RABBITMQ_MANAGEMENT_URL is not a usable URL: it looks like http://user:password@host:15672."
)


def is_figure(value: object) -> TypeGuard[int]:
    """Whether a value of a reply is a plausible count: a whole number from 0 to `MOST`."""
    return type(value) is int and 0 <= value <= MOST


def _cut(connection: HTTPConnection, is_late: threading.Event) -> None:
    """Ends a connection that another thread reads from: its read returns at once."""
    is_late.set()
    with suppress(OSError, AttributeError):  # not connected yet, or closed meanwhile
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
        raise ConfigurationError([f"DISPATCHER_CA_FILE cannot be used now ({type(error).__name__})."]) from error


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
