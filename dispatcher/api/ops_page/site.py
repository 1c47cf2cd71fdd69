"""What every page of the operators' page needs: who visits, database sessions, routes, forms, and responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from datetime import tzinfo
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from dispatcher.admission.fair_limiter import FairTurns
from dispatcher.api.access import AccessControl
from dispatcher.api.operator_jobs import OperatorJobs
from dispatcher.api.ops_page.fields import PAGE_SIZES
from dispatcher.api.ops_page.forms import Form, KeptForm, read_form
from dispatcher.api.ops_page.origins import is_cross_site, is_for_loopback, is_secure
from dispatcher.api.ops_page.page_errors import PageError, page_error_of
from dispatcher.api.ops_page.rendering import rendering
from dispatcher.api.ops_page.sessions import Sessions, csrf_token
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.api.ops_page.zones import zone_of
from dispatcher.config import Settings
from dispatcher.domain.controls import Pause, seen_by
from dispatcher.domain.outgoing import TEST_CHANNEL
from dispatcher.errors import DispatcherError, StoreUnavailable
from dispatcher.ops.captured import folders_of
from dispatcher.ops.email_lines import EmailLine, find_lines
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.connections import AsyncSession, Pool, session
from dispatcher.store.controls import list_pauses
from dispatcher.store.emails import list_known_tenants
from dispatcher.store.figures import BoundedCount, count_for_overview

Handler = Callable[[Request, Visitor], Awaitable[Response]]
FormHandler = Callable[[Request, Visitor, Form], Awaitable[Response]]

CONCURRENT_PAGES: Final = 4
"""The most requests that a process handles at the same time, half of them for one tenant. Further requests wait."""
WAIT_SECONDS: Final = 2.0
"""How long a request waits for its turn before it gets a page that asks the visitor to try again."""
PAUSES_SECONDS: Final = 1.0
"""How long all pages share one reading of the pauses."""
TENANTS_SECONDS: Final = 60.0
"""As `PAUSES_SECONDS`, for the tenants that filters suggest."""
COUNT_SECONDS: Final = 5.0
"""As `PAUSES_SECONDS`, for the counts in the navigation."""
STRANGERS: Final = " "
"""In whose name requests take turns until their visitor is known. No tenant and no actor has this name."""
MAX_PARTS: Final = 256
"""The most rendered `<main>` elements that are kept for refreshes. They are kept by URL, tenant and time zone."""
MAX_TRAIL: Final = 20
"""How many pages of a list a visitor can go back. The address has their cursors."""
PATH: Final = "/ops"
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Frame-Options": "DENY",
    # With `no-referrer`, browsers would send `Origin: null` with forms, but `is_cross_site` needs the origin.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Robots-Tag": "noindex",
}
# For each entry of the navigation: its tabs. For each tab: its path, its label, and whether only visitors who see all
# tenants may see the page.
_ENTRIES: Final[Mapping[str, Sequence[tuple[str, str, bool]]]] = {
    "Overview": [("/", "Overview", False), ("/stats", "Statistics", False)],
    "Emails": [("/emails", "Emails", False)],
    "Failures": [
        ("/dead-letters", "Failed", False),
        ("/held", "Held", False),
        ("/poison", "Poison", True),
        ("/replays", "Replays", False),
    ],
    "Events": [("/events", "Events", False)],
    "Suppressions": [("/suppressions", "Suppressions", False)],
    "Settings": [
        ("/pauses", "Pauses", False),
        ("/lanes", "Lanes", True),
        ("/tenants", "Tenants", True),
        ("/domains", "Domains", True),
        ("/webhooks", "Webhooks", False),
        ("/senders", "Senders", True),
        ("/keys", "Keys", True),
        ("/audit", "Audit", True),
    ],
}
_COUNTED: Final = {"/dead-letters": "dead_letters", "/held": "held"}
_NOTHING: Final = BoundedCount(0)


class _Tab(NamedTuple):
    path: str
    label: str
    is_current: bool  # whether the visitor is on this page, or on a page below it
    emails: BoundedCount | None = None


class _Entry(NamedTuple):
    label: str
    tabs: Sequence[_Tab]

    @property
    def is_current(self) -> bool:
        return any(tab.is_current for tab in self.tabs)


class Site:
    """What all pages share. Each subject's function `routes(site)` uses it to create the subject's pages.

    `path` is the beginning of each path, as browsers use it: /ops, or the path of DISPATCHER_OPS_URL. The `resources`
    that the subjects have opened are closed when the API stops.
    """

    def __init__(self, settings: Settings, access: AccessControl, pool: Pool, jobs: OperatorJobs) -> None:
        self.settings = settings
        self.access = access
        self.jobs = jobs
        self.path = PATH if settings.ops_url is None else urlsplit(settings.ops_url).path.rstrip("/")
        self.sessions = Sessions(settings, access, pool, self.path)
        self.pool = pool
        self.pauses = SharedReading(lambda: list_pauses(pool), fresh_seconds=PAUSES_SECONDS)
        self.tenants = SharedReading(lambda: list_known_tenants(pool), fresh_seconds=TENANTS_SECONDS)
        self.resources = AsyncExitStack()
        self._turns = FairTurns(CONCURRENT_PAGES, seconds=WAIT_SECONDS)
        self._parts: dict[tuple[str, str, str | None, tzinfo], tuple[object, object, str]] = {}
        self._counted: dict[str | None, SharedReading[Mapping[str, BoundedCount]]] = {}
        self._rendering = rendering(self.path)

    def session(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A database session whose statements time out after two seconds. Database errors become error pages."""
        return session(self.pool)

    async def lines(self, session: AsyncSession, email_ids: Sequence[UUID]) -> list[EmailLine]:
        return await find_lines(session, email_ids, self.settings.ops_subject)

    def get(self, path: str, handler: Handler) -> Route:
        """The route of a page that every signed-in visitor may see. `path` is below `site.path`."""

        async def endpoint(request: Request) -> Response:
            visitor = await self.visitor(request)
            if visitor is None:
                return await self._ask_to_sign_in(request)
            async with self._turns.turn(visitor.share):
                return await handler(request, visitor)

        return Route(path, self.guarded(endpoint, takes_turn=False), methods=["GET"])

    def post(self, path: str, handler: FormHandler, *, title: str = "Your form") -> Route:
        """The route to which visitors with the scope `operate` post a form. Its CSRF token is checked first.

        `title` is what the form does, such as `Release an email`. If the session has ended, this is the heading of the
        page on which the visitor checks the form and sends it again.
        """

        async def endpoint(request: Request) -> Response:
            form = await read_form(request)
            visitor = await self.visitor(request)
            if visitor is None:
                return await self._ask_to_sign_in(request, self._kept(request, form, title))
            require_operate(visitor)
            if not self.sessions.is_valid_csrf_token(request, form):
                return await self.ask_to_confirm(request, visitor, self._kept(request, form, title))
            async with self._turns.turn(visitor.share):
                return await handler(request, visitor, form.without_internals())

        return Route(path, self.guarded(endpoint, takes_turn=False), methods=["POST"])

    async def visitor(self, request: Request) -> Visitor | None:
        """As `Sessions.visitor`. The look-up waits for its turn, so strangers cannot occupy all database sessions."""
        async with self._turns.turn(STRANGERS):
            return await self.sessions.visitor(request)

    def guarded(
        self, endpoint: Callable[[Request], Awaitable[Response]], *, takes_turn: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wraps an endpoint: limits concurrent requests, refuses other sites' forms, and answers errors with pages.

        `takes_turn`: whether a request counts as one of CONCURRENT_PAGES. False for an endpoint that waits for another
        server, because it must not delay other pages, and for one that counts for its visitor.
        """

        async def guarded(request: Request) -> Response:
            try:
                self._check_origin(request)
                if request.method == "POST":
                    # Read the form before the request gets its turn, so that a slow client delays no page.
                    await read_form(request)
                async with self._turns.turn(STRANGERS) if takes_turn else nullcontext():
                    response = await endpoint(request)
            except Exception as error:  # noqa: BLE001 - the edge of the page: every error becomes a page
                response = await self.error_page(request, page_error_of(error))
            return with_security_headers(response)

        return guarded

    def _check_origin(self, request: Request) -> None:
        if request.method != "GET" and is_cross_site(request, self.settings.ops_url):
            raise PageError(
                403,
                "This form came from another website, so nothing was done.",
                "Open this page directly, and try again. If browsers reach the operators' page through a proxy, set "
                "DISPATCHER_OPS_URL to the URL that they use, such as https://ops.example.com/mail/ops.",
            )

    async def page(
        self,
        request: Request,
        visitor: Visitor | None,
        template: str,
        *,
        status: int = 200,
        shared: object = None,
        **values: Any,
    ) -> Response:
        """Renders a template: the whole page, or only its <main> if htmx refreshes a part of it.

        `shared` is the object that <main> shows, if all visitors who see the same tenant get the same <main>. A refresh
        renders <main> again only if this object, the pauses or the counts have changed. None: each refresh renders it.
        """
        paused: Sequence[Pause] = []
        # Without PostgreSQL, show no pauses: an error here would prevent the page that reports it.
        tenants: list[str] = []
        with suppress(StoreUnavailable):
            tenants = await self.tenants.fresh() if visitor is not None and visitor.tenant_id is None else []
            paused = [] if visitor is None else seen_by(await self.pauses.fresh(), visitor.tenant_id)
        counts = {} if visitor is None else await self._counts(visitor)
        is_part = "hx-request" in request.headers
        settings = self.settings
        values["known"] = {
            "provider": settings.providers,
            "lane": settings.lanes,
            "channel": ("email", "sms", TEST_CHANNEL),
            "tenant_id": tenants,
            **values.get("known", {}),
        }
        if shared is None or visitor is None or not is_part:
            html = self._render(request, visitor, template, paused, counts, is_part=is_part, **values)
        else:
            place = request.url.path, request.url.query, visitor.tenant_id, zone_of(request)
            around = (paused, counts)
            of, with_around, html = self._parts.get(place, (None, around, ""))
            if of is not shared or with_around != around:
                html = self._render(request, visitor, template, paused, counts, is_part=True, **values)
                if len(self._parts) >= MAX_PARTS:
                    self._parts.clear()
                self._parts[place] = shared, around, html
        response = Response(html, status, media_type="text/html")
        if (new_token := self.sessions.new_token(request)) is not None:
            self.sessions.send_token(request, response, new_token)
        return response

    def _render(
        self,
        request: Request,
        visitor: Visitor | None,
        template: str,
        paused: Sequence[Pause],
        by_state: Mapping[str, BoundedCount],
        /,
        **values: Any,
    ) -> str:
        token = self.sessions.token(request)
        return self._rendering.render(
            template,
            request=request,
            visitor=visitor,
            csrf_token=csrf_token(token) if token else None,
            entries=[] if visitor is None else self._entries(visitor, _path_below(request, self.path), by_state),
            failures=_sum(by_state.get(name, _NOTHING) for name in _COUNTED.values()),
            paused=paused,
            trail=request.query_params.getlist("back")[-MAX_TRAIL:],
            page_sizes=PAGE_SIZES,
            filters_known=getattr(request.state, "filters", ()),
            can_sign_out=visitor is not None and not self.access.is_open,
            has_openid=self.settings.ops_oidc_issuer is not None,
            is_confidential=is_secure(request, self.settings.ops_url) or is_for_loopback(request),
            **values,
        )

    def _entries(self, visitor: Visitor, path: str, counts: Mapping[str, BoundedCount]) -> list[_Entry]:
        def tabs(own: Sequence[tuple[str, str, bool]]) -> list[_Tab]:
            return [
                _Tab(at, label, path == at or path.startswith(f"{at}/"), counts.get(_COUNTED.get(at, "")))
                for at, label, for_all in own
                if not for_all or visitor.tenant_id is None
            ]

        entries = [_Entry(label, tabs(own)) for label, own in _ENTRIES.items()]
        if folders_of(self.settings) is not None and visitor.tenant_id is None and visitor.may_act:
            entries.append(_Entry("Captured", tabs([("/captured", "Captured", True)])))
        return entries

    async def _counts(self, visitor: Visitor) -> Mapping[str, BoundedCount]:
        """How many emails of each state the visitor may see; empty while this is not known."""
        tenant_id = visitor.tenant_id
        if tenant_id not in self._counted:
            if len(self._counted) >= MAX_PARTS:
                self._counted.clear()
            self._counted[tenant_id] = SharedReading(
                lambda: count_for_overview(self.pool, tenant_id=tenant_id, limit=1), fresh_seconds=COUNT_SECONDS
            )
        with suppress(DispatcherError):
            return (await self._counted[tenant_id].get()).value
        return {}

    def url(self, path: str, **parameters: object) -> str:
        """A link to a path below `site.path`. Leaves out parameters that are None or empty."""
        return self._rendering.url(path, **parameters)

    def forget(self) -> None:
        """Reads pauses and counts again for the next page, because a form may have changed them."""
        self.pauses.forget()
        for each in self._counted.values():
            each.forget()

    def see_other(self, path: str, **parameters: object) -> Response:
        """The answer to a form that was processed: a redirect (303) to a path below `site.path`."""
        self.forget()
        return RedirectResponse(self.url(path, **parameters), 303)

    async def error_page(self, request: Request, error: PageError) -> Response:
        visitor = None
        if error.status != 503:
            with suppress(Exception):  # the error page works without a database, too
                visitor = await self.visitor(request)
        response = await self.page(request, visitor, "error.html", status=error.status, error=error)
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        return response

    async def _ask_to_sign_in(self, request: Request, kept: KeptForm | None = None) -> Response:
        """Redirects to the sign-in page. If the request is a form or a refresh, returns the sign-in page itself.

        The sign-in page keeps the form `kept`, which arrived after its session had ended, in hidden fields.
        """
        if kept is None and "hx-request" not in request.headers:
            query = f"?{request.url.query}" if request.url.query else ""
            target = _path_below(request, self.path) + query
            return self.see_other("/sign-in", next=None if target == "/" else target)
        return await self.page(request, None, "sign_in.html", status=401, kept=kept, next="", problem=None)

    def _kept(self, request: Request, form: Form, title: str) -> KeptForm:
        return form.kept(_path_below(request, self.path), title)

    async def ask_to_confirm(self, request: Request, visitor: Visitor, kept: KeptForm) -> Response:
        """A page with a form that was not processed, for the visitor to check and send again."""
        return await self.page(request, visitor, "kept_form.html", kept=kept)


def with_security_headers(response: Response) -> Response:
    """The response with the headers that every page needs. Does not change a header that a handler has set."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _sum(counts: Iterable[BoundedCount]) -> BoundedCount:
    found = list(counts)
    return BoundedCount(sum(each.emails for each in found), any(each.is_cut for each in found))


def _path_below(request: Request, path: str) -> str:
    """The request's path without the prefix `path`, which a proxy may have replaced with /ops."""
    own: str = request.scope["path"]
    for prefix in (path, PATH):
        if prefix and (own == prefix or own.startswith(f"{prefix}/")):
            return own[len(prefix) :] or "/"
    return own or "/"
