"""The asynchronous client: the same, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import orjson
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.response import Response

from dispatcher.client import requests
from dispatcher.client.answers import (
    EmailStatus,
    NoAnswer,
    Receipt,
    Refused,
    receipt_of,
    results_of,
    status_of,
)
from dispatcher.domain.email import Email


class AsyncClient:
    """Keeps connections; use it within `async with`, or close it. Several tasks may share it."""

    def __init__(self, url: str, *, key: str | None = None, seconds: float = requests.SECONDS) -> None:
        """
        Args:
            url: Where the API is, such as `https://mail.example.com`.
            key: The API key; None where the API needs none (DISPATCHER_API_OPEN).
            seconds: How long a call goes on, repetitions included.

        Raises:
            DispatcherError: the URL has no scheme or no host.
        """
        self._url = requests.base_of(url)
        self._key = key
        self._seconds = seconds
        one_try = timedelta(seconds=min(seconds, requests.ONE_TRY_SECONDS))
        self._client: Client = ClientBuilder().timeout(one_try).follow_redirects(enable=False).build()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.close()

    async def send(self, email: Email) -> Receipt:
        """Has an email accepted, once.

        Raises:
            ApiProblem: the API refuses it.
            NoAnswer: nobody answered; the same email again is harmless.
        """
        response, document = await self._ask(requests.send_request(email))
        return receipt_of(document, replayed=response.get_header("Idempotent-Replayed") == "true")

    async def send_many(self, emails: Iterable[Email]) -> list[Receipt | Refused]:
        """Has up to a thousand emails accepted, each once; what became of each, in their order.

        Raises:
            ApiProblem: the API refuses the whole.
            NoAnswer: nobody answered; the same emails again are harmless.
        """
        return results_of((await self._ask(requests.batch_request(emails)))[1])

    async def get(self, email_id: UUID) -> EmailStatus:
        """What became of an email.

        Raises:
            ApiProblem: with the code `not-found` if there is none.
        """
        return status_of((await self._ask(requests.get_request(email_id)))[1])

    async def get_by_key(self, message_key: str) -> EmailStatus:
        """The same by its key."""
        return status_of((await self._ask(requests.get_by_key_request(message_key)))[1])

    async def _ask(self, request: requests.Request) -> tuple[Response, Any]:
        repetition = requests.Repetition(asyncio.get_running_loop().time(), self._seconds)
        while True:
            try:
                response = await self._try(request)
                body = bytes(await response.bytes())
            except PyreqwestError as error:
                wait = repetition.wait(asyncio.get_running_loop().time())
                if wait is None:
                    raise NoAnswer("The HTTP API does not answer.") from error
            else:
                if response.status in (200, 202):
                    return response, orjson.loads(body)
                problem = requests.problem_of(response.status, body, response.get_header("Retry-After"))
                is_final = problem.status not in requests.REPEATED
                wait = None if is_final else repetition.wait(asyncio.get_running_loop().time(), problem.retry_after)
                if wait is None:
                    raise problem
            await asyncio.sleep(wait)

    async def _try(self, request: requests.Request) -> Response:
        builder = self._client.request(request.method, self._url + request.path)
        if self._key is not None:
            builder = builder.bearer_auth(self._key)
        for name, value in request.headers:
            builder = builder.header(name, value)
        if request.body is not None:
            builder = builder.body_bytes(request.body)
        return await builder.build().send()
