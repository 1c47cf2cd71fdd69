"""Runs clients of the HTTP API in a separate process: `python benchmarks/http_load.py --port 8025 --clients 64`.

Each client keeps one connection and posts the next request as soon as the last response arrives. A client
implements only the HTTP that it needs, so that the benchmark does not measure the clients. `cpu_share` shows how busy
the clients were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Final, cast

import uvloop

GRACE_SECONDS: Final = 30.0
EMAIL: Final = {
    "from": "Shop <shop@example.com>",
    "to": ["customer@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order. It leaves our house tomorrow.\n" * 8,
}
_WITHOUT_KEY: Final = json.dumps(EMAIL)
_AFTER_KEY: Final = _WITHOUT_KEY[1:]


@dataclass(slots=True)
class Load:
    """The state that all clients share.

    Attributes:
        batch: Emails per request; if 1, the clients post to `/v1/emails`.
        seconds: The duration of each request so far.
    """

    name: str
    batch: int
    stop_at: float
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    numbers: count[int] = field(default_factory=count)

    def request(self) -> bytes:
        """The next complete request."""
        if self.batch == 1:
            key = f"Idempotency-Key: {self.name}-{next(self.numbers)}\r\n"
            return _request("/v1/emails", key, _WITHOUT_KEY)
        emails = ",".join(f'{{"message_key":"{self.name}-{next(self.numbers)}",{_AFTER_KEY}' for _ in range(self.batch))
        return _request("/v1/emails/batch", "", f'{{"emails":[{emails}]}}')


def _request(path: str, headers: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self._began_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Post the first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from asyncio.Transport
        self._post()

    def data_received(self, data: bytes) -> None:
        """Post the next request once the response is complete."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return
        self._load.seconds.append(time.perf_counter() - self._began_at)
        expected = b"HTTP/1.1 202" if self._load.batch == 1 else b"HTTP/1.1 200"
        if not head.startswith(expected) or b'"refused"' in body:
            self._load.refused += 1
        self._received = b""
        self._post()

    def connection_lost(self, _error: Exception | None) -> None:
        """Called by asyncio when either end has closed the connection."""
        if not self.done.done():
            self.done.set_result(None)

    def _post(self) -> None:
        assert self._transport is not None
        if time.perf_counter() >= self._load.stop_at:
            self._transport.close()
            return
        request = self._load.request()
        self._began_at = time.perf_counter()
        self._transport.write(request)


async def _run(options: argparse.Namespace) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    began_at = time.perf_counter()
    load = Load(options.name, options.batch, began_at + options.seconds)
    clients: list[Client] = []
    for _ in range(options.clients):
        _, client = await loop.create_connection(lambda: Client(load), "127.0.0.1", options.port)
        clients.append(client)
    async with asyncio.timeout(options.seconds + GRACE_SECONDS):
        await asyncio.gather(*(client.done for client in clients))
    return load_result(load.seconds, time.perf_counter() - began_at, options.batch, refused=load.refused)


def load_result(answers: list[float], seconds: float, batch: int, *, refused: int) -> dict[str, float]:
    """The result of a load, from the duration of each request; `cpu_share` is this process's share of one core."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    ordered = sorted(answers)
    return {
        "requests": len(ordered),
        "refused": refused,
        "emails_per_second": len(ordered) * batch / seconds,
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[len(ordered) * 99 // 100],
        "highest_ms": 1000 * ordered[-1],
        "cpu_share": (usage.ru_utime + usage.ru_stime) / seconds,
    }


def main() -> None:
    """The command line; prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--name", default="load")
    sys.stdout.write(json.dumps(uvloop.run(_run(parser.parse_args()))) + "\n")


if __name__ == "__main__":
    main()
