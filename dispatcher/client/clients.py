"""The synchronous and the asynchronous client. Only I/O and sleep differ; requests, parsing and retries are shared."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pyreqwest.client import Client as PooledAsyncClient
from pyreqwest.client import ClientBuilder, SyncClient, SyncClientBuilder
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.request import RequestBuilder, SyncRequestBuilder

from dispatcher.actions.action import Action, Page
from dispatcher.client.calls import ApiCall, ApiResponse, RetrySchedule, base_url, call_of, parse_problem
from dispatcher.client.operations import Awaited, Blocking, Operations
from dispatcher.client.results import EventPage, FeedEvent, NoResponse

T = TypeVar("T")
Builder = TypeVar("Builder", RequestBuilder, SyncRequestBuilder)

SECONDS: Final = 60.0
"""The time limit of a call, including retries."""
ATTEMPT_SECONDS: Final = 15.0
RETRIED_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_RETRIED_CODES: Final = frozenset({"idempotency-key-in-use"})
"""Codes of problems after which a request is repeated, although the response's status is not in RETRIED_STATUSES."""


class _BaseClient(Operations, ABC):
    """What `Client` and `AsyncClient` share: the settings, the methods, and the retry loop."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        """
        Args:
            url: The API's base URL, such as `https://mail.example.com`.
            key: The API key; None if the API needs none (DISPATCHER_API_ALLOW_ANONYMOUS).
            seconds: The time limit of a call, including retries.

        Raises:
            DispatcherError: the URL has no scheme or no host.
        """
        self._url = base_url(url)
        self._key = key
        self._seconds = seconds

    @property
    def _attempt_timeout(self) -> timedelta:
        return timedelta(seconds=min(self._seconds, ATTEMPT_SECONDS))

    def _build(self, builder: Builder, call: ApiCall[T]) -> Builder:
        if self._key is not None:
            builder = builder.bearer_auth(self._key)
        for name, value in call.headers:
            builder = builder.header(name, value)
        return builder if call.body is None else builder.body_bytes(call.body)

    def send_call(self, call: ApiCall[T]) -> Any:
        """The result of a request, or with `AsyncClient` an awaitable of it."""
        work = self._request(call)
        return _result(work) if isinstance(self, Blocking) else work

    def _continued(self, result: T, call: ApiCall[T]) -> T:
        """The result. If it is a page, it can read the pages after it."""
        if isinstance(result, Page) and (next_page := call.next_page) is not None:
            result.follow = lambda cursor: self.send_call(next_page(cursor))  # type: ignore[misc]
        return result

    async def _request(self, call: ApiCall[T]) -> T:
        """Sends a request, and repeats it until it succeeds, is refused for good, or the time limit has passed."""
        retries = RetrySchedule(self._seconds)
        while True:
            try:
                response = await self._exchange(call)
            except PyreqwestError as error:
                wait = retries.next_wait()
                if wait is None:
                    remedy = "Check that `dispatcher api` runs at this URL. Repeating the call is safe."
                    raise NoResponse("The HTTP API did not respond.", remedy=remedy) from error
            else:
                if response.status in (200, 201, 202):
                    return self._continued(call.parse(response), call)
                problem = parse_problem(response)
                is_retried = response.status in RETRIED_STATUSES or problem.code in _RETRIED_CODES
                wait = retries.next_wait(problem.retry_after) if is_retried else None
                if wait is None:
                    raise problem
            await self._sleep(wait)

    @abstractmethod
    async def _exchange(self, call: ApiCall[T]) -> ApiResponse: ...

    @abstractmethod
    async def _sleep(self, seconds: float) -> None: ...


class Client(_BaseClient, Blocking):
    """The synchronous client. Keeps connections open: use it in a `with` block, or call `close`. Thread-safe."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        super().__init__(url, key=key, seconds=seconds)
        self._client: SyncClient = (
            SyncClientBuilder().timeout(self._attempt_timeout).follow_redirects(enable=False).build()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def run(self, action: Action[T]) -> T:
        """Carries out an operator action, such as `SetTenant(tenant_id="acme", weight=2, reason="contract")`.

        Raises:
            ApiProblem: The API refused the action.
        """
        return _result(self._request(call_of(action)))

    def events(self, *, after: str | None = None) -> Events:
        """Returns an iterator over the tenant's events, oldest first.

        Args:
            after: The iterator begins after the event with this cursor. If None, the iterator begins with the oldest
                event that is kept.
        """
        return Events(self, after)

    async def _exchange(self, call: ApiCall[T]) -> ApiResponse:
        response = self._build(self._client.request(call.method, self._url + call.path), call).build().send()
        return ApiResponse(response.status, bytes(response.bytes()), response.get_header)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this


class AsyncClient(_BaseClient, Awaited):
    """The asynchronous client. Use it in an `async with` block, or await `close`. Several tasks may share it."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        super().__init__(url, key=key, seconds=seconds)
        self._client: PooledAsyncClient = (
            ClientBuilder().timeout(self._attempt_timeout).follow_redirects(enable=False).build()
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def run(self, action: Action[T]) -> T:
        return await self._request(call_of(action))

    def events(self, *, after: str | None = None) -> AsyncEvents:
        return AsyncEvents(self, after)

    async def _exchange(self, call: ApiCall[T]) -> ApiResponse:
        request = self._build(self._client.request(call.method, self._url + call.path), call).build()
        response = await request.send()
        return ApiResponse(response.status, bytes(await response.bytes()), response.get_header)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of `Client` to its end. The coroutine never suspends, because its I/O and sleep block."""
    try:
        work.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    raise AssertionError("a coroutine of a blocking client must not suspend")


class _Feed:
    """The cursor of an iterator over events.

    Attributes:
        cursor: The caller has handled all events up to this cursor, and the next loop continues after it. To continue
            in another process, pass the cursor to `events(after=cursor)`. If None, the next loop begins with the oldest
            event that is kept.
    """

    def __init__(self, cursor: str | None) -> None:
        self.cursor = cursor

    def _advance(self, page: EventPage) -> Iterator[FeedEvent]:
        """Yields the events of a page. An event counts as handled as soon as the next event is requested."""
        for event in page.events:
            yield event
            self.cursor = event.cursor
        self.cursor = page.next


class Events(_Feed):
    """An iterator over a tenant's events, oldest first.

    A loop ends when no event is left. A later loop over the same object continues after the last event. If the body of
    a loop raises an exception, the current event does not count as handled, and the next loop begins with this event.
    """

    def __init__(self, client: Client, cursor: str | None) -> None:
        super().__init__(cursor)
        self._client = client

    def __iter__(self) -> Iterator[FeedEvent]:
        """Yields the events that were not handled yet.

        Raises:
            ApiProblem: The API refused the request.
            NoResponse: No response arrived.
        """
        has_more = True
        while has_more:
            page = self._client._page(self.cursor)
            yield from self._advance(page)
            has_more = page.has_more


class AsyncEvents(_Feed):
    """See `Events`."""

    def __init__(self, client: AsyncClient, cursor: str | None) -> None:
        super().__init__(cursor)
        self._client = client

    async def __aiter__(self) -> AsyncIterator[FeedEvent]:
        """See `Events.__iter__`."""
        has_more = True
        while has_more:
            page = await self._client._page(self.cursor)
            for event in self._advance(page):
                yield event
            has_more = page.has_more
