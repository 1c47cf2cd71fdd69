"""Callers with valid keys and valid requests that use more than their share of the API, and callers that guess keys."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import orjson

from tests.abuse.bodies import BUSY, FILE, MIB, PARSING_MS, email
from tests.abuse.case import Attack, Case, Target
from tests.abuse.raw_connection import exchange, get, post
from tests.api.running_api import EMAIL

CONFLICTS: Final = ("422 idempotency-key-reused", "409 idempotency-key-in-use")
CONTENT: Final = "QUJD" * (20 * MIB // 3)


async def _send(body: bytes, target: Target) -> list[str]:
    return [await exchange(target.port, [post("/v1/emails", body, *target.named())])]


async def _batch(target: Target) -> list[str]:
    body = orjson.dumps({"emails": [EMAIL | {"message_key": target.message_key()} for _ in range(1000)]})
    return [await exchange(target.port, [post("/v1/emails/batch", body, *target.named()[:1])])]


async def _conflict(target: Target) -> list[str]:
    number = next(target.numbers)
    named = (target.named()[0], f"Idempotency-Key: conflict-{target.name}-{number // 32}")
    return [await exchange(target.port, [post("/v1/emails", email(subject=f"Number {number}"), *named)])]


async def _list(target: Target) -> list[str]:
    return [await exchange(target.port, [get("/v1/emails?limit=200", *target.named("read"))])]


async def _guess_by_time(target: Target) -> list[str]:
    """Compares the response times for an existing and an unknown key id. The times must not reveal which id exists."""
    seconds: dict[str, list[float]] = {"wrong": [], "unknown": []}
    for kind in ("wrong", "unknown") * 4:
        began_at = time.perf_counter()
        await exchange(target.port, [get("/v1/emails", *target.named(kind))])
        seconds[kind].append(time.perf_counter() - began_at)
    fast, slow = sorted(statistics.median(each) for each in seconds.values())
    return ["the time reveals the id" if slow > 5 * fast else "the time reveals nothing"]


def _case(name: str, attack: Attack, clients: int, *allowed: str, **more: float) -> Case:
    return Case("heavy use", name, attack, frozenset(allowed) | BUSY, clients, 4.0, **more)


def _sending(**fields: Any) -> Attack:
    async def attack(target: Target) -> list[str]:
        return await _send(email(**fields), target)

    return attack


CASES: Final = (
    _case("200 connections that send emails", _sending(), 200, "202"),
    _case("batches of 1,000", _batch, 64, "200"),
    _case("the same key with other content", _conflict, 64, "202", *CONFLICTS),
    _case(
        "attachments of 20 MB", _sending(attachments=[FILE | {"content": CONTENT}]), 8, "202", max_health_ms=PARSING_MS
    ),
    _case("lists of emails", _list, 64, "200"),
    _case("keys guessed by the response time", _guess_by_time, 1, "the time reveals nothing"),
)
