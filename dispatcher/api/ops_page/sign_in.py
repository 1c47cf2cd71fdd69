"""Signs visitors in with an API key, and signs them out. `openid_sign_in` adds the other way to sign in."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from dispatcher.api.ops_page.attempts import AttemptLimiter
from dispatcher.api.ops_page.forms import Form, KeptForm, read_form
from dispatcher.api.ops_page.origins import client_address
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.sessions import visitor_of
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.api_key import Secret

MAX_TARGET_CHARACTERS: Final = 4000


def routes(site: Site) -> list[Route]:
    """The routes of the sign-in form and of signing out."""
    attempts = AttemptLimiter()

    async def show(request: Request) -> Response:
        target = target_of(request.query_params.get("next", ""))
        if await site.sessions.visitor(request) is not None:
            return site.see_other(target)
        return await site.page(request, None, "sign_in.html", next=target, kept=None, problem=None)

    async def sign_in(request: Request) -> Response:
        form = await read_form(request)
        target, kept = target_of(form.get("next", "")), form.kept_before()
        if site.access.is_open:
            return site.see_other(target)
        if kept is not None and "key" not in form:
            return await _continue(site, request, kept)
        found = await _visitor_or_problem(site, attempts, client_address(request), form)
        if isinstance(found, str):
            return await site.page(request, None, "sign_in.html", status=401, next=target, kept=kept, problem=found)
        token = await site.sessions.begin(request, found)
        if kept is not None and is_path(kept.path):
            return await site.ask_to_confirm(request, found, kept)
        response: Response = RedirectResponse(site.url(target), 303)
        site.sessions.send_token(request, response, token)
        return response

    async def sign_out(request: Request) -> Response:
        form = await read_form(request)
        response = site.see_other("/sign-in")
        if site.sessions.is_valid_csrf_token(request, form):
            await site.sessions.end(request, response)
        return response

    return [
        Route("/sign-in", site.guarded(show), methods=["GET"]),
        Route("/sign-in", site.guarded(sign_in), methods=["POST"]),
        Route("/sign-out", site.guarded(sign_out), methods=["POST"]),
    ]


async def _continue(site: Site, request: Request, kept: KeptForm) -> Response:
    """Continues with a kept form, after the visitor has signed in with OpenID Connect in another tab."""
    visitor = await site.sessions.visitor(request)
    if visitor is not None and is_path(kept.path):
        return await site.ask_to_confirm(request, visitor, kept)
    problem = "You are not signed in yet."
    return await site.page(request, None, "sign_in.html", status=401, next="", kept=kept, problem=problem)


async def _visitor_or_problem(site: Site, attempts: AttemptLimiter, client: str, form: Form) -> Visitor | str:
    """The visitor with the key in the form, or a sentence that says why the visitor cannot sign in.

    A key that this process knows is never refused: behind a proxy on another host, all visitors are one client.
    """
    secret = Secret.parse(form.get("key", "").strip())
    key = None if secret is None else site.access.find_known(secret)
    if key is None:
        check_attempts(attempts, client)
        key = None if secret is None else await site.access.find(secret)
    if key is None:
        attempts.add_failure(client)
        return "This API key does not exist, its secret is wrong, or it was revoked."
    attempts.add_success(client)
    return visitor_of(key) or "This API key has neither the scope operate nor the scope read."


def check_attempts(attempts: AttemptLimiter, client: str) -> None:
    """Raises PageError if the client has made too many failed attempts to sign in."""
    if wait := attempts.seconds_to_wait(client):
        problem = "There were too many failed attempts to sign in."
        raise PageError(429, problem, f"Try again in {wait} s.", retry_after=wait)


def target_of(text: str) -> str:
    """The path of the page to show after the sign-in: `text` if it is a path below `site.path`, else `/`."""
    return text if is_path(text) and not text.startswith(("/sign-in", "/sign-out")) else "/"


def is_path(text: str) -> bool:
    """Whether a text is a path, with or without a query. A path has no host and no control characters."""
    return (
        text.startswith("/")
        and not text.startswith("//")
        and "\\" not in text
        and text.isprintable()
        and len(text) <= MAX_TARGET_CHARACTERS
    )
