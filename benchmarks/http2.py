"""Measures what HTTP/2 costs the client per request: `pip install h2==4.4.1 && python benchmarks/http2.py`.

In memory, without TLS and sockets: writes a request as SendGrid gets it, and parses its response. HTTP/1.1 is the
product's way: a kept head, and httptools. HTTP/2 is the package h2, with all of its checks off that an option turns
off. h2 is not among the project's packages.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import httptools

try:
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.events import DataReceived
except ImportError:
    raise SystemExit("benchmarks/http2.py needs the package h2: pip install h2==4.4.1") from None

REQUESTS: Final = 4_000
AT_ONCE: Final = 20
"""The requests that one write contains; HTTP/2 gains the more, the more there are."""
TURNS: Final = 5
TEXT: Final = b"x" * 600
BODY: Final = (
    b'{"personalizations":[{"to":[{"email":"ann@example.org"}],"custom_args":{"email_id":'
    b'"01976b1c-aaaa-7bbb-8ccc-0123456789ab"}}],"from":{"email":"shop@example.com"},"subject":"Receipt",'
    b'"content":[{"type":"text/plain","value":"' + TEXT + b'"}]}'
)
HEADERS: Final = {
    "authorization": "Bearer " + "k" * 69,
    "content-type": "application/json",
    "user-agent": "email-dispatcher",
    "content-length": str(len(BODY)),
}
ANSWER: Final = {"server": "nginx", "date": "Sun, 29 Nov 2026 00:00:00 GMT", "content-length": "0"}


def main() -> None:
    """The command line."""
    for name, turn in {"HTTP/1.1": http1, "HTTP/2, h2": http2}.items():
        print(
            f"{name:12} {1e6 * statistics.median(turn() for _ in range(TURNS)) / REQUESTS:6.1f} µs of CPU per request"
        )


class _Response:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


def http1() -> float:
    """The seconds of CPU of all requests."""
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    lines = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items() if name != "content-length")
    head = f"POST /v3/mail/send HTTP/1.1\r\nHost: api.sendgrid.com\r\n{lines}Content-Length: ".encode()
    answer = "".join(f"{name}: {value}\r\n" for name, value in ANSWER.items())
    octets = f"HTTP/1.1 202 Accepted\r\n{answer}X-Message-Id: abcdefghijklmnop\r\n\r\n".encode()
    began_at = time.process_time()
    for _ in range(REQUESTS):
        _ = head + b"%d\r\n\r\n" % len(BODY) + BODY
        response.headers = {}
        parser.feed_data(octets)
    return time.process_time() - began_at


def http2() -> float:
    """The seconds of CPU of all requests at the client; the server's are not counted."""
    client, server = _connected()
    request = [
        (":method", "POST"),
        (":path", "/v3/mail/send"),
        (":scheme", "https"),
        (":authority", "api.sendgrid.com"),
        *HEADERS.items(),
    ]
    spent = 0.0
    for first in range(1, 2 * REQUESTS, 2 * AT_ONCE):
        streams = range(first, first + 2 * AT_ONCE, 2)
        began_at = time.process_time()
        for stream in streams:
            client.send_headers(stream, request)
            client.send_data(stream, BODY, end_stream=True)
        octets = client.data_to_send()
        spent += time.process_time() - began_at
        answers = _answered(server, octets, streams)
        began_at = time.process_time()
        client.receive_data(answers)
        client.data_to_send()
        spent += time.process_time() - began_at
    return spent


def _connected() -> tuple[H2Connection, H2Connection]:
    client = H2Connection(
        H2Configuration(
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
        )
    )
    server = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    server.receive_data(client.data_to_send())
    return client, server


def _answered(server: H2Connection, requests: bytes, streams: range) -> bytes:
    for event in server.receive_data(requests):
        if isinstance(event, DataReceived):
            server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
    for stream in streams:
        answer = [(":status", "202"), *ANSWER.items(), ("x-message-id", f"message-{stream}")]
        server.send_headers(stream, answer, end_stream=True)
    octets: bytes = server.data_to_send()
    return octets


if __name__ == "__main__":
    main()
