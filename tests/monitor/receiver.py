"""A webhook receiver: a real https server that records requests. It checks signatures without the dispatcher's code."""

from __future__ import annotations

import base64
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

SECRET: Final = "whsec_" + base64.b64encode(b"0123456789abcdefghijklmnopqrstuv").decode()


@dataclass(frozen=True, slots=True)
class Posted:
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def data(self) -> Any:
        return self.json["data"]

    @property
    def is_signed(self) -> bool:
        """Whether the request has a valid and recent signature by https://www.standardwebhooks.com; raises if not."""
        return bool(Verifier(SECRET).verify(self.body.decode(), dict(self.headers)))


class Receiver(ThreadingHTTPServer):
    """The https server. It answers with the next of `statuses`, then with `status_of` the request, and not until
    `released`."""

    daemon_threads = True

    def __init__(self, ca: trustme.CA, *names: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert(*names).configure_cert(context)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.posted: list[Posted] = []
        self.statuses: list[int] = []
        self.status_of: Callable[[Posted], int] = lambda _: 204
        self.retry_after: str | None = None
        self.released = threading.Event()
        self.released.set()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}/alerts?source=mail"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


class _Answer(BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        posted = Posted(self.path, headers, body)
        server.posted.append(posted)
        server.released.wait(20)
        status = server.statuses.pop(0) if server.statuses else server.status_of(posted)
        self.send_response(status)
        if server.retry_after:
            self.send_header("Retry-After", server.retry_after)
        if 300 <= status < 400:
            self.send_header("Location", f"https://127.0.0.1:{server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@contextmanager
def serving(server: socketserver.BaseServer, released: threading.Event) -> Iterator[None]:
    """Answers requests in a thread during the block, after which no request waits for `released`."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        released.set()
        server.shutdown()
        thread.join()


@contextmanager
def receiving(ca: trustme.CA, *names: str) -> Iterator[Receiver]:
    """Runs a receiver during the block. Its certificate is for these host names."""
    with Receiver(ca, *names) as server, serving(server, server.released):
        yield server


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """A private certificate authority, which no client trusts by default."""
    return trustme.CA()


@pytest.fixture
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    """A webhook receiver whose certificate is for 127.0.0.1 and for a host name that no resolver knows."""
    with receiving(ca, "127.0.0.1", "alerts.example.com") as running:
        yield running


def write_ca(ca: trustme.CA, folder: Path) -> Path:
    path = folder / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path
