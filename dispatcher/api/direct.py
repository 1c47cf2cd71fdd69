"""The direct way to what is asked most: the endpoints that take emails, without the framework's layers before them.

Routing through FastAPI and Starlette takes longer than an email does. They describe these endpoints, too, and answer
for their paths whatever is not the one method; what an endpoint raises is the guard's to tell, here as there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        """
        Args:
            endpoints: By method and path.
        """
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
