"""A shortcut to the endpoints that enqueue emails or receive events, without Starlette's routing.

The routing would take longer than enqueueing an email. Starlette has routes to these endpoints, too, so that it answers
requests with other methods on their paths. The error middleware handles the exceptions of these endpoints, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class FastRoutes:
    """An ASGI application that calls some endpoints itself, and passes other requests to the wrapped application."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        """
        Args:
            app: Serves all other requests.
            endpoints: The endpoints that this application calls itself, by method and path.
        """
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
