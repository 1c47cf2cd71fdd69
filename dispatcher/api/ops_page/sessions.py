"""The sessions of signed-in browsers: a cookie in the browser, and a row in PostgreSQL.

The cookie contains a random token, and PostgreSQL stores only the token's hash. A form's CSRF token is derived from the
session's token, so it is valid exactly as long as the session.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.ops_page.forms import CSRF_FIELD, Form
from dispatcher.api.ops_page.origins import cookie, is_secure
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope, shown
from dispatcher.store import ops_sessions
from dispatcher.store.api_keys import ApiKey
from dispatcher.store.connections import AsyncSession, Pool, session

TOUCH_SECONDS: Final = 60.0
"""The use of a session is recorded at most once in this time, or in a quarter of DISPATCHER_OPS_IDLE_SECONDS if that is
shorter."""
KNOWN_SECONDS: Final = 1.0
"""After a session was looked up, refreshes of its pages cause no look-up for this time. Whole pages and forms always
cause a look-up."""
OPEN_SECONDS: Final = 15.0
"""A page that has not refreshed itself for this time counts as closed."""
ANONYMOUS: Final = Visitor("", "ops page without a key", None, may_act=True, label="no key needed")
"""The visitor while the API needs no key: for development."""
COOKIE: Final = "dispatcher-ops"
TOKEN_CHARACTERS: Final = 43


@dataclass(slots=True)
class _OpenPage:
    """A page that refreshes itself. Instants are seconds of the monotonic clock."""

    session: ops_sessions.OpsSession
    read_at: float  # when the session was looked up
    refreshed_at: float


class Sessions:
    def __init__(self, settings: Settings, access: AccessControl, pool: Pool, path: str) -> None:
        self._settings = settings
        self._access = access
        self._pool = pool
        self._path = path
        self._open: dict[bytes, _OpenPage] = {}

    async def visitor(self, request: Request) -> Visitor | None:
        """The visitor who has sent a request; None if the browser is not signed in, or if its session has expired.

        Raises the problem `host-forbidden` if requests need no API key, but this one came through another host.
        """
        if self._access.is_open:
            self._access.check_local(request)
            return ANONYMOUS
        token = self.token(request)
        if token is None:
            return None
        is_refresh = "hx-request" in request.headers
        found = await self._find(hashed(token), is_refresh=is_refresh and request.method == "GET")
        if found is None:
            return None
        if found.key_id is not None:
            key = self._access.valid_key(found.key_id)
            visitor = None if key is None else visitor_of(key)
        elif self._settings.ops_oidc_issuer is not None:
            visitor = Visitor("", found.name, found.tenant_id, found.may_act)
        else:
            visitor = None
        # An automatic refresh of a page keeps the session alive only if the visitor is not allowed to change anything.
        # The session of any other visitor must end if it is not used.
        is_used = not is_refresh or (visitor is not None and not visitor.may_act)
        if is_used and found.idle_seconds > min(TOUCH_SECONDS, self._settings.ops_idle_seconds / 4):
            async with session(self._pool) as connection:
                await ops_sessions.touch_ops_session(connection, hashed(token))
            self._open.pop(hashed(token), None)
        return visitor

    async def _find(self, token_hash: bytes, *, is_refresh: bool) -> ops_sessions.OpsSession | None:
        """The session with this hash; None if it is unknown or has expired.

        When a page refreshes itself, this looks up the sessions of all open pages with one query per second.
        """
        now, pages = time.monotonic(), self._open
        page = pages.get(token_hash)
        if is_refresh and page is not None:
            page.refreshed_at = now
            if now - page.read_at < min(KNOWN_SECONDS, page.session.seconds_left):
                return page.session
        last = {token_hash: now}
        if is_refresh:
            last |= {each: page.refreshed_at for each, page in pages.items() if now - page.refreshed_at < OPEN_SECONDS}
        async with session(self._pool) as connection:
            found = await ops_sessions.find_ops_sessions(
                connection,
                list(last),
                session_seconds=self._settings.ops_session_seconds,
                idle_seconds=self._settings.ops_idle_seconds,
            )
        if is_refresh:
            # If a session has ended in the meantime, `_delete` has replaced `self._open`. `pages` is then the old
            # object, so its change has no effect, and the ended session does not return.
            pages.clear()
            pages.update({each.token_hash: _OpenPage(each, now, last[each.token_hash]) for each in found})
        return next((each for each in found if each.token_hash == token_hash), None)

    async def begin(self, request: Request, visitor: Visitor) -> str:
        """Signs a browser in, and returns its token. The token is new, so that no attacker can set it in advance."""
        token = secrets.token_urlsafe(32)
        async with session(self._pool) as connection:
            if previous := self.token(request):
                await self._delete(connection, previous)
            await ops_sessions.insert_ops_session(
                connection,
                hashed(token),
                key_id=visitor.key_id or None,
                name=visitor.name,
                tenant_id=visitor.tenant_id,
                may_act=visitor.may_act,
                session_seconds=self._settings.ops_session_seconds,
            )
        request.state.new_token = token
        return token

    async def end(self, request: Request, response: Response) -> None:
        if token := self.token(request):
            async with session(self._pool) as connection:
                await self._delete(connection, token)
        for is_https in (False, True):
            response.delete_cookie(**cookie(COOKIE, self._path, is_https=is_https))

    async def _delete(self, connection: AsyncSession, token: str) -> None:
        await ops_sessions.delete_ops_session(connection, hashed(token))
        self._open = {}

    def token(self, request: Request) -> str | None:
        """The browser's token: a new token that the response sends, or the cookie's token; None if there is neither."""
        return self.new_token(request) or self._cookie(request)

    def _cookie(self, request: Request) -> str | None:
        token = request.cookies.get(self._attributes(request)["key"], "")
        return token if len(token) == TOKEN_CHARACTERS and token.isascii() else None

    def new_token(self, request: Request) -> str | None:
        """The new token that the response must send, if any.

        While requests need no API key, each browser without a token gets a token, because forms need a CSRF token.
        """
        new: str | None = getattr(request.state, "new_token", None)
        if new is None and self._access.is_open and self._cookie(request) is None:
            new = request.state.new_token = secrets.token_urlsafe(32)
        return new

    def is_valid_csrf_token(self, request: Request, form: Form) -> bool:
        token = self.token(request)
        return token is not None and compare_digest(form.get(CSRF_FIELD, "").encode(), csrf_token(token).encode())

    def send_token(self, request: Request, response: Response, token: str) -> None:
        """Sends a token to the browser, in a cookie that lasts until the browser is closed."""
        response.set_cookie(**self._attributes(request), value=token, samesite="strict")

    def _attributes(self, request: Request) -> dict[str, Any]:
        return cookie(COOKIE, self._path, is_https=is_secure(request, self._settings.ops_url))


def hashed(token: str) -> bytes:
    """The hash of a token. The token is 32 random bytes, so one round of SHA-256 is enough."""
    return sha256(token.encode()).digest()


def csrf_token(token: str) -> str:
    return sha256(b"csrf " + token.encode()).hexdigest()


def visitor_of(key: ApiKey) -> Visitor | None:
    """The visitor with an API key; None if the key's scopes allow neither `operate` nor `read`."""
    if not key.scopes & {Scope.OPERATE, Scope.READ}:
        return None
    name = f"api key {shown(key.key_id)} ({key.name})"
    return Visitor(key.key_id, name, key.tenant_id, Scope.OPERATE in key.scopes, key.name)
