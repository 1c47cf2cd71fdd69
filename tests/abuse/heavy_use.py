"""Callers with valid keys and valid requests that use more than their share of the API."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from tests.abuse.bodies import EMAIL, FILE, MIB
from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import exchange, post

BUSY: Final = frozenset({"503 overloaded"})
CONTENT: Final = "QUJD" * (20 * MIB // 3)


async def _single(target: Target) -> list[str]:
    named = (target.authorization(), f"Idempotency-Key: {target.message_key()}")
    return [await exchange(target.port, [post("/v1/emails", orjson.dumps(EMAIL), *named)])]


async def _batch(target: Target) -> list[str]:
    emails = [EMAIL | {"message_key": target.message_key()} for _ in range(1000)]
    return [
        await exchange(
            target.port, [post("/v1/emails/batch", orjson.dumps({"emails": emails}), target.authorization())]
        )
    ]


async def _crossing_batches(target: Target) -> list[str]:
    """Sends two batches at the same time, with the same new message keys in opposite order."""
    keys = [target.message_key() for _ in range(200)]
    bodies = [orjson.dumps({"emails": [EMAIL | {"message_key": key} for key in order]}) for order in (keys, keys[::-1])]
    requests = [post("/v1/emails/batch", body, target.authorization()) for body in bodies]
    return list(await asyncio.gather(*(exchange(target.port, [request]) for request in requests)))


async def _same_key(target: Target) -> list[str]:
    named = (target.authorization(), f"Idempotency-Key: same-{target.name}-{next(target.numbers) // 32}")
    return [await exchange(target.port, [post("/v1/emails", orjson.dumps(EMAIL), *named)])]


async def _conflict(target: Target) -> list[str]:
    number = next(target.numbers)
    named = (target.authorization(), f"Idempotency-Key: conflict-{target.name}-{number // 32}")
    body = orjson.dumps(EMAIL | {"subject": f"Number {number}"})
    return [await exchange(target.port, [post("/v1/emails", body, *named)])]


async def _attach(target: Target) -> list[str]:
    body = orjson.dumps(EMAIL | {"attachments": [FILE | {"content": CONTENT}]})
    named = (target.authorization(), f"Idempotency-Key: {target.message_key()}")
    return [await exchange(target.port, [post("/v1/emails", body, *named)])]


def _case(name: str, attack: Any, clients: int, *allowed: str) -> Case:
    return Case("heavy use", name, attack, frozenset(allowed) | BUSY, clients=clients, seconds=4.0)


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
