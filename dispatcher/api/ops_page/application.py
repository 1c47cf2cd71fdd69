"""The page as an ASGI application, which the API mounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from dispatcher.actions import domains, stats
from dispatcher.api.ops_page import (
    audit,
    batches,
    captured,
    dead_letters,
    emails,
    exports,
    face,
    keys,
    lanes,
    overview,
    pauses,
    poison,
    replays,
    reported_events,
    revealed,
    senders,
    sign_in,
    suppressions,
    webhooks,
)
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.rendering import serve_static
from dispatcher.api.ops_page.site import PATH, Site, with_security_headers
from dispatcher.errors import DispatcherError


def _openid_routes(site: Site) -> list[Route]:
    if site.settings.ops_oidc_issuer is None:
        return []
    try:
        from dispatcher.api.ops_page import openid_sign_in
    except ModuleNotFoundError as error:
        raise DispatcherError(
            f"DISPATCHER_OPS_OIDC_ISSUER needs a package that is not installed: {error.name}.",
            remedy="Run: pip install 'email-dispatcher[oidc]'",
        ) from None
    return openid_sign_in.routes(site)


SUBJECTS: Final[Sequence[Callable[[Site], list[Route]]]] = (
    sign_in.routes,
    _openid_routes,
    overview.routes,
    emails.routes,
    exports.routes,
    revealed.routes,
    dead_letters.routes,
    batches.routes,
    poison.routes,
    replays.routes,
    suppressions.routes,
    reported_events.routes,
    webhooks.routes,
    lanes.routes,
    partial(face.pages, path="/stats", actions=stats.ACTIONS, template="stats.html", **reported_events.SHARES),
    partial(face.pages, path="/domains", actions=domains.ACTIONS, about=domains.__doc__),
    pauses.routes,
    senders.routes,
    keys.routes,
    audit.routes,
    captured.routes,
)


def make_ops_app(site: Site, subjects: Sequence[Callable[[Site], list[Route]]] = SUBJECTS) -> Starlette:
    async def on_http_error(request: Request, error: Any) -> Response:
        texts = "This address does not support this request.", "Go back, and use the form there."
        if error.status_code == 404:
            texts = "There is no page at this address.", "Use the navigation."
        return with_security_headers(await site.error_page(request, PageError(error.status_code, *texts)))

    routes = [route for subject in subjects for route in subject(site)]
    static = Route("/static/{digest}/{name}", serve_static, methods=["GET"])
    return Starlette(routes=[static, *routes], exception_handlers={HTTPException: on_http_error})


@dataclass(frozen=True, slots=True)
class OpsMount:
    """The application of the operators' page, and the paths at which the API mounts it."""

    app: Starlette
    site: Site

    @property
    def paths(self) -> list[str]:
        """/ops, and the path of DISPATCHER_OPS_URL: a proxy keeps the browser's path, or replaces it with /ops."""
        return list(dict.fromkeys((PATH, self.site.path or PATH)))

    @property
    def static_paths(self) -> tuple[bytes, ...]:
        """The prefixes of the paths of static files, such as `/ops/static/`."""
        return tuple(f"{path}/static/".encode() for path in self.paths)

    async def redirect(self, _request: Request) -> Response:
        return with_security_headers(RedirectResponse(f"{self.site.path}/", 307))
