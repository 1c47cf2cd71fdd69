"""The requests of the API, how their responses are read, and the retry schedule.

The docstrings of the functions describe the methods of the clients; see `clients.Method`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote, urlencode
from uuid import UUID

import msgspec
import orjson

from dispatcher.actions.action import Action, Paged
from dispatcher.actions.emails import ListEmails
from dispatcher.client.results import ApiProblem, EmailPage, EventPage, Receipt, Refused, WebhookTest
from dispatcher.domain.email import Email
from dispatcher.domain.email_history import EmailStatus
from dispatcher.domain.email_rules import instant
from dispatcher.domain.outcome import Reason
from dispatcher.domain.retry import Backoff
from dispatcher.domain.sms import Sms
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError

T = TypeVar("T")

PAGE_EVENTS: Final = 500
MAX_WAIT_SECONDS: Final = 10.0
NO_REASON: Final = ("reason", "")
_JSON: Final = ("Content-Type", "application/json")


class ApiResponse(NamedTuple):
    """An HTTP response. `header` returns a header's value, or None."""

    status: int
    body: bytes
    header: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request and the parser of its response. It is safe to send the request more than once.

    `next_page` is the request of the page after a cursor, if the result is a page.
    """

    parse: Callable[[ApiResponse], T]
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    next_page: Callable[[str], ApiCall[T]] | None = None


class Filters(TypedDict, total=False):
    """The filters of `Client.find`; see the operation `list_emails` in docs/api.md.

    Attributes:
        recipient: An address in to, cc or bcc.
        sender: An address, or a domain such as `@example.com`.
        metadata: A key and its value, such as `order=4711`.
        created_from: Only emails that were created at this time or later; `created_before`: only before. Both need a
            time zone.
        after: The `next` of the previous page.
        limit: The most emails per page, from 1 to 1,000.
    """

    recipient: str
    domain: str
    sender: str
    tag: str
    metadata: str
    status: Status
    delivery: str
    error_type: Reason
    channel: str
    provider: str
    correlation_id: str
    tenant_id: str
    lane: str
    created_from: datetime
    created_before: datetime
    after: str
    limit: int


def send(email: Email | Sms) -> ApiCall[Receipt]:
    """Enqueues an email. Idempotent by the email's message key.

    If the email's tenant is `default`, the request names no tenant, and the API uses the key's tenant.

    Raises:
        ApiProblem: the API refused the email.
        NoResponse: no response arrived; the email may have been enqueued. Repeating the call is safe.
    """
    document = _document(email)
    headers = [_JSON]
    # Prefer the header: proxies can log it, which helps to trace a request. A header can contain only ASCII, so any
    # other key stays in the body.
    if email.message_key.isascii():
        del document["message_key"]
        escaped = email.message_key.replace("\\", "\\\\").replace('"', '\\"')
        headers.append(("Idempotency-Key", f'"{escaped}"'))

    def parse(response: ApiResponse) -> Receipt:
        receipt = msgspec.json.decode(response.body, type=Receipt)
        return replace(receipt, is_known=response.header("Idempotent-Replayed") == "true")

    path = "/v1/sms" if isinstance(email, Sms) else "/v1/emails"
    return ApiCall(parse, "POST", path, tuple(headers), orjson.dumps(document))


def send_many(emails: Iterable[Email | Sms]) -> ApiCall[list[Receipt | Refused]]:
    """Enqueues up to 1,000 emails, and returns one result per email, in order. Idempotent by message keys.

    Raises:
        ApiProblem: the API refused the whole batch.
        NoResponse: no response arrived; the emails may have been enqueued. Repeating the call is safe.
    """

    def parse(response: ApiResponse) -> list[Receipt | Refused]:
        return [
            Refused(ApiProblem(result["problem"]["status"], result["problem"]))
            if result["outcome"] == "refused"
            else msgspec.convert({**result["email"], "is_known": result["outcome"] == "known"}, Receipt)
            for result in orjson.loads(response.body)["results"]
        ]

    body = orjson.dumps({"emails": [_document(email) for email in emails]})
    return ApiCall(parse, "POST", "/v1/emails/batch", (_JSON,), body)


def get(email_id: UUID) -> ApiCall[EmailStatus]:
    """Returns an email's status.

    Raises:
        ApiProblem: with the code `not-found` if the tenant has no email with this id.
    """
    return ApiCall(reader(EmailStatus), "GET", f"/v1/emails/{email_id}")


def get_by_key(message_key: str) -> ApiCall[EmailStatus]:
    """Returns an email's status by its message key. Raises the same errors as `get`."""
    return ApiCall(reader(EmailStatus), "GET", f"/v1/emails/by-key/{quote(message_key, safe='')}")


def find(**filters: Unpack[Filters]) -> ApiCall[EmailPage]:
    """Returns a page of the tenant's emails that match all filters, newest first. A loop over it continues with the
    pages after it.

    Raises:
        ApiProblem: with the code `invalid-parameter` if a filter is not valid.
    """
    call: Any = call_of(ListEmails(**filters))
    return cast("ApiCall[EmailPage]", call)


