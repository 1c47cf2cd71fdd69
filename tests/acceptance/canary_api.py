"""Sends each kind of invalid request, with canaries in the request, to the HTTP API."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import Any, Final

import orjson

from tests.acceptance.canary import CANARIES, RECIPIENT, SUBJECT

NAME: Final = CANARIES["name"]
GOOD: Final[dict[str, Any]] = {"from": RECIPIENT, "to": RECIPIENT, "subject": SUBJECT, "text": CANARIES["text"]}
_PROGRAM: Final = {"filename": f"{CANARIES['file name']}.exe", "content_type": "x/y", "content": CANARIES["file"]}
_BAD: Final[tuple[Any, ...]] = (
    [RECIPIENT],
    {**GOOD, "to": f"{RECIPIENT}@twice"},
    {**GOOD, "subject": f"{SUBJECT}\nBcc: {RECIPIENT}"},
    {**GOOD, "subject": 1},
    {**GOOD, "tenant_id": NAME + "\n"},
    {**GOOD, "on_uncertain": NAME},
    {**GOOD, "headers": {"Bcc": RECIPIENT}},
    {**GOOD, "headers": {"X-Case": f"{CANARIES['header']}\r\n{NAME}"}},
    {**GOOD, "attachments": [_PROGRAM]},
)
BAD_BODIES: Final = (orjson.dumps(GOOD)[:-1], *map(orjson.dumps, _BAD))
_PATHS: Final = (
    f"/v1/emails/{NAME}",
    f"/v1/emails/by-key/{NAME}",
    "/v1/emails/by-key/one",
    f"/v1/emails?limit={NAME}",
    "/v1/emails",
    f"/{NAME}",
    "/openapi.json",
    "/healthz",
)


def request(listener: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Sends a request; returns the status, and all bytes of the response."""
    connection = HTTPConnection(listener, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, {"Content-Type": "application/json", **named})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, f"{answer.status} {answer.headers}\n".encode() + body


def ask_everything(listener: str) -> bytes:
    """Sends all invalid requests; returns all responses."""
    good, other = orjson.dumps(GOOD), orjson.dumps({**GOOD, "subject": NAME})
    batch = orjson.dumps({"emails": [*_BAD]})
    answers = [
        *(request(listener, "POST", "/v1/emails", body, Idempotency_Key="bad") for body in BAD_BODIES),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="one"),
        request(listener, "POST", "/v1/emails", other, Idempotency_Key="one"),
        request(listener, "POST", "/v1/emails/batch", batch),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Authorization=CANARIES["caller's key"]),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Content_Type=f"text/{NAME}"),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Host=f"{NAME}.example.com"),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key=f"é {NAME}"),
        request(listener, "POST", "/v1/emails", good),
        request(listener, "DELETE", f"/v1/emails/by-key/{NAME}"),
        *(request(listener, "GET", path) for path in _PATHS),
    ]
    assert {status for status, _ in answers} >= {200, 202, 400, 403, 404, 405, 415, 422}, {
        status for status, _ in answers
    }
    return b"\n".join(words for _, words in answers)
