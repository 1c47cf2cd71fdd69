"""The application: its paths, and its description."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match

from dispatcher.api import description as describe
from dispatcher.api.access import Access
from dispatcher.api.direct import Direct, Endpoint
from dispatcher.api.docs_page import CONTENT_SECURITY_POLICY, page
from dispatcher.api.emails import Emails
from dispatcher.api.operating import Operating
from dispatcher.api.problems import Problem
from dispatcher.api.reading import Reading
from dispatcher.api.refusals import Refusals
from dispatcher.version import VERSION

_CODES: Final = {404: "not-found", 405: "method-not-allowed"}


def make_app(access: Access, emails: Emails, reading: Reading, operating: Operating, refusals: Refusals) -> Direct:
    """The application; what it needs is open already."""
    app = FastAPI(
        title="Email Dispatcher",
        version=VERSION,
        description=describe.ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(Problem, partial(_on_problem, refusals))
    app.add_exception_handler(HTTPException, partial(_on_http_exception, refusals))
    _add(app, "POST", "/v1/emails", emails.create, describe.CREATE)
    _add(app, "POST", "/v1/emails/batch", emails.create_many, describe.CREATE_MANY)
    _add(app, "GET", "/v1/emails", reading.list, describe.LIST)
    _add(app, "GET", "/v1/emails/by-key/{message_key:path}", reading.get_by_key, describe.GET_BY_KEY)
    _add(app, "GET", "/v1/emails/{email_id:uuid}", reading.get, describe.GET)
    _add(app, "POST", "/v1/held/{email_id:uuid}/confirm", operating.confirm, describe.CONFIRM)
    _add(app, "POST", "/v1/held/{email_id:uuid}/release", operating.release, describe.RELEASE)
    _add(app, "POST", "/v1/replays", operating.create_replay, describe.CREATE_REPLAY)
    _add(app, "GET", "/v1/replays/{replay_id}", operating.get_replay, describe.GET_REPLAY)
    _add(app, "POST", "/v1/replays/{replay_id}/resume", operating.resume_replay, describe.RESUME_REPLAY)
    _add(app, "DELETE", "/v1/replays/{replay_id}", operating.stop_replay, describe.STOP_REPLAY)
    _add_pages(app, access)
    return Direct(app, {("POST", "/v1/emails"): emails.create, ("POST", "/v1/emails/batch"): emails.create_many})


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, operation: describe.Operation) -> None:
    # This route answers; the one below, which it hides, is there for the description: FastAPI would resolve
    # dependencies for each request, of which we have none, and take longer over it than the email takes.
    app.add_route(path, endpoint, methods=[method], include_in_schema=False)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_class=Response,
        operation_id=operation.name,
        summary=operation.summary,
        description=operation.about,
        status_code=operation.status,
        responses=operation.responses(),
        openapi_extra=operation.extra(),
    )


def _add_pages(app: FastAPI, access: Access) -> None:
    cached: dict[bool, tuple[bytes, str]] = {}

    def described() -> tuple[bytes, str]:
        # It changes once, when the first key is made.
        if access.is_open not in cached:
            document = describe.document(app, needs_key=not access.is_open)
            cached[access.is_open] = orjson.dumps(document), page(document)
        return cached[access.is_open]

    async def openapi(_request: Request) -> Response:
        return Response(described()[0], media_type="application/json")

    async def docs(_request: Request) -> Response:
        return HTMLResponse(described()[1], headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def health(_request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route("/healthz", health, include_in_schema=False)


async def _on_problem(refusals: Refusals, _request: Request, error: Any) -> Response:
    refusals.count(error.code)
    response: Response = error.response()
    return response


async def _on_http_exception(refusals: Refusals, request: Request, error: Any) -> Response:
    code = _CODES.get(error.status_code, "malformed-request")
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette's names the methods of the first route with this path alone
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return await _on_problem(refusals, request, Problem(code, headers=headers))


def _methods(request: Request) -> set[str]:
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found
