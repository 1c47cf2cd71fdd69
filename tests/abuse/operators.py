"""Operators' requests with large bodies, odd values, and at a high rate."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import orjson

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import exchange, get, post

INVALID: Final = frozenset({"422 invalid-body"})
REASON: Final = {"reason": "abuse"}


async def _replay(given: bytes, target: Target) -> list[str]:
    return [await exchange(target.port, [post("/v1/replays", given, target.authorization("operate"))])]


async def _decide(path: str, given: bytes, target: Target) -> list[str]:
    named = path.format(held=target.held[next(target.numbers) % len(target.held)], foreign=target.foreign)
    return [await exchange(target.port, [post(named, given, target.authorization("operate"))])]


@cache
def _large() -> bytes:
    """A body of 39 MB. A constant would delay each process that collects the tests."""
    return b"[" + b"{}," * (13 << 20)


async def _replay_large(target: Target) -> list[str]:
    return await _replay(_large(), target)


async def _decide_large(target: Target) -> list[str]:
    return await _decide("/v1/held/{held}/confirm", _large(), target)


async def _look(path: str, kind: str, target: Target) -> list[str]:
    named = path.format(foreign=target.foreign, foreign_replay=target.foreign_replay)
    return [await exchange(target.port, [get(named, target.authorization(kind))])]


async def _start_replay(target: Target) -> list[str]:
    """Creates a replay at the lowest rate."""
    key = target.authorization("operate")
    slow = orjson.dumps(REASON | {"per_second": 0.01})
    return [await exchange(target.port, [post("/v1/replays", slow, key)])]


def _given(**fields: Any) -> bytes:
    return orjson.dumps(REASON | fields)


REFUSED: Final = {
    "a pace of zero": _given(per_second=0),
    "a pace of one in thirty years": _given(per_second=1e-9),
    "a negative pace": _given(per_second=-1),
    "a pace out of range": b'{"reason":"a","per_second":1e300}',
    "an age below zero": _given(older_than_seconds=-1),
    "an age out of range": _given(newer_than_seconds=1e300),
    "2,000 ids": _given(email_ids=["0199c0de-0000-7000-8000-000000000000"] * 2000),
    "invalid ids": _given(email_ids=["' or true --"]),
    "no reason": b"{}",
    "a reason with an unprintable character": _given(reason="a\u202eb"),
    "a reason of 100 KB": _given(reason="a" * 100_000),
    "an unknown field": _given(sql="drop table email_log"),
    "a list": b"[1]",
}
CASES: Final = (
    *(Case("replay", name, partial(_replay, given), INVALID) for name, given in REFUSED.items()),
    Case("replay", "a body of 39 MB", _replay_large, frozenset({"413 body-too-large"})),
    Case(
        "replay",
        "a body of 250 KB of lists",
        partial(_replay, b"[" * 250_000),
        # The API counts 50 MB of memory for the 250,000 values of each request. Two concurrent requests exceed a key's
        # share of 64 MiB.
        frozenset({"400 malformed-json", "422 invalid-body", "503 overloaded"}),
    ),
    Case(
        "replay",
        "not a number",
        partial(_replay, b'{"reason":"a","per_second":NaN}'),
        frozenset({"400 malformed-json"}),
    ),
    Case(
        "replay",
        "many, at the slowest pace",
        _start_replay,
        frozenset({"202", "503 overloaded", "409 too-many-replays"}),
        clients=16,
    ),
    Case(
        "held",
        "decided by many clients at once",
        partial(_decide, "/v1/held/{held}/confirm", orjson.dumps(REASON)),
        frozenset({"200", "409 not-held", "503 overloaded"}),
        clients=16,
    ),
    Case(
        "held",
        "of another tenant",
        partial(_decide, "/v1/held/{foreign}/release", orjson.dumps(REASON)),
        frozenset({"404 not-found"}),
    ),
    Case(
        "held",
        "with an invalid id",
        partial(_decide, "/v1/held/%27%20or%20true/confirm", orjson.dumps(REASON)),
        frozenset({"404 not-found"}),
    ),
    Case(
        "held",
        "a body of 39 MB",
        _decide_large,
        frozenset({"413 body-too-large"}),
    ),
    Case(
        "look",
        "at another tenant's replay",
        partial(_look, "/v1/replays/{foreign_replay}", "operate"),
        frozenset({"404 not-found"}),
    ),
    Case(
        "look",
        "at a replay of many digits",
        partial(_look, "/v1/replays/" + "9" * 5000, "operate"),
        frozenset({"404 not-found"}),
    ),
    Case(
        "look",
        "with 3,000 parameters",
        partial(_look, "/v1/emails?" + "a=b&" * 3000, "read"),
        frozenset({"400 invalid-parameter"}),
    ),
    Case(
        "look",
        "at a page of a million",
        partial(_look, "/v1/emails?limit=1000000", "read"),
        frozenset({"400 invalid-parameter"}),
    ),
    Case(
        "look",
        "with SQL in a parameter",
        partial(_look, "/v1/emails?provider=%27%3Bdrop", "read"),
        frozenset({"200", "503 overloaded"}),
    ),
    Case(
        "look",
        "at every page",
        partial(_look, "/v1/emails?limit=200&status=held", "read"),
        frozenset({"200", "503 overloaded"}),
        clients=64,
    ),
    Case(
        "look",
        "at a key of 20,000 characters",
        partial(_look, "/v1/emails/by-key/" + "k" * 20_000, "read"),
        frozenset({"404 not-found"}),
    ),
    Case("look", "for an unknown path", partial(_look, "/.env", "read"), frozenset({"404 not-found"})),
)