def cancel(email_id: UUID, *, reason: str) -> ApiCall[Status]:
    """Cancels an email that is pending or waiting; returns its status, `cancelled`. Idempotent.

    Args:
        reason: A few words for the audit log, without addresses.

    Raises:
        ApiProblem: With the code `too-late` if a worker has leased the email, or if the email is sent, failed or
            held; `email_status` is then the email's status. With the code `not-found` if the tenant has no email
            with this id.
    """
    return _change(f"/v1/emails/{email_id}/cancel", {"reason": reason})


def reschedule(email_id: UUID, send_at: datetime, *, reason: str) -> ApiCall[Status]:
    """Changes the send time of a pending or waiting email; returns the email's new status, `waiting`.

    Args:
        send_at: The earliest time at which the email is sent, with a time zone. If the time has passed, the email
            is due immediately.

    Raises:
        InvalidEmail: `send_at` has no time zone, or is too far ahead.
        ApiProblem: As for `cancel`; also with the code `invalid-body` if the email expires before `send_at`.
    """
    return _change(f"/v1/emails/{email_id}/reschedule", {"send_at": instant("send_at", send_at), "reason": reason})


def confirm(email_id: UUID, *, reason: str) -> ApiCall[Status]:
    """Marks a held email as sent, because it did arrive; returns its status, `sent`. This cannot be undone.

    Raises:
        ApiProblem: With the code `not-held` if the email is not held.
    """
    return _change(f"/v1/held/{email_id}/confirm", {"reason": reason})


def release(email_id: UUID, *, reason: str) -> ApiCall[Status]:
    """Sends a held email again, although it may have arrived; returns its status, `pending`. Raises as `confirm`."""
    return _change(f"/v1/held/{email_id}/release", {"reason": reason})


def webhook_test(webhook_id: int, *, tenant_id: str | None = None) -> ApiCall[WebhookTest]:
    """Posts a test event to a webhook, and returns the answer of its receiver."""
    query = "" if tenant_id is None else f"?tenant_id={quote(tenant_id, safe='')}"
    return ApiCall(reader(WebhookTest), "POST", f"/v1/webhooks/{webhook_id}/test{query}")


def events(after: str | None) -> ApiCall[EventPage]:
    """Returns a page of the tenant's events after a cursor."""

    def parse(response: ApiResponse) -> EventPage:
        page = orjson.loads(response.body)
        return msgspec.convert({**page, "events": [each["data"] | each for each in page["events"]]}, EventPage)

    query = f"?limit={PAGE_EVENTS}" + ("" if after is None else f"&after={quote(after, safe='')}")
    return ApiCall(parse, "GET", f"/v1/events{query}")


def call_of(action: Action[T]) -> ApiCall[T]:
    """The request of an operator action. Unknown fields in the response are ignored."""

    def parse(response: ApiResponse) -> Any:
        if not action.is_list:
            return msgspec.json.decode(response.body, type=action.row)
        whole = orjson.loads(response.body)
        rows = msgspec.convert(whole[action.plural or action.noun()], type=list[action.row])  # type: ignore[name-defined]
        return replace(msgspec.convert({**whole, "rows": []}, type=action.page_type), rows=rows) if action.key else rows

    method, path = action.http_post().split()
    given = {name: value for name, value in action.values().items() if value is not None and (name, value) != NO_REASON}
    next_page: Any = (lambda cursor: call_of(action.but(after=cursor))) if isinstance(action, Paged) else None
    for name in action.path_names():
        path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
    if method == "GET":
        texts = {
            name: str(value) if isinstance(value, str) else orjson.dumps(value).decode().strip('"')
            for name, value in given.items()
        }
        return ApiCall(parse, method, path + (f"?{urlencode(texts)}" if texts else ""), next_page=next_page)
    return ApiCall(parse, method, path, (_JSON,), orjson.dumps(given))


def _change(path: str, document: dict[str, object]) -> ApiCall[Status]:
    return ApiCall(
        lambda response: Status(orjson.loads(response.body)["status"]), "POST", path, (_JSON,), orjson.dumps(document)
    )


def _document(email: Email | Sms) -> dict[str, object]:
    document = email.to_json()
    if email.tenant_id == "default":
        del document["tenant_id"]
    return document


def reader(kind: type[T]) -> Callable[[ApiResponse], T]:
    return lambda response: msgspec.json.decode(response.body, type=kind)


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
    """The API's base URL without trailing slashes. Errors do not repeat the URL: it may contain a password."""
    remedy = "Give the full URL, such as https://mail.example.com or http://127.0.0.1:8025."
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        raise DispatcherError("The HTTP API's URL has no scheme.", remedy=remedy)
    if scheme.lower() not in ("http", "https") or rest[:1] in ("", "/"):
        raise DispatcherError("The HTTP API's URL has no host, or its scheme is not http or https.", remedy=remedy)
    return url.strip().rstrip("/")


class RetrySchedule:
    """The waits between the attempts of one call, which together take at most `seconds` from now on."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)

    def next_wait(self, retry_after: float | None = None) -> float | None:
        """The seconds to wait before the next attempt: random, up to a bound that grows to 5 seconds, and longer by
        those of the header Retry-After. None if the wait would be too long, or end after the time limit."""
        seconds = self._backoff.next_wait(random.random)
        if retry_after is not None:
            seconds += retry_after
        return seconds if seconds <= MAX_WAIT_SECONDS and time.monotonic() + seconds < self._until else None
