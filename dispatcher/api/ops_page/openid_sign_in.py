"""Signs visitors in with OpenID Connect: sends the browser to the issuer, checks the answer, and begins a session.

Needs the extra `oidc`.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from dispatcher.api.ops_page.attempts import AttemptLimiter
from dispatcher.api.ops_page.openid import OpenIdIssuer, PendingSignIn
from dispatcher.api.ops_page.origins import client_address, cookie, is_secure
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.plain_text import cut, visible
from dispatcher.api.ops_page.sessions import hashed
from dispatcher.api.ops_page.sign_in import check_attempts, target_of
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.config import Settings
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.scrub import scrub
from dispatcher.errors import InvalidEmail
from dispatcher.store import ops_sessions
from dispatcher.telemetry.log import get_log

START: Final = "/sign-in/openid"
RETURN: Final = "/sign-in/openid/return"
ALL_TENANTS: Final = "*"
MAX_SUBJECT_CHARACTERS: Final = 100
MAX_ADDRESS_CHARACTERS: Final = 80
MAX_CODE_CHARACTERS: Final = 4096
MAX_SECONDS: Final = 600
"""How long a visitor may take at the issuer."""
COOKIE: Final = "dispatcher-ops-openid"
COOKIE_ALGORITHM: Final = "HS256"


def routes(site: Site) -> list[Route]:
    """The routes to the issuer and back."""
    assert site.settings.ops_url is not None  # `config.rules` requires DISPATCHER_OPS_URL for OpenID Connect
    issuer = OpenIdIssuer(site.settings, site.settings.ops_url.rstrip("/") + RETURN)
    site.resources.push_async_callback(issuer.close)
    sign_in = _OpenIdSignIn(site, issuer)
    # A slow issuer must not delay the pages, so requests to these routes take no turn.
    return [
        Route(START, site.guarded(sign_in.start, takes_turn=False), methods=["GET"]),
        Route(RETURN, site.guarded(sign_in.finish, takes_turn=False), methods=["GET"]),
    ]


class _OpenIdSignIn:
    """The handlers of the two requests of a sign-in: before and after the visitor signs in at the issuer.

    A cookie keeps the pending sign-in in the browser. It is SameSite=Lax: when the issuer's site redirects to ours,
    browsers do not send a strict cookie. It is signed with a key that is derived from the client secret, so that every
    process on every host can check it. Failed sign-ins are counted separately from wrong API keys, so a visitor can
    still sign in with a key.
    """

    def __init__(self, site: Site, issuer: OpenIdIssuer) -> None:
        self._site = site
        self._issuer = issuer
        self._attempts = AttemptLimiter()
        secret = site.settings.ops_oidc_client_secret.encode()
        self._key = OctKey.import_key(hmac.digest(secret, b"email-dispatcher pending sign-in", "sha256"))

    async def start(self, request: Request) -> Response:
        target = target_of(request.query_params.get("next", ""))
        if await self._site.visitor(request) is not None:
            return self._site.see_other(target)
        client = client_address(request)
        check_attempts(self._attempts, client)
        pending = PendingSignIn.new(target)
        try:
            url = await self._issuer.sign_in_url(pending)
        except PageError as error:
            self._count_failure(client, error)
            raise
        response = RedirectResponse(url, 303)
        claims = {**asdict(pending), "exp": int(time.time()) + MAX_SECONDS}
        text = jwt.encode({"alg": COOKIE_ALGORITHM}, claims, self._key)
        response.set_cookie(**self._cookie(request), value=text, max_age=MAX_SECONDS, samesite="lax")
        return response

    async def finish(self, request: Request) -> Response:
        """Begins a session when the browser returns from the issuer.

        A request without the pending sign-in that it names is not counted: a page of another website could send such
        requests, and so keep the visitor out. All other requests end the pending sign-in.
        """
        pending = self._pending(request)
        if pending is None or not hmac.compare_digest(
            request.query_params.get("state", "").encode(), pending.state.encode()
        ):
            raise _not_begun()
        client = client_address(request)
        check_attempts(self._attempts, client)
        try:
            visitor = await self._visitor(request, pending)
            await self._site.sessions.begin(request, visitor)
            response = await self._site.page(request, visitor, "signed_in.html", next=target_of(pending.target))
            self._attempts.add_success(client)
        except PageError as error:
            self._count_failure(client, error)
            response = await self._site.error_page(request, error)
        response.delete_cookie(**self._cookie(request), samesite="lax")
        return response

    def _cookie(self, request: Request) -> dict[str, Any]:
        return cookie(COOKIE, self._site.path, is_https=is_secure(request, self._site.settings.ops_url))

    def _pending(self, request: Request) -> PendingSignIn | None:
        """The sign-in that this browser has begun; None if the cookie is missing, forged, or older than ten minutes."""
        text = request.cookies.get(self._cookie(request)["key"], "")
        try:
            token = jwt.decode(text, self._key, algorithms=[COOKIE_ALGORITHM])
            jwt.JWTClaimsRegistry(exp={"essential": True}).validate(token.claims)
            return PendingSignIn(*(str(token.claims[name]) for name in PendingSignIn.__slots__))
        except (JoseError, ValueError, KeyError):
            return None

    async def _visitor(self, request: Request, pending: PendingSignIn) -> Visitor:
        given = request.query_params
        async with self._site.session() as session:
            is_first = await ops_sessions.use_sign_in(session, hashed(pending.state))
        if not is_first:
            raise _not_begun()
        if "error" in given:
            message = f"The issuer did not sign you in: {cut(given['error'], 100)}."
            raise PageError(403, message, "Sign in again, or ask the administrator of the issuer.")
        code, own = given.get("code", ""), self._site.settings.ops_oidc_issuer
        # The answer can name its issuer (RFC 9207). Refuse a code of another issuer.
        if not code or len(code) > MAX_CODE_CHARACTERS or given.get("iss", own) != own:
            raise PageError(403, "The issuer's answer is not valid.", "Sign in again.")
        return visitor_of(await self._issuer.claims(code, pending), self._site.settings)

    def _count_failure(self, client: str, error: PageError) -> None:
        self._attempts.add_failure(client)
        get_log().warning("ops.sign_in_failed", reason=scrub(error.message))


def _not_begun() -> PageError:
    return PageError(
        403,
        "This browser did not begin this sign-in, has ended it already, or took more than ten minutes.",
        "Sign in again.",
    )


def visitor_of(claims: Mapping[str, Any], settings: Settings) -> Visitor:
    """The visitor that the claims of an ID token describe.

    Raises PageError if the claims allow the visitor neither to operate nor to read, or do not name exactly one tenant.
    """
    values = _values(claims, settings.ops_oidc_claim)
    may_act = not values.isdisjoint(settings.ops_oidc_operate)
    if not may_act and values.isdisjoint(settings.ops_oidc_read):
        claim = settings.ops_oidc_claim
        problem = "has no value that gives access" if values else "is missing or not verified"
        raise PageError(
            403,
            f"The issuer knows you, but you may not use this page: the claim {claim} of your ID token {problem}.",
            f"Ask an administrator for a value of {claim} that DISPATCHER_OPS_OIDC_OPERATE or DISPATCHER_OPS_OIDC_READ "
            "lists. The issuer must put this claim into the ID token.",
        )
    return Visitor("", _name(claims), _tenant(claims, settings.ops_oidc_tenant_claim), may_act)


def _values(claims: Mapping[str, Any], claim: str) -> set[str]:
    """The values of a claim; empty for the claim `email` if the issuer has not verified the address."""
    found, left_out = _find(claims, claim), claims.get("_claim_names")  # Microsoft Entra ID leaves out long lists
    if found is None and isinstance(left_out, dict) and claim in left_out:
        raise PageError(
            403,
            f"The issuer left the claim {claim} out of your ID token, because you are in more than 200 groups.",
            "Ask an administrator to give access by app roles (DISPATCHER_OPS_OIDC_CLAIM=roles), or to let the issuer "
            "put only the groups of this application into the ID token.",
        )
    if claim == "email" and claims.get("email_verified") is not True:
        return set()
    return {value for value in (found if isinstance(found, list) else [found]) if isinstance(value, str) and value}


def _find(claims: object, name: str) -> object:
    """The value of a claim; None if there is none. A name with dots is a path, unless a claim has this name."""
    if not isinstance(claims, dict):
        return None
    if name in claims:
        return claims[name]
    dots = [at for at, character in enumerate(name) if character == "."]
    return next((found for at in dots if (found := _find(claims.get(name[:at]), name[at + 1 :])) is not None), None)


def _tenant(claims: Mapping[str, Any], claim: str | None) -> str | None:
    if claim is None:
        return None
    values = _values(claims, claim)
    if values == {ALL_TENANTS}:
        return None
    try:
        return tenant(*values)
    except (InvalidEmail, TypeError):  # TypeError: the claim does not have exactly one value
        raise PageError(
            403,
            f"The issuer knows you, but the claim {claim} of your ID token does not name exactly one tenant.",
            f"Ask an administrator to set {claim} to a tenant's id, or to {ALL_TENANTS} for all tenants.",
        ) from None


def _name(claims: Mapping[str, Any]) -> str:
    """The visitor's name in the audit log. It begins with the subject, because only the subject never changes."""

    def short(text: str, at_most: int) -> str:
        return visible(text.replace("\n", " ").replace("\t", " "))[:at_most]

    name = f"openid {short(claims['sub'], MAX_SUBJECT_CHARACTERS)}"
    address = claims.get("email")
    if isinstance(address, str) and address and claims.get("email_verified") is not False:
        name += f" ({short(address, MAX_ADDRESS_CHARACTERS)})"
    return name
