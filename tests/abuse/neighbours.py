"""Callers with good keys who ask for more than their share, with requests that are valid."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from tests.abuse.bodies import EMAIL, FILE, MIB
from tests.abuse.case import Case, Prey
from tests.abuse.wire import exchange, post

BUSY: Final = frozenset({"503 overloaded"})
CONTENT: Final = "QUJD" * (20 * MIB // 3)


async def _single(prey: Prey) -> list[str]:
    named = (prey.authorization(), f"Idempotency-Key: {prey.message_key()}")
    return [await exchange(prey.port, [post("/v1/emails", orjson.dumps(EMAIL), *named)])]


async def _batch(prey: Prey) -> list[str]:
    emails = [EMAIL | {"message_key": prey.message_key()} for _ in range(1000)]
    return [
        await exchange(prey.port, [post("/v1/emails/batch", orjson.dumps({"emails": emails}), prey.authorization())])
    ]


async def _crossing_batches(prey: Prey) -> list[str]:
    """The same new keys in two orders at once."""
    keys = [prey.message_key() for _ in range(200)]
    bodies = [orjson.dumps({"emails": [EMAIL | {"message_key": key} for key in order]}) for order in (keys, keys[::-1])]
    requests = [post("/v1/emails/batch", body, prey.authorization()) for body in bodies]
    return list(await asyncio.gather(*(exchange(prey.port, [request]) for request in requests)))


async def _same_key(prey: Prey) -> list[str]:
    named = (prey.authorization(), f"Idempotency-Key: same-{prey.name}-{next(prey.numbers) // 32}")
    return [await exchange(prey.port, [post("/v1/emails", orjson.dumps(EMAIL), *named)])]


async def _conflict(prey: Prey) -> list[str]:
    number = next(prey.numbers)
    named = (prey.authorization(), f"Idempotency-Key: conflict-{prey.name}-{number // 32}")
    body = orjson.dumps(EMAIL | {"subject": f"Number {number}"})
    return [await exchange(prey.port, [post("/v1/emails", body, *named)])]


async def _attach(prey: Prey) -> list[str]:
    body = orjson.dumps(EMAIL | {"attachments": [FILE | {"content": CONTENT}]})
    named = (prey.authorization(), f"Idempotency-Key: {prey.message_key()}")
    return [await exchange(prey.port, [post("/v1/emails", body, *named)])]


def _case(name: str, attack: Any, clients: int, *allowed: str) -> Case:
    return Case("neighbour", name, attack, frozenset(allowed) | BUSY, clients=clients, seconds=4.0)


CASES: Final = (
    _case("200 connections that send emails", _single, 200, "202"),
    _case("batches of 1,000", _batch, 64, "200"),
    _case("batches that cross", _crossing_batches, 8, "200"),
    _case("the same key from all", _same_key, 64, "202", "409 idempotency-key-in-use"),
    _case(
        "the same key with other content",
        _conflict,
        64,
        "202",
        "422 idempotency-key-reused",
        "409 idempotency-key-in-use",
    ),
    _case("attachments of 20 MB", _attach, 8, "202"),
)
