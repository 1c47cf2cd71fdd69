"""A sign-in that has begun: a signed cookie keeps it in the browser for ten minutes."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Final, Self

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.ops_page.origins import is_secure
from dispatcher.config import Settings

MAX_SECONDS: Final = 600
"""How long a visitor may take at the issuer."""
MAX_TARGET_CHARACTERS: Final = 1000
"""The longest target that the cookie keeps, because a cookie may have 4,096 characters. Instead of a longer target, the
visitor gets the first page."""
_COOKIE: Final = "dispatcher-ops-openid"
_ALGORITHM: Final = "HS256"


@dataclass(frozen=True, slots=True)
class PendingSignIn:
    """What the browser must bring back from the issuer, and what the ID token must contain.

    Attributes:
        state: A random text that the issuer returns with the authorization code. It shows that this browser began the
            sign-in.
        nonce: A random text that the ID token must contain. It shows that the issuer made the token for this sign-in.
        verifier: The secret of PKCE, without which a stolen authorization code is useless.
        target: The page to show afterwards, below `site.path`.
    """

    state: str
    nonce: str
    verifier: str
    target: str

    @classmethod
    def new(cls, target: str) -> Self:
        """A new sign-in with random values. If `target` is too long or is not ASCII, the target is `/`."""
        is_short = target.isascii() and len(target) <= MAX_TARGET_CHARACTERS
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state, nonce, verifier, target if is_short else "/")


class PendingCookie:
    """Sends and reads the cookie that keeps a pending sign-in.

    The cookie is SameSite=Lax: when the issuer's site redirects to ours, browsers do not send a strict cookie. The
    cookie is signed with a key that is derived from the client secret, so that every process on every host can check
    it.
    """

    def __init__(self, settings: Settings, path: str) -> None:
        """
        Args:
            path: The prefix that the paths of all pages have, such as /ops.
        """
        self._settings = settings
        self._path = path
        secret = settings.ops_oidc_client_secret.encode()
        self._key = OctKey.import_key(hmac.digest(secret, b"email-dispatcher pending sign-in", "sha256"))

    def send(self, request: Request, response: Response, pending: PendingSignIn) -> None:
        """Sends the cookie, which keeps a sign-in in the browser."""
        claims = {**asdict(pending), "exp": int(time.time()) + MAX_SECONDS}
        text = jwt.encode({"alg": _ALGORITHM}, claims, self._key)
        is_https, name, path = self._attributes(request)
        response.set_cookie(name, text, max_age=MAX_SECONDS, path=path, secure=is_https, httponly=True, samesite="lax")

    def read(self, request: Request) -> PendingSignIn | None:
        """The sign-in that this browser has begun; None if the cookie is missing, forged, or older than ten minutes."""
        try:
            token = jwt.decode(
                request.cookies.get(self._attributes(request)[1], ""), self._key, algorithms=[_ALGORITHM]
            )
            jwt.JWTClaimsRegistry(exp={"essential": True}).validate(token.claims)
            return PendingSignIn(*(str(token.claims[name]) for name in PendingSignIn.__slots__))
        except (JoseError, ValueError, KeyError):
            return None

    def delete(self, request: Request, response: Response) -> None:
        """Deletes the cookie."""
        is_https, name, path = self._attributes(request)
        response.delete_cookie(name, path=path, secure=is_https, httponly=True, samesite="lax")

    def _attributes(self, request: Request) -> tuple[bool, str, str]:
        """Whether the cookie is sent only over HTTPS, its name, and its path."""
        if is_secure(request, self._settings.ops_url):
            return True, f"__Host-{_COOKIE}", "/"
        return False, _COOKIE, self._path or "/"
