"""The outermost layer: answers a fault with a problem."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dispatcher.api.problems import Problem
from dispatcher.api.refusals import Refusals
from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.telemetry.log import get_log


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            if is_started:
                problem_of(error)  # for the log
                raise
            response = self._response(error)
        else:
            return
        # Not above: the traceback has all that the request had in memory, and lives as long as that block.
        await response(scope, receive, send)

    def _response(self, error: Exception) -> Response:
        problem = problem_of(error)
        self._refusals.count(problem.code)
        return problem.response()


def problem_of(error: Exception) -> Problem:
    """What a client is told of a fault."""
    match error:
        case Problem():
            return error
        case StoreBusy():
            return Problem("overloaded", "Another transaction holds what this one needs.", retry_after=1)
        case StoreUnavailable():
            return Problem("database-unavailable", retry_after=1)
        case DispatcherError():
            get_log().error("error.unexpected", where="api", error=error.message)
        case _:
            get_log().error("error.unexpected", where="api", error=type(error).__name__)
    return Problem("internal-error", closes=True)
