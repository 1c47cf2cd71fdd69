"""Clients that stop half-way, that never listen, or that are many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from tests.abuse.case import Case, Prey
from tests.abuse.wire import JSON, Wire, exchange, get, head

HALF: Final = b'{"from":'


def _upload(prey: Prey, length: int, *headers: str) -> bytes:
    """The head of an upload, with a good key."""
    named = (prey.authorization(), f"Idempotency-Key: {prey.message_key()}", *headers)
    return head("POST /v1/emails", JSON, f"Content-Length: {length}", *named)


async def _stand(sent: Callable[[Prey], bytes], connections: int, prey: Prey) -> list[str]:
    """So many connections that send this, and nothing more until the attack ends; what each had got by then."""
    async with AsyncExitStack() as opened:
        wires = [await opened.enter_async_context(await Wire.open(prey.port)) for _ in range(connections)]
        for wire in wires:
            await wire.send(sent(prey))
        hearing = [asyncio.create_task(wire.answer()) for wire in wires]
        await asyncio.wait(hearing, timeout=prey.seconds)
        got = [task.result() if task.done() else "waits" for task in hearing]
        for task in hearing:
            task.cancel()
        return got


async def _drip(octets: Callable[[Prey], bytes], connections: int, prey: Prey) -> list[str]:
    """An octet now and then, on so many connections."""
    async with AsyncExitStack() as opened:
        wires = [await opened.enter_async_context(await Wire.open(prey.port)) for _ in range(connections)]
        texts = [octets(prey) for _ in wires]
        loop = asyncio.get_running_loop()
        until, position = loop.time() + prey.seconds, 0
        while loop.time() < until:
            for wire, text in zip(wires, texts, strict=True):
                await wire.send(text[position : position + 1] or b" ")
            position += 1
            await asyncio.sleep(0.05)
        return ["waits"] * connections


async def _unread(path: str, kind: str | None, ahead: int, connections: int, prey: Prey) -> list[str]:
    """Asks for large answers, and reads none."""
    request = get(path, *([prey.authorization(kind)] if kind else []))
    async with AsyncExitStack() as opened:
        for _ in range(connections):
            wire = await opened.enter_async_context(await Wire.open(prey.port, receive_bytes=4096))
            await wire.send(request * ahead)
        await asyncio.sleep(prey.seconds)
    return ["waits"] * connections


async def _flood(count: int, prey: Prey) -> list[str]:
    """Many requests ahead of their answers; cut off, or answered in order."""
    async with await Wire.open(prey.port) as wire:
        await wire.send(get("/healthz") * count)
        told = await wire.answers()
    return ["cut off" if told.count("200") < count else told]


async def _go(*sent: bytes, prey: Prey) -> list[str]:
    """Connects, sends a part, and goes without a goodbye."""
    for octets in sent:
        wire = await Wire.open(prey.port)
        await wire.send(octets)
        wire.reset()
    return ["gone"] * len(sent)


async def _half_closed(prey: Prey) -> list[str]:
    async with await Wire.open(prey.port) as wire:
        await wire.send(_upload(prey, 500) + HALF)
        wire.end_sending()
        return [await wire.answer()]


async def _expecting(length: int, prey: Prey) -> list[str]:
    return [await exchange(prey.port, [_upload(prey, length, "Expect: 100-continue")])]


def _whole_head(prey: Prey) -> bytes:
    return b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"x" * 31_000


def _large(prey: Prey) -> bytes:
    return _upload(prey, 20 << 20) + b" " * (18 << 20)


def _with_unknown_key(prey: Prey) -> bytes:
    headers = ("Authorization: Bearer " + prey.keys["unknown"], "Content-Length: 1000000", "Idempotency-Key: k")
    return head("POST /v1/emails", JSON, *headers) + b" " * 300_000


def _stalled_pipeline(prey: Prey) -> bytes:
    return get("/healthz") * 10 + _upload(prey, 500) + HALF


_WAITS: Final = frozenset({"waits", "end", "408 request-timeout"})
_LATE: Final = _WAITS | {"503 overloaded"}

CASES: Final = (
    Case("stall", "a thousand silent connections", partial(_stand, lambda _: b"", 1000), _WAITS, clients=1),
    Case("stall", "a thousand half request lines", partial(_stand, lambda _: b"GET /heal", 1000), _WAITS, clients=1),
    Case("stall", "five hundred heads of 31 KB without end", partial(_stand, _whole_head, 500), _WAITS, clients=1),
    Case(
        "stall",
        "a thousand uploads that stop after the head",
        partial(_stand, lambda prey: _upload(prey, 500), 1000),
        _LATE,
        clients=1,
    ),
    Case(
        "stall",
        "a thousand uploads that stop in the body",
        partial(_stand, lambda prey: _upload(prey, 500) + HALF, 1000),
        _LATE,
        clients=1,
    ),
    Case("stall", "eight uploads of 20 MB that stop", partial(_stand, _large, 8), _LATE, clients=1),
    Case(
        "stall",
        "requests ahead of a body that stops",
        partial(_stand, _stalled_pipeline, 200),
        frozenset({"200"}),
        clients=1,
    ),
    Case(
        "stall",
        "uploads with an unknown key",
        partial(_stand, _with_unknown_key, 300),
        frozenset({"401 unauthorized"}),
        clients=1,
    ),
    Case("stall", "a head octet by octet", partial(_drip, lambda _: get("/healthz"), 200), _WAITS, clients=1),
    Case(
        "stall",
        "a body octet by octet",
        partial(_drip, lambda prey: _upload(prey, 500), 200),
        _WAITS,
        clients=1,
        seconds=3,
    ),
    Case("unread", "a page for people", partial(_unread, "/docs", None, 1, 400), _WAITS, clients=1),
    Case("unread", "sixteen descriptions ahead", partial(_unread, "/openapi.json", None, 16, 100), _WAITS, clients=1),
    Case("unread", "lists of emails", partial(_unread, "/v1/emails?limit=200", "read", 8, 50), _WAITS, clients=1),
    Case("many", "a thousand requests ahead", partial(_flood, 1000), frozenset({"cut off"})),
    Case(
        "many",
        "connections that go at once",
        lambda prey: _go(b"", b"GET /", get("/docs"), prey=prey),
        frozenset({"gone"}),
    ),
    Case(
        "many",
        "uploads whose client goes",
        lambda prey: _go(*[_upload(prey, 500) + HALF] * 4, prey=prey),
        frozenset({"gone"}),
    ),
    Case("many", "a client that stops sending", _half_closed, frozenset({"end", "408 request-timeout", "reset"})),
    Case("many", "an announced body of 100 MB", partial(_expecting, 100 << 20), frozenset({"413 body-too-large"})),
)
