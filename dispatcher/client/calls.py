"""The API's requests as values, what their answers mean, and when a request is repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import UUID

import orjson

from dispatcher.client.results import (
    ApiProblem,
    EmailStatus,
    Receipt,
    Refused,
    receipt_of,
    results_of,
    status_of,
)
from dispatcher.domain.backoff import Backoff
from dispatcher.domain.email import Email
from dispatcher.errors import DispatcherError

T = TypeVar("T")

LONGEST_WAIT_SECONDS: Final = 10.0
_JSON: Final = ("Content-Type", "application/json")


class ApiAnswer(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    header: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request, which may be repeated as it is, and how its answer is read."""

    read: Callable[[ApiAnswer], T]
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


def send(email: Email) -> ApiCall[Receipt]:
    """Enqueues an email. The tenant is the key's, unless the email names another than `default`."""
    document = _document(email)
    headers = [_JSON]
    if email.message_key.isascii():  # in a header, proxies and logs can show it
        del document["message_key"]
        escaped = email.message_key.replace("\\", "\\\\").replace('"', '\\"')
        headers.append(("Idempotency-Key", f'"{escaped}"'))
    return ApiCall(_read_receipt, "POST", "/v1/emails", tuple(headers), orjson.dumps(document))


def send_many(emails: Iterable[Email]) -> ApiCall[list[Receipt | Refused]]:
    """Enqueues up to a thousand."""
    body = orjson.dumps({"emails": [_document(email) for email in emails]})
    return ApiCall(lambda answer: results_of(orjson.loads(answer.body)), "POST", "/v1/emails/batch", (_JSON,), body)


def get(email_id: UUID) -> ApiCall[EmailStatus]:
    """Asks what became of an email."""
    return ApiCall(_read_status, "GET", f"/v1/emails/{email_id}")


def get_by_key(message_key: str) -> ApiCall[EmailStatus]:
    """The same by its key."""
    return ApiCall(_read_status, "GET", f"/v1/emails/by-key/{quote(message_key, safe='')}")


def _document(email: Email) -> dict[str, object]:
    document = email.to_json()
    if email.tenant_id == "default":
        del document["tenant_id"]
    return document


def _read_receipt(answer: ApiAnswer) -> Receipt:
    return receipt_of(orjson.loads(answer.body), is_known=answer.header("Idempotent-Replayed") == "true")


def _read_status(answer: ApiAnswer) -> EmailStatus:
    return status_of(orjson.loads(answer.body))


def problem_of(answer: ApiAnswer) -> ApiProblem:
    """The problem that an answer is."""
    try:
        document: Any = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        document = None
    retry_after = answer.header("Retry-After")
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ApiProblem(answer.status, document if isinstance(document, dict) else {}, seconds)


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


class Repetition:
    """When to try again: what the API says, else growing waits.

    Args:
        seconds: From now, for all tries together.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)

    def next_wait(self, retry_after: float | None = None) -> float | None:
        """Seconds to wait before the next try; None to give up."""
        seconds = self._backoff.next_wait(random.random)
        if retry_after is not None:
            seconds += retry_after
        return seconds if seconds <= LONGEST_WAIT_SECONDS and time.monotonic() + seconds < self._until else None
