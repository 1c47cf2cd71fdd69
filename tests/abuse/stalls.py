"""Clients that stop sending, clients that do not read, and large numbers of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from tests.abuse.case import Attack, Case, Target
from tests.abuse.raw_connection import JSON, RawConnection, exchange, get, head


def _upload(target: Target, length: int, *headers: str) -> bytes:
    """The headers of a POST request with a valid API key and this content length."""
    return head("POST /v1/emails", JSON, f"Content-Length: {length}", *target.named(), *headers)


async def _stall(sent: Callable[[Target], bytes], connections: int, target: Target) -> list[str]:
    """Opens connections, and sends these bytes and then nothing on each. Returns each connection's result when the time
    is over."""
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(await RawConnection.open(target.port)) for _ in range(connections)]
        for client in clients:
            await client.send(sent(target))
        reading = [asyncio.create_task(client.answer()) for client in clients]
        await asyncio.wait(reading, timeout=target.seconds)
        got = [task.result() if task.done() else "waits" for task in reading]
        for task in reading:
            task.cancel()
        return got


async def _drip(octets: Callable[[Target], bytes], target: Target) -> list[str]:
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(await RawConnection.open(target.port)) for _ in range(200)]
        texts = [octets(target) for _ in clients]
        until, position = asyncio.get_running_loop().time() + target.seconds, 0
        while asyncio.get_running_loop().time() < until:
            for client, text in zip(clients, texts, strict=True):
                await client.send(text[position : position + 1] or b" ")
            position += 1
            await asyncio.sleep(0.05)
        return ["waits"] * len(clients)


async def _unread(path: str, kind: str | None, ahead: int, connections: int, target: Target) -> list[str]:
    request = get(path, *(target.named(kind) if kind else ()))
    async with AsyncExitStack() as opened:
        for _ in range(connections):
            client = await opened.enter_async_context(await RawConnection.open(target.port, receive_bytes=4096))
            await client.send(request * ahead)
        await asyncio.sleep(target.seconds)
    return ["waits"] * connections


async def _flood(target: Target) -> list[str]:
    async with await RawConnection.open(target.port) as client:
        await client.send(get("/healthz") * 1000)
        results = await client.answers()
    return ["cut off" if results.count("200") < 1000 else results]


async def _reset(target: Target) -> list[str]:
    for octets in (b"", b"GET /", get("/docs"), _half_upload(target)):
        client = await RawConnection.open(target.port)
        await client.send(octets)
        client.reset()
    return ["gone"]


async def _half_closed(target: Target) -> list[str]:
    async with await RawConnection.open(target.port) as client:
        await client.send(_half_upload(target))
        client.end_sending()
        return [await client.answer()]


async def _expecting(target: Target) -> list[str]:
    """Announces a body of 100 MB."""
    return [await exchange(target.port, [_upload(target, 100 << 20, "Expect: 100-continue")])]


async def _sending_on(target: Target) -> list[str]:
    """Sends a body without a key, so the API does not read the body. The response must still arrive."""
    start = head("POST /v1/emails", JSON, f"Content-Length: {8 << 20}", "Idempotency-Key: k")
    return [await exchange(target.port, [start, *[b" " * 65536] * 128])]


def _half_upload(target: Target) -> bytes:
    return _upload(target, 500) + b'{"from":'


def _whole_head(target: Target) -> bytes:
    return b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"x" * 31_000


def _large(target: Target) -> bytes:
    return _upload(target, 20 << 20) + b" " * (18 << 20)


def _with_unknown_key(target: Target) -> bytes:
    return head("POST /v1/emails", JSON, *target.named("unknown"), "Content-Length: 1000000") + b" " * 300_000


_WAITS: Final = frozenset({"waits", "end", "408 request-timeout"})
_LATE: Final = _WAITS | {"503 overloaded"}


def _many(family: str, name: str, attack: Attack, *allowed: str, seconds: float = 2.0) -> Case:
    """A case of one attacker who opens many connections."""
    return Case(family, name, attack, frozenset(allowed), clients=1, seconds=seconds)


CASES: Final = (
    _many("stall", "a thousand silent connections", partial(_stall, lambda _: b"", 1000), *_WAITS),
    _many("stall", "five hundred heads of 31 KB without end", partial(_stall, _whole_head, 500), *_WAITS),
    _many("stall", "a thousand uploads that stop in the body", partial(_stall, _half_upload, 1000), *_LATE),
    _many("stall", "eight uploads of 20 MB that stop", partial(_stall, _large, 8), *_LATE),
    _many(
        "stall",
        "pipelined requests before a body that stops",
        partial(_stall, lambda target: get("/healthz") * 10 + _half_upload(target), 200),
        "200",
    ),
    _many("stall", "uploads with an unknown key", partial(_stall, _with_unknown_key, 300), "401 unauthorized"),
    _many("stall", "a head byte by byte", partial(_drip, lambda _: get("/healthz")), *_WAITS),
    _many("stall", "a body byte by byte", partial(_drip, lambda target: _upload(target, 500)), *_WAITS, seconds=3),
    _many("unread", "the docs page", partial(_unread, "/docs", None, 1, 400), *_WAITS),
    _many("unread", "sixteen pipelined documents", partial(_unread, "/openapi.json", None, 16, 100), *_WAITS),
    _many("unread", "lists of emails", partial(_unread, "/v1/emails?limit=200", "read", 8, 50), *_WAITS),
    Case("many", "a thousand pipelined requests", _flood, frozenset({"cut off"})),
    Case("many", "connections that are reset", _reset, frozenset({"gone"})),
    Case("many", "a client that stops sending", _half_closed, frozenset({"end", "408 request-timeout", "reset"})),
    Case("many", "an announced body of 100 MB", _expecting, frozenset({"413 body-too-large"})),
    Case("many", "a body behind a refusal", _sending_on, frozenset({"401 unauthorized"})),
)
