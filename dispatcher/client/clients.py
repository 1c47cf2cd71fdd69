"""Both clients: the calls, their repetition and their answers have one source; only the waiting differs."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from pyreqwest.client import Client as PooledAsyncClient
from pyreqwest.client import ClientBuilder, SyncClient, SyncClientBuilder
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.request import RequestBuilder, SyncRequestBuilder

from dispatcher.client.calls import (
    ApiAnswer,
    ApiCall,
    Repetition,
    base_of,
    get,
    get_by_key,
    problem_of,
    send,
    send_many,
)
from dispatcher.client.results import EmailStatus, NoAnswer, Receipt, Refused
from dispatcher.domain.email import Email

T = TypeVar("T")
Builder = TypeVar("Builder", RequestBuilder, SyncRequestBuilder)

SECONDS: Final = 60.0
"""How long a call takes at most, repetitions included."""
ONE_TRY_SECONDS: Final = 15.0
REPEATED: Final = frozenset({408, 409, 429, 500, 502, 503, 504})


class _BaseClient(ABC):
    """The settings of a client, and how it asks."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        """
        Args:
            url: Where the API is, such as `https://mail.example.com`.
            key: The API key; None where the API needs none (DISPATCHER_API_ALLOW_ANONYMOUS).
            seconds: How long a call takes at most, repetitions included.

        Raises:
            DispatcherError: the URL has no scheme or no host.
        """
        self._url = base_of(url)
        self._key = key
        self._seconds = seconds

    @property
    def _one_try(self) -> timedelta:
        return timedelta(seconds=min(self._seconds, ONE_TRY_SECONDS))

    def _prepared(self, builder: Builder, call: ApiCall[T]) -> Builder:
        if self._key is not None:
            builder = builder.bearer_auth(self._key)
        for name, value in call.headers:
            builder = builder.header(name, value)
        return builder if call.body is None else builder.body_bytes(call.body)

    async def _ask(self, call: ApiCall[T]) -> T:
        """Sends a request until an answer is final.

        Raises:
            ApiProblem: the API refuses it.
            NoAnswer: nobody answered in time.
        """
        repetition = Repetition(self._seconds)
        while True:
            try:
                answer = await self._exchange(call)
            except PyreqwestError as error:
                wait = repetition.next_wait()
                if wait is None:
                    raise NoAnswer("The HTTP API does not answer.") from error
            else:
                if answer.status in (200, 202):
                    return call.read(answer)
                problem = problem_of(answer)
                wait = repetition.next_wait(problem.retry_after) if answer.status in REPEATED else None
                if wait is None:
                    raise problem
            await self._sleep(wait)

    @abstractmethod
    async def _exchange(self, call: ApiCall[T]) -> ApiAnswer: ...

    @abstractmethod
    async def _sleep(self, seconds: float) -> None: ...


class Client(_BaseClient):
    """Keeps connections; use it within `with`, or close it. Several threads may share it."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        super().__init__(url, key=key, seconds=seconds)
        self._client: SyncClient = SyncClientBuilder().timeout(self._one_try).follow_redirects(enable=False).build()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def send(self, email: Email) -> Receipt:
        """Has an email accepted, once.

        Raises:
            ApiProblem: the API refuses it.
            NoAnswer: nobody answered; the same email again is harmless.
        """
        return _result(self._ask(send(email)))

    def send_many(self, emails: Iterable[Email]) -> list[Receipt | Refused]:
        """Has up to a thousand emails accepted, each once; returns what became of each, in their order.

        Raises:
            ApiProblem: the API refuses the whole batch.
            NoAnswer: nobody answered; the same emails again are harmless.
        """
        return _result(self._ask(send_many(emails)))

    def get(self, email_id: UUID) -> EmailStatus:
        """Returns what became of an email.

        Raises:
            ApiProblem: with the code `not-found` if there is none.
        """
        return _result(self._ask(get(email_id)))

    def get_by_key(self, message_key: str) -> EmailStatus:
        """As `get`, by the email's key."""
        return _result(self._ask(get_by_key(message_key)))

    async def _exchange(self, call: ApiCall[T]) -> ApiAnswer:
        response = self._prepared(self._client.request(call.method, self._url + call.path), call).build().send()
        return ApiAnswer(response.status, bytes(response.bytes()), response.get_header)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this


class AsyncClient(_BaseClient):
    """As `Client`, awaited: use it within `async with`, or close it. Several tasks may share it."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = SECONDS) -> None:
        super().__init__(url, key=key, seconds=seconds)
        self._client: PooledAsyncClient = ClientBuilder().timeout(self._one_try).follow_redirects(enable=False).build()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See `Client.close`."""
        await self._client.close()

    async def send(self, email: Email) -> Receipt:
        """See `Client.send`."""
        return await self._ask(send(email))

    async def send_many(self, emails: Iterable[Email]) -> list[Receipt | Refused]:
        """See `Client.send_many`."""
        return await self._ask(send_many(emails))

    async def get(self, email_id: UUID) -> EmailStatus:
        """See `Client.get`."""
        return await self._ask(get(email_id))

    async def get_by_key(self, message_key: str) -> EmailStatus:
        """See `Client.get_by_key`."""
        return await self._ask(get_by_key(message_key))

    async def _exchange(self, call: ApiCall[T]) -> ApiAnswer:
        request = self._prepared(self._client.request(call.method, self._url + call.path), call).build()
        response = await request.send()
        return ApiAnswer(response.status, bytes(await response.bytes()), response.get_header)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine whose awaits all block instead of suspending, as those of `Client` do."""
    try:
        work.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    raise AssertionError("it suspended")
