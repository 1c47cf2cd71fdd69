"""What both clients have in common: requests as values, when to repeat one, and what an answer means."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID

import orjson

from dispatcher.client.answers import ApiProblem
from dispatcher.domain.backoff import Backoff
from dispatcher.domain.email import Email
from dispatcher.errors import DispatcherError

SECONDS: Final = 60.0
"""How long a call goes on, repetitions included."""
ONE_TRY_SECONDS: Final = 15.0
REPEATED: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
LONGEST_WAIT_SECONDS: Final = 10.0


def base_of(url: str) -> str:
    """The API's URL, without a slash at its end.

    Raises:
        DispatcherError: no request can go to this URL. The error does not repeat it, since it may contain a password.
    """
    remedy = "Write it in full, such as https://mail.example.com or http://127.0.0.1:8025."
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        raise DispatcherError("The HTTP API's URL has no scheme.", remedy=remedy)
    if scheme.lower() not in ("http", "https") or rest[:1] in ("", "/"):
        raise DispatcherError("The HTTP API's URL has no host, or its scheme is not http or https.", remedy=remedy)
    return url.strip().rstrip("/")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, which may be repeated as it is."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


def send_request(email: Email) -> Request:
    """The request that enqueues an email. The tenant is the key's, unless the email names another than `default`."""
    document = _document(email)
    headers = [("Content-Type", "application/json")]
    if email.message_key.isascii():  # in a header, proxies and logs can show it
        del document["message_key"]
        escaped = email.message_key.replace("\\", "\\\\").replace('"', '\\"')
        headers.append(("Idempotency-Key", f'"{escaped}"'))
    return Request("POST", "/v1/emails", tuple(headers), orjson.dumps(document))


def batch_request(emails: Iterable[Email]) -> Request:
    """The request that enqueues up to a thousand."""
    body = orjson.dumps({"emails": [_document(email) for email in emails]})
    return Request("POST", "/v1/emails/batch", (("Content-Type", "application/json"),), body)


def get_request(email_id: UUID) -> Request:
    """The request for what became of an email."""
    return Request("GET", f"/v1/emails/{email_id}")


def get_by_key_request(message_key: str) -> Request:
    """The same by its key."""
    return Request("GET", f"/v1/emails/by-key/{quote(message_key, safe='')}")


def _document(email: Email) -> dict[str, object]:
    document = email.to_json()
    if email.tenant_id == "default":
        del document["tenant_id"]
    return document


def problem_of(status: int, body: bytes, retry_after: str | None) -> ApiProblem:
    """The problem that an answer is."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ApiProblem(status, document if isinstance(document, dict) else {}, seconds)


class Repetition:
    """When to try again: what the API says, else growing waits."""

    def __init__(self, now: float, seconds: float) -> None:
        self._until = now + seconds
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)

    def wait(self, now: float, retry_after: float | None = None) -> float | None:
        """Seconds to wait before the next try; None to give up."""
        seconds = self._backoff.next_wait(random.random)
        if retry_after is not None:
            seconds += retry_after
        return seconds if seconds <= LONGEST_WAIT_SECONDS and now + seconds < self._until else None
