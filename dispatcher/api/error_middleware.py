"""The ASGI layer that turns exceptions into problem responses."""

from __future__ import annotations

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dispatcher.admission.problems import MEDIA_TYPE, Problem
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.api.http_protocol import REQUEST_ID
from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.telemetry.log import get_log


class ErrorMiddleware:
    """Sends a problem response (RFC 9457) if the wrapped application raises an exception, and counts the response."""

    def __init__(self, app: ASGIApp, *, refusals: RefusalCounter) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def sending(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            return
        except Exception as error:
            problem = problem_of(error, scope.get(REQUEST_ID, b"").decode())
            if is_started:
                raise
            self._refusals.count(problem.code)
            response = response_of(problem)
            del problem
        else:
            return
        # Send the response after the except block: until the block ends, the traceback keeps the request's body in
        # memory.
        await response(scope, receive, send)


def problem_of(error: Exception, request_id: str) -> Problem:
    """The problem (RFC 9457) that the client gets for an exception. Logs unexpected exceptions."""
    match error:
        case Problem():
            return error
        case StoreBusy():
            return Problem("overloaded", "Another transaction has locked a row that this request needs.", retry_after=1)
        case StoreUnavailable():
            return Problem("database-unavailable", "Retry the request.", retry_after=1)
        case DispatcherError():
            get_log().error("error.unexpected", where="api", error=error.message, request_id=request_id)
        case _:
            get_log().error("error.unexpected", where="api", error=type(error).__name__, request_id=request_id)
    detail = "Retry the request. The cause is in the API's log (error.unexpected)."
    return Problem("internal-error", detail, closes=True)


def response_of(problem: Problem) -> Response:
    headers = dict(problem.headers)
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    if problem.closes:
        headers["Connection"] = "close"
    return Response(orjson.dumps(problem.document()), problem.status, headers, MEDIA_TYPE)
