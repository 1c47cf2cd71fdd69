"""Clients that stop sending, clients that do not read, and large numbers of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import JSON, RawConnection, exchange, get, head

HALF: Final = b'{"from":'


def _upload(target: Target, length: int, *headers: str) -> bytes:
    """The headers of a POST request with a valid API key and this content length."""
    named = (target.authorization(), f"Idempotency-Key: {target.message_key()}", *headers)
    return head("POST /v1/emails", JSON, f"Content-Length: {length}", *named)


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


async def _drip(octets: Callable[[Target], bytes], connections: int, target: Target) -> list[str]:
    """Sends one byte at a time on this number of connections."""
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(await RawConnection.open(target.port)) for _ in range(connections)]
        texts = [octets(target) for _ in clients]
        loop = asyncio.get_running_loop()
        until, position = loop.time() + target.seconds, 0
        while loop.time() < until:
            for client, text in zip(clients, texts, strict=True):
                await client.send(text[position : position + 1] or b" ")
            position += 1
            await asyncio.sleep(0.05)
        return ["waits"] * connections


async def _unread(path: str, kind: str | None, ahead: int, connections: int, target: Target) -> list[str]:
    """Requests large responses, and reads none."""
    request = get(path, *([target.authorization(kind)] if kind else []))
    async with AsyncExitStack() as opened:
        for _ in range(connections):
            client = await opened.enter_async_context(await RawConnection.open(target.port, receive_bytes=4096))
            await client.send(request * ahead)
        await asyncio.sleep(target.seconds)
    return ["waits"] * connections


async def _flood(count: int, target: Target) -> list[str]:
    """Sends `count` requests on one connection without waiting for responses."""
    async with await RawConnection.open(target.port) as client:
        await client.send(get("/healthz") * count)
        results = await client.answers()
    return ["cut off" if results.count("200") < count else results]


async def _reset(*sent: bytes, target: Target) -> list[str]:
    """For each given part of a request: opens a connection, sends the part, and resets the connection."""
    for octets in sent:
        client = await RawConnection.open(target.port)
        await client.send(octets)
        client.reset()
    return ["gone"] * len(sent)


async def _half_closed(target: Target) -> list[str]:
    async with await RawConnection.open(target.port) as client:
        await client.send(_upload(target, 500) + HALF)
        client.end_sending()
        return [await client.answer()]


async def _expecting(length: int, target: Target) -> list[str]:
    return [await exchange(target.port, [_upload(target, length, "Expect: 100-continue")])]


def _whole_head(target: Target) -> bytes:
    return b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"x" * 31_000


def _large(target: Target) -> bytes:
    return _upload(target, 20 << 20) + b" " * (18 << 20)


def _with_unknown_key(target: Target) -> bytes:
    headers = ("Authorization: Bearer " + target.keys["unknown"], "Content-Length: 1000000", "Idempotency-Key: k")
    return head("POST /v1/emails", JSON, *headers) + b" " * 300_000


def _stalled_pipeline(target: Target) -> bytes:
    return get("/healthz") * 10 + _upload(target, 500) + HALF


_WAITS: Final = frozenset({"waits", "end", "408 request-timeout"})
_LATE: Final = _WAITS | {"503 overloaded"}

CASES: Final = (
    Case("stall", "a thousand silent connections", partial(_stall, lambda _: b"", 1000), _WAITS, clients=1),
    Case("stall", "a thousand half request lines", partial(_stall, lambda _: b"GET /heal", 1000), _WAITS, clients=1),
    Case("stall", "five hundred heads of 31 KB without end", partial(_stall, _whole_head, 500), _WAITS, clients=1),
    Case(
        "stall",
        "a thousand uploads that stop after the head",
        partial(_stall, lambda target: _upload(target, 500), 1000),
        _LATE,
        clients=1,
    ),
    Case(
        "stall",
        "a thousand uploads that stop in the body",
        partial(_stall, lambda target: _upload(target, 500) + HALF, 1000),
        _LATE,
        clients=1,
    ),
    Case("stall", "eight uploads of 20 MB that stop", partial(_stall, _large, 8), _LATE, clients=1),
    Case(
        "stall",
        "pipelined requests before a body that stops",
        partial(_stall, _stalled_pipeline, 200),
        frozenset({"200"}),
        clients=1,
    ),
    Case(
        "stall",
        "uploads with an unknown key",
        partial(_stall, _with_unknown_key, 300),
        frozenset({"401 unauthorized"}),
        clients=1,
    ),
    Case("stall", "a head byte by byte", partial(_drip, lambda _: get("/healthz"), 200), _WAITS, clients=1),
    Case(
        "stall",
        "a body byte by byte",
        partial(_drip, lambda target: _upload(target, 500), 200),
        _WAITS,
        clients=1,
        seconds=3,
    ),
    Case("unread", "the docs page", partial(_unread, "/docs", None, 1, 400), _WAITS, clients=1),
    Case(
        "unread",
        "sixteen pipelined OpenAPI documents",
        partial(_unread, "/openapi.json", None, 16, 100),
        _WAITS,
        clients=1,
    ),
    Case("unread", "lists of emails", partial(_unread, "/v1/emails?limit=200", "read", 8, 50), _WAITS, clients=1),
    Case("many", "a thousand pipelined requests", partial(_flood, 1000), frozenset({"cut off"})),
    Case(
        "many",
        "connections that are reset at once",
        lambda target: _reset(b"", b"GET /", get("/docs"), target=target),
        frozenset({"gone"}),
    ),
    Case(
        "many",
        "uploads whose client resets the connection",
        lambda target: _reset(*[_upload(target, 500) + HALF] * 4, target=target),
        frozenset({"gone"}),
    ),
    Case("many", "a client that stops sending", _half_closed, frozenset({"end", "408 request-timeout", "reset"})),
    Case("many", "an announced body of 100 MB", partial(_expecting, 100 << 20), frozenset({"413 body-too-large"})),
)
