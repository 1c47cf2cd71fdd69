"""The requests of the API, the parsing of their responses, and the retry schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlencode
from uuid import UUID

import orjson

from dispatcher.client.results import (
    ApiProblem,
    EmailPage,
    EmailStatus,
    EventPage,
    Receipt,
    Refused,
    parse_events,
    parse_page,
    parse_receipt,
    parse_results,
    parse_status,
)
from dispatcher.domain.backoff import Backoff
from dispatcher.domain.email import Email
from dispatcher.domain.email_rules import instant
from dispatcher.domain.sms import Sms
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError

T = TypeVar("T")

MAX_WAIT_SECONDS: Final = 10.0
_JSON: Final = ("Content-Type", "application/json")


class ApiResponse(NamedTuple):
    """An HTTP response. `header` returns a header's value; None if the response has no such header."""

    status: int
    body: bytes
    header: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request and the parser of its response. It is safe to send the request more than once."""

    parse: Callable[[ApiResponse], T]
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


def send(email: Email | Sms) -> ApiCall[Receipt]:
    """The request that enqueues an email or an SMS.

    If the email's tenant is `default`, the request names no tenant, and the API uses the key's tenant.
    """
    document = _document(email)
    headers = [_JSON]
    path = "/v1/sms" if isinstance(email, Sms) else "/v1/emails"
    # Prefer the header: proxies can log it, which helps to trace a request. A header can contain only ASCII, so any
    # other key stays in the body.
    if email.message_key.isascii():
        del document["message_key"]
        escaped = email.message_key.replace("\\", "\\\\").replace('"', '\\"')
        headers.append(("Idempotency-Key", f'"{escaped}"'))
    return ApiCall(_parse_receipt, "POST", path, tuple(headers), orjson.dumps(document))


def send_many(emails: Iterable[Email | Sms]) -> ApiCall[list[Receipt | Refused]]:
    """The request that enqueues up to 1,000 emails."""
    body = orjson.dumps({"emails": [_document(email) for email in emails]})
    return ApiCall(
        lambda response: parse_results(orjson.loads(response.body)), "POST", "/v1/emails/batch", (_JSON,), body
    )


def get(email_id: UUID) -> ApiCall[EmailStatus]:
    """The request for an email's status."""
    return ApiCall(_parse_status, "GET", f"/v1/emails/{email_id}")


def get_by_key(message_key: str) -> ApiCall[EmailStatus]:
    """The request for an email's status by its message key."""
    return ApiCall(_parse_status, "GET", f"/v1/emails/by-key/{quote(message_key, safe='')}")


class Filters(TypedDict, total=False):
    """The filters of `Client.find`; see the operation `list_emails` in docs/api.md.

    Attributes:
        recipient: An address in to, cc or bcc.
        domain: The domain of a recipient.
        sender: An address, or a domain such as `@example.com`.
        created_from: The earliest time at which the emails were created, with a time zone.
        created_before: The emails were created before this time, with a time zone.
        cursor: The `next` of the previous page.
        limit: The most emails per page, from 1 to 200.
    """

    recipient: str
    domain: str
    sender: str
    tag: str
    status: Status
    error_type: str
    provider: str
    correlation_id: str
    created_from: datetime
    created_before: datetime
    cursor: UUID
    limit: int


def find(filters: Filters) -> ApiCall[EmailPage]:
    """The request for a page of emails."""
    given = {
        "from" if name == "sender" else name: value.isoformat() if isinstance(value, datetime) else str(value)
        for name, value in filters.items()
    }
    path = "/v1/emails" + (f"?{urlencode(given)}" if given else "")
    return ApiCall(lambda response: parse_page(orjson.loads(response.body)), "GET", path)


def cancel(email_id: UUID, reason: str) -> ApiCall[Status]:
    """The request that cancels an email."""
    return _change(email_id, "cancel", {"reason": reason})


def reschedule(email_id: UUID, send_at: datetime, reason: str) -> ApiCall[Status]:
    """The request that changes the send time of an email.

    Raises:
        InvalidEmail: `send_at` has no time zone, or is too far ahead.
    """
    return _change(email_id, "reschedule", {"send_at": instant("send_at", send_at), "reason": reason})


def _change(email_id: UUID, verb: str, document: dict[str, object]) -> ApiCall[Status]:
    path = f"/v1/emails/{email_id}/{verb}"
    return ApiCall(_parse_changed, "POST", path, (_JSON,), orjson.dumps(document))


def events(after: str | None, limit: int) -> ApiCall[EventPage]:
    """The request for the events after a cursor."""
    query = f"?limit={limit}" + ("" if after is None else f"&after={quote(after, safe='')}")
    return ApiCall(lambda response: parse_events(orjson.loads(response.body)), "GET", f"/v1/events{query}")


def _document(email: Email | Sms) -> dict[str, object]:
    document = email.to_json()
    if email.tenant_id == "default":
        del document["tenant_id"]
    return document


def _parse_receipt(response: ApiResponse) -> Receipt:
    return parse_receipt(orjson.loads(response.body), is_known=response.header("Idempotent-Replayed") == "true")


def _parse_status(response: ApiResponse) -> EmailStatus:
    return parse_status(orjson.loads(response.body))


def _parse_changed(response: ApiResponse) -> Status:
    return Status(orjson.loads(response.body)["status"])


def parse_problem(response: ApiResponse) -> ApiProblem:
    """Parses an error response. If the response is not a problem document, the code is `unknown`."""
    try:
        document: Any = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        document = None
    retry_after = response.header("Retry-After")
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ApiProblem(response.status, document if isinstance(document, dict) else {}, seconds)


def base_url(url: str) -> str:
    """The API's base URL without trailing slashes.

    Raises:
        DispatcherError: the URL has no scheme or host. The error does not repeat the URL: it may contain a password.
    """
    remedy = "Give the full URL, such as https://mail.example.com or http://127.0.0.1:8025."
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        raise DispatcherError("The HTTP API's URL has no scheme.", remedy=remedy)
    if scheme.lower() not in ("http", "https") or rest[:1] in ("", "/"):
        raise DispatcherError("The HTTP API's URL has no host, or its scheme is not http or https.", remedy=remedy)
    return url.strip().rstrip("/")


class RetrySchedule:
    """The waits between the attempts of one call.

    Each wait is random, up to a bound that grows to 5 seconds. If the API sent a Retry-After header, the wait is longer
    by the header's seconds.

    Args:
        seconds: The time limit of all attempts together, from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)

    def next_wait(self, retry_after: float | None = None) -> float | None:
        """Returns the seconds to wait before the next attempt.

        Returns None if the caller must give up, because the wait would be too long, or end after the time limit.

        Args:
            retry_after: The seconds in the response's Retry-After header.
        """
        seconds = self._backoff.next_wait(random.random)
        if retry_after is not None:
            seconds += retry_after
        return seconds if seconds <= MAX_WAIT_SECONDS and time.monotonic() + seconds < self._until else None
