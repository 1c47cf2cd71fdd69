"""Callers without an API key, with a key of another tenant, or with a key that lacks the scope, sender, rate or
quota."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Final

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import JSON, exchange, get, head, post

EMAIL: Final = b'{"from":"shop@example.com","to":"ann@example.org","subject":"a","text":"b"}'
UNKNOWN: Final = frozenset({"401 unauthorized"})


async def _asked(path: str, headers: tuple[str, ...], target: Target) -> list[str]:
    named = [header.format(**target.keys) for header in headers]
    return [await exchange(target.port, [get(path.format(**target.keys, foreign=target.foreign), *named)])]


async def _sent(headers: tuple[str, ...], body: bytes, target: Target) -> list[str]:
    named = [f"Idempotency-Key: {target.message_key()}", *(header.format(**target.keys) for header in headers)]
    return [await exchange(target.port, [post("/v1/emails", body, *named)])]


async def _guess_by_time(target: Target) -> list[str]:
    """Compares the response times for an existing and an unknown key id. The times must not reveal which id exists."""
    known, unknown = target.keys["wrong"], target.keys["unknown"]
    seconds: dict[str, list[float]] = {known: [], unknown: []}
    for key in (known, unknown) * 4:
        began_at = time.perf_counter()
        await exchange(target.port, [get("/v1/emails", f"Authorization: Bearer {key}")])
        seconds[key].append(time.perf_counter() - began_at)
    slow, fast = sorted((statistics.median(each) for each in seconds.values()), reverse=True)
    return ["the time reveals the id" if slow > 5 * fast else "the time reveals nothing"]


async def _body_behind(size: int, target: Target) -> list[str]:
    """Sends a body without an API key, so the API does not read the body. The response must still arrive."""
    start = head("POST /v1/emails", JSON, f"Content-Length: {size}", "Idempotency-Key: k")
    return [await exchange(target.port, [start, *[b" " * 65536] * (size // 65536)])]


async def _too_large_behind(target: Target) -> list[str]:
    size = 60 << 20
    start = head("POST /v1/emails", JSON, target.authorization(), f"Content-Length: {size}", "Idempotency-Key: k")
    return [await exchange(target.port, [start, *[b" " * 65536] * (size // 65536)])]


async def _wrong_type_behind(target: Target) -> list[str]:
    size = 8 << 20
    named = (target.authorization(), "Idempotency-Key: k", f"Content-Length: {size}")
    start = head("POST /v1/emails", "Content-Type: text/plain", *named)
    return [await exchange(target.port, [start, *[b" " * 65536] * (size // 65536)])]


def _ask(name: str, path: str, *headers: str, allowed: frozenset[str] = UNKNOWN) -> Case:
    return Case("key", name, partial(_asked, path, headers), allowed)


BEARER: Final = "Authorization: Bearer "
CASES: Final = (
    _ask("none", "/v1/emails"),
    _ask("an empty one", "/v1/emails", BEARER),
    _ask("a long one", "/v1/emails", BEARER + "ed_" + "x" * 20_000),
    _ask("one beyond ASCII", "/v1/emails", BEARER + "ed_\xe9\xff"),
    _ask("an unknown one", "/v1/emails", BEARER + "{unknown}"),
    _ask("a wrong secret", "/v1/emails", BEARER + "{wrong}"),
    _ask("a revoked one", "/v1/emails", BEARER + "{revoked}"),
    _ask("two at once", "/v1/emails", BEARER + "{read}", BEARER + "{read}"),
    _ask("in the address", "/v1/emails?access_token={read}&key={read}"),
    _ask("as a password", "/v1/emails", "Authorization: Basic {read}"),
    _ask("in a cookie", "/v1/emails", "Cookie: Authorization=Bearer {read}"),
    _ask("that may not read", "/v1/emails", BEARER + "{send}", allowed=frozenset({"403 insufficient-scope"})),
    _ask("of another tenant", "/v1/emails/{foreign}", BEARER + "{read}", allowed=frozenset({"404 not-found"})),
    _ask(
        "that names another tenant",
        "/v1/emails?tenant_id=bystander",
        BEARER + "{read}",
        allowed=frozenset({"403 tenant-forbidden"}),
    ),
    _ask(
        "behind forged headers of a proxy",
        "/v1/emails",
        "X-Forwarded-For: 127.0.0.1",
        "Forwarded: for=127.0.0.1",
        "X-Original-URL: /healthz",
    ),
    Case(
        "key",
        "revealed by the response time",
        _guess_by_time,
        frozenset({"the time reveals nothing"}),
        clients=1,
        seconds=4,
    ),
    Case(
        "key",
        "that may not send from the address",
        partial(_sent, (BEARER + "{bound}",), EMAIL),
        frozenset({"403 sender-forbidden"}),
    ),
    Case(
        "key",
        "with two idempotency keys",
        partial(_sent, (BEARER + "{send}", "Idempotency-Key: b"), EMAIL),
        frozenset({"400 idempotency-key-invalid"}),
    ),
    Case(
        "key",
        "far too often",
        partial(_sent, (BEARER + "{slow}",), EMAIL),
        frozenset({"202", "429 rate-limited"}),
        clients=16,
    ),
    Case(
        "key",
        "beyond its quota",
        partial(_sent, (BEARER + "{poor}",), EMAIL),
        frozenset({"202", "429 quota-exceeded"}),
        clients=16,
    ),
    Case(
        "key",
        "with another tenant in the email",
        partial(_sent, (BEARER + "{send}",), EMAIL[:-1] + b',"tenant_id":"bystander"}'),
        frozenset({"403 tenant-forbidden"}),
    ),
    Case("unread body", "without a key", partial(_body_behind, 8 << 20), UNKNOWN),
    Case("unread body", "too large", _too_large_behind, frozenset({"413 body-too-large"})),
    Case("unread body", "of another type", _wrong_type_behind, frozenset({"415 unsupported-media-type"})),
)
