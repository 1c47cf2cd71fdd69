"""The ASGI application: its paths and its documentation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match

from dispatcher.api import (
    batch_face,
    enqueue_operations,
    feed_operations,
    openapi,
    operator_operations,
    pause_operations,
    status_operations,
    suppression_operations,
    webhook_operations,
)
from dispatcher.api.access import AccessControl
from dispatcher.api.docs_page import CONTENT_SECURITY_POLICY, page
from dispatcher.api.enqueue_endpoints import EnqueueEndpoints
from dispatcher.api.error_middleware import ErrorMiddleware
from dispatcher.api.face import ActionEndpoints
from dispatcher.api.fast_routes import Endpoint, FastRoutes
from dispatcher.api.feed_endpoints import FeedEndpoints
from dispatcher.api.operation import Operation
from dispatcher.api.operator_endpoints import OperatorEndpoints
from dispatcher.api.pause_endpoints import PauseEndpoints
from dispatcher.api.problems import Problem
from dispatcher.api.refusal_counter import RefusalCounter
from dispatcher.api.status_endpoints import StatusEndpoints
from dispatcher.api.suppression_endpoints import SuppressionEndpoints
from dispatcher.api.unsubscribe_endpoints import UnsubscribeEndpoints
from dispatcher.api.webhook_endpoints import WebhookEndpoints
from dispatcher.store.connections import Pool
from dispatcher.version import VERSION

if TYPE_CHECKING:
    from dispatcher.api.event_endpoints import EventEndpoints
    from dispatcher.api.ops_page.application import OpsMount

_CODES: Final = {404: "not-found", 405: "method-not-allowed"}


def make_app(
    access: AccessControl,
    enqueueing: EnqueueEndpoints,
    status: StatusEndpoints,
    operators: OperatorEndpoints,
    feed: FeedEndpoints,
    webhooks: WebhookEndpoints,
    suppressions: SuppressionEndpoints,
    refusals: RefusalCounter,
    unsubscribe_sessions: Pool,
    events: EventEndpoints | None = None,
    ops: OpsMount | None = None,
) -> FastRoutes:
    """Builds the application from its endpoints, whose database connections are already open.

    Args:
        unsubscribe_sessions: Sessions for recipients' requests only, so that they never wait for operators' requests.
        events: None if no provider posts events.
        ops: The operators' page; None if it is off.
    """
    app = FastAPI(
        title="Email Dispatcher",
        version=VERSION,
        description=openapi.ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    # Starlette's outermost middleware would answer every exception with a 500 without a problem document. So an
    # `ErrorMiddleware` inside it handles exceptions first. A second `ErrorMiddleware`, around the whole application,
    # handles the exceptions of `FastRoutes`.
    app.add_middleware(ErrorMiddleware, refusals=refusals)
    app.add_exception_handler(Problem, partial(_on_problem, refusals))
    app.add_exception_handler(HTTPException, partial(_on_http_exception, refusals))
    if ops is not None:
        # Add this route first: routes are tried in order, and operators' open pages send the most requests.
        _mount(app, ops, ops.paths[0])
    _add(app, "POST", "/v1/emails", enqueueing.create, enqueue_operations.CREATE)
    _add(app, "POST", "/v1/sms", enqueueing.create_sms, enqueue_operations.CREATE_SMS)
    _add(app, "POST", "/v1/emails/batch", enqueueing.create_many, enqueue_operations.CREATE_MANY)
    _add(app, "GET", "/v1/emails", status.list, status_operations.LIST)
    _add(app, "GET", "/v1/emails/by-key/{message_key:path}", status.get_by_key, status_operations.GET_BY_KEY)
    _add(app, "GET", "/v1/emails/{email_id:uuid}", status.get, status_operations.GET)
    _add(app, "POST", "/v1/replays", operators.create_replay, operator_operations.CREATE_REPLAY)
    _add(app, "GET", "/v1/replays/{replay_id}", operators.get_replay, operator_operations.GET_REPLAY)
    _add(app, "POST", "/v1/replays/{replay_id}/resume", operators.resume_replay, operator_operations.RESUME_REPLAY)
    _add(app, "DELETE", "/v1/replays/{replay_id}", operators.stop_replay, operator_operations.STOP_REPLAY)
    _add(app, "GET", "/v1/events", feed.list, feed_operations.LIST_EVENTS)
    _add(app, "POST", "/v1/webhooks", webhooks.create, webhook_operations.CREATE_WEBHOOK)
    _add(app, "GET", "/v1/webhooks", webhooks.list, webhook_operations.LIST_WEBHOOKS)
    _add(app, "GET", "/v1/webhooks/{webhook_id}", webhooks.get, webhook_operations.GET_WEBHOOK)
    _add(app, "DELETE", "/v1/webhooks/{webhook_id}", webhooks.remove, webhook_operations.REMOVE_WEBHOOK)
    _add(app, "POST", "/v1/webhooks/{webhook_id}/test", webhooks.test, webhook_operations.TEST_WEBHOOK)
    _add(app, "POST", "/v1/webhooks/{webhook_id}/rotate", webhooks.rotate, webhook_operations.ROTATE_WEBHOOK)
    _add(app, "POST", "/v1/webhooks/{webhook_id}/enable", webhooks.enable, webhook_operations.ENABLE_WEBHOOK)
    _add(app, "POST", "/v1/webhooks/{webhook_id}/replay", webhooks.replay, webhook_operations.REPLAY_WEBHOOK)
    _add(app, "GET", "/v1/suppressions", suppressions.list, suppression_operations.LIST_SUPPRESSIONS)
    _add(app, "POST", "/v1/suppressions", suppressions.add, suppression_operations.ADD_SUPPRESSIONS)
    _add(app, "DELETE", "/v1/suppressions", suppressions.remove, suppression_operations.REMOVE_SUPPRESSIONS)
    pauses = PauseEndpoints(access, operators.bodies, operators.sessions)
    _add(app, "GET", "/v1/pauses", pauses.list, pause_operations.LIST_PAUSES)
    _add(app, "POST", "/v1/pauses", pauses.create, pause_operations.CREATE_PAUSE)
    _add(app, "DELETE", "/v1/pauses", pauses.remove, pause_operations.REMOVE_PAUSE)
    actions = ActionEndpoints(access, operators.bodies, operators.sessions, webhooks.settings)
    for method, path, endpoint, operation in (*batch_face.routes(actions), *actions.routes()):
        _add(app, method, path, endpoint, operation)
    unsubscribed = UnsubscribeEndpoints(access, unsubscribe_sessions)
    app.add_route("/v1/unsubscribe/{token}", unsubscribed.ask, methods=["GET"], include_in_schema=False)
    app.add_route("/v1/unsubscribe/{token}", unsubscribed.unsubscribe, methods=["POST"], include_in_schema=False)
    fast: dict[tuple[str, str], Endpoint] = {
        ("POST", "/v1/emails"): enqueueing.create,
        ("POST", "/v1/sms"): enqueueing.create_sms,
        ("POST", "/v1/emails/batch"): enqueueing.create_many,
    }
    for path, endpoint, operation in events.routes if events is not None else ():
        _add(app, "POST", path, endpoint, operation)
        fast["POST", path] = endpoint
    _add_pages(app, access)
    if ops is not None:
        # Add these routes last: a path that an operator chose in a setting must not hide a path of the API.
        for path in ops.paths[1:]:
            _mount(app, ops, path)
    return FastRoutes(app, fast)


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, operation: Operation) -> None:
    # The first route serves requests. The second route only adds the operation to the OpenAPI document: if it served
    # requests, FastAPI would resolve each request's dependencies. Even if a request has no dependencies, this step
    # takes longer than an enqueue.
    app.add_route(path, endpoint, methods=[method], include_in_schema=False)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_class=Response,
        operation_id=operation.name,
        summary=operation.summary,
        description=operation.description,
        status_code=operation.status,
        responses=operation.responses(),
        openapi_extra=operation.extra(),
    )


def _mount(app: FastAPI, ops: OpsMount, path: str) -> None:
    app.mount(path, ops.app)
    app.add_route(path, ops.redirect, methods=["GET"], include_in_schema=False)


def _add_pages(app: FastAPI, access: AccessControl) -> None:
    cached: dict[bool, tuple[bytes, str]] = {}

    def documentation() -> tuple[bytes, str]:
        # The document changes once: as soon as a key exists, it says that operations need a key.
        if access.is_open not in cached:
            whole = openapi.document(app, needs_key=not access.is_open)
            cached[access.is_open] = orjson.dumps(whole), page(whole)
        return cached[access.is_open]

    async def document(_request: Request) -> Response:
        return Response(documentation()[0], media_type="application/json")

    async def docs(_request: Request) -> Response:
        return HTMLResponse(documentation()[1], headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def health(_request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    app.add_route("/openapi.json", document, include_in_schema=False)
    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route("/healthz", health, include_in_schema=False)


async def _on_problem(refusals: RefusalCounter, _request: Request, error: Any) -> Response:
    refusals.count(error.code)
    response: Response = error.response()
    return response


async def _on_http_exception(refusals: RefusalCounter, request: Request, error: Any) -> Response:
    code = _CODES.get(error.status_code, "malformed-request")
    headers = dict(error.headers or {})
    detail = None
    if "Allow" in headers:
        # Starlette lists only the methods of the first route with this path. List the methods of all routes with this
        # path.
        headers["Allow"] = ", ".join(sorted(_methods(request)))
        detail = f"The path supports {headers['Allow']}."
    return await _on_problem(refusals, request, Problem(code, detail, headers=headers))


def _methods(request: Request) -> set[str]:
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found
