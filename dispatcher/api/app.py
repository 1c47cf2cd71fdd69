"""The ASGI application: its paths and its documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dispatcher.actions import all_actions
from dispatcher.actions.dlq import REPLAYS
from dispatcher.actions.feed import ListEvents
from dispatcher.admission.problems import Problem
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.api import batch_face, face, status_operations
from dispatcher.api.access import AccessControl
from dispatcher.api.docs_page import CONTENT_SECURITY_POLICY, page
from dispatcher.api.enqueue_endpoints import CREATE, CREATE_MANY, CREATE_SMS, EnqueueEndpoints
from dispatcher.api.error_middleware import ErrorMiddleware, response_of
from dispatcher.api.face import ActionEndpoints, Endpoint
from dispatcher.api.feed_endpoints import TEST_WEBHOOK, FeedEndpoints, WebhookEndpoints
from dispatcher.api.operation import Operation, openapi
from dispatcher.api.operator_jobs import ReplayEndpoints
from dispatcher.api.status_endpoints import StatusEndpoints
from dispatcher.api.unsubscribe_endpoints import UnsubscribeEndpoints
from dispatcher.store.connections import Pool

if TYPE_CHECKING:
    from dispatcher.api.captured_endpoints import CapturedEndpoints
    from dispatcher.api.event_endpoints import EventEndpoints
    from dispatcher.api.ops_page.application import OpsMount

_CODES: Final = {404: "not-found", 405: "method-not-allowed"}


class FastRoutes:
    """Calls the endpoints that enqueue emails or receive events itself, and passes other requests to Starlette.

    Starlette's routing would take longer than enqueueing an email. It has routes to these endpoints, too, so that it
    answers requests with other methods on their paths.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (endpoint := self._endpoints.get((scope["method"], scope["path"]))) is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)


def make_app(
    access: AccessControl,
    enqueueing: EnqueueEndpoints,
    status: StatusEndpoints,
    actions: ActionEndpoints,
    replays: ReplayEndpoints,
    feed: FeedEndpoints,
    refusals: RefusalCounter,
    unsubscribe_sessions: Pool,
    events: EventEndpoints | None = None,
    ops: OpsMount | None = None,
    captured: CapturedEndpoints | None = None,
) -> FastRoutes:
    """Builds the application from its endpoints, whose database connections are already open.

    `unsubscribe_sessions` serve recipients' requests only, so that they never wait for operators' requests.
    """
    unsubscribed = UnsubscribeEndpoints(access, unsubscribe_sessions)
    enqueues: list[tuple[str, str, Endpoint, Operation]] = [
        ("POST", "/v1/emails", enqueueing.create, CREATE),
        ("POST", "/v1/sms", enqueueing.create_sms, CREATE_SMS),
        ("POST", "/v1/emails/batch", enqueueing.create_many, CREATE_MANY),
    ]
    posts = [("POST", path, endpoint, operation) for path, endpoint, operation in (events.routes if events else ())]
    described = [
        *enqueues,
        ("GET", "/v1/emails/by-key/{message_key:path}", status.get_by_key, status_operations.GET_BY_KEY),
        ("GET", "/v1/emails/{email_id:uuid}", status.get, status_operations.GET),
        ("POST", "/v1/webhooks/{webhook_id}/test", WebhookEndpoints(actions).test, TEST_WEBHOOK),
        *batch_face.routes(actions),
        *actions.routes(all_actions()),
        *replays.routes(REPLAYS),
        *feed.routes([ListEvents]),
        *posts,
        *(captured.routes if captured else ()),
    ]
    unsubscribe = "/v1/unsubscribe/{token}"
    routes: list[BaseRoute] = [
        *(Route(path, endpoint, methods=[method]) for method, path, endpoint, _ in described),
        Route("/", partial(_home, "/docs" if ops is None else ops.paths[-1]), methods=["GET"]),
        Route(unsubscribe, unsubscribed.ask, methods=["GET"]),
        Route(unsubscribe, unsubscribed.unsubscribe, methods=["POST"]),
        *_pages(access, [(method, path, operation) for method, path, _, operation in described]),
    ]
    if ops is not None:
        # Routes are tried in order. The first path of the page is first, because operators' open pages send the most
        # requests. Its other paths are last: a path that an operator chose must not hide a path of the API.
        first, *others = [[Mount(path, ops.app), Route(path, ops.redirect, methods=["GET"])] for path in ops.paths]
        routes = [*first, *routes, *chain.from_iterable(others)]
    app = Starlette(
        routes=routes,
        # Starlette's outermost middleware would answer every exception with a 500 without a problem document. So an
        # `ErrorMiddleware` inside it handles exceptions first. A second `ErrorMiddleware`, around the whole
        # application, handles the exceptions of `FastRoutes`.
        middleware=[Middleware(ErrorMiddleware, refusals=refusals)],
        exception_handlers={
            Problem: partial(_on_problem, refusals),
            HTTPException: partial(_on_http_exception, refusals),
        },
    )
    app.router.redirect_slashes = False
    return FastRoutes(app, {(method, path): endpoint for method, path, endpoint, _ in (*enqueues, *posts)})


async def _home(path: str, request: Request) -> Response:
    """Redirects browsers to the operators' page, or to the documentation if this page is off."""
    if "text/html" not in request.headers.get("accept", ""):
        raise Problem("not-found", "The operations are in /openapi.json.")
    return RedirectResponse(path, 307)


def _pages(access: AccessControl, operations: Sequence[tuple[str, str, Operation]]) -> list[Route]:
    cached: dict[bool, tuple[bytes, str]] = {}
    building = asyncio.Lock()

    def build(*, needs_key: bool) -> tuple[bytes, str]:
        whole = openapi(operations, {**face.schemas(), **batch_face.schemas()}, needs_key=needs_key)
        return orjson.dumps(whole), page(whole)

    async def documentation() -> tuple[bytes, str]:
        async with building:
            # The document changes once: as soon as a key exists, it says that operations need a key.
            if (is_open := access.is_open) not in cached:
                cached[is_open] = await asyncio.to_thread(build, needs_key=not is_open)  # takes a tenth of a second
            return cached[is_open]

    async def document(request: Request) -> Response:
        return _unless_known(request, Response((await documentation())[0], media_type="application/json"))

    async def docs(request: Request) -> Response:
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
        return _unless_known(request, HTMLResponse((await documentation())[1], headers=headers))

    async def health(_request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    return [Route("/openapi.json", document), Route("/docs", docs), Route("/healthz", health)]


def _unless_known(request: Request, response: Response) -> Response:
    """The response, or 304 if the client has it."""
    tag = f'"{sha256(response.body).hexdigest()[:16]}"'
    known = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=known)
    response.headers.update(known)
    return response


async def _on_problem(refusals: RefusalCounter, _request: Request, error: Any) -> Response:
    refusals.count(error.code)
    return response_of(error)


async def _on_http_exception(refusals: RefusalCounter, request: Request, error: Any) -> Response:
    code = _CODES.get(error.status_code, "malformed-request")
    headers = dict(error.headers or {})
    detail = None
    if "Allow" in headers:
        # Starlette lists only the methods of the first route with this path. List the methods of all routes with this
        # path.
        found = [each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for each in found for method in each.methods or ()}))
        detail = f"The path supports {headers['Allow']}."
    return await _on_problem(refusals, request, Problem(code, detail, headers=headers))
