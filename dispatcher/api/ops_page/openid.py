"""OpenID Connect: asks the issuer who has signed in (authorization code with PKCE), and checks the ID token.

Authlib builds the requests and checks the claims, joserfc checks the signature, and our own transport sends the
requests. See docs/decisions/0049-openid-connect.md.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from authlib.oauth2.client import OAuth2Client
from authlib.oauth2.rfc6749.parameters import prepare_token_request
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.plain_text import cut
from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError
from dispatcher.transport.call import Deadline, NoFreeConnection
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_proxy import proxy_for
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.version import VERSION

SECONDS: Final = 8.0
"""How long the issuer may take for all answers that one page needs."""
METADATA_SECONDS: Final = 300.0
"""How long the issuer's metadata is cached. Keys are read for each sign-in, so a rotated key works immediately."""
CONCURRENT_SIGN_INS: Final = 8
MAX_TARGET_CHARACTERS: Final = 1000
"""The longest target that is kept, because a cookie may have 4,096 characters. Instead of a longer target, the visitor
gets the first page."""
LEEWAY_SECONDS: Final = 60
"""How far the clocks of the issuer and of this host may differ."""
ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519"),
)
"""The accepted algorithms of signatures. All need a private key of the issuer. HS256 is not accepted, because an
attacker could use the issuer's public key as its secret."""
_KEY_TYPES: Final = frozenset({"RSA", "EC", "OKP"})
_TRY_AGAIN: Final = "Try again, or sign in with an API key."
_SIGN_IN_AGAIN: Final = "Sign in again. If this repeats, the API's log has the reason (ops.sign_in_failed)."


@dataclass(frozen=True, slots=True)
class PendingSignIn:
    """A sign-in that has begun: what the browser must bring back, and what the ID token must contain."""

    state: str  # random; the issuer returns it with the authorization code. Shows that this browser began the sign-in
    nonce: str  # random; in the ID token. Shows that the issuer made the token for this sign-in
    verifier: str  # the secret of PKCE, without which a stolen authorization code is useless
    target: str  # the page to show afterwards, below `site.path`

    @classmethod
    def new(cls, target: str) -> Self:
        is_short = target.isascii() and len(target) <= MAX_TARGET_CHARACTERS
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state, nonce, verifier, target if is_short else "/")


class OpenIdIssuer:
    """A client of the OpenID Connect issuer, which sends the browser back to `redirect_uri`."""

    def __init__(self, settings: Settings, redirect_uri: str, *, seconds: float = SECONDS) -> None:
        assert settings.ops_oidc_issuer is not None
        self._issuer = settings.ops_oidc_issuer
        self._settings = settings
        self._redirect_uri = redirect_uri
        self._seconds = seconds
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._transports: dict[tuple[str, str], HttpTransport] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_SIGN_INS)

    async def sign_in_url(self, pending: PendingSignIn) -> str:
        """The URL of the issuer at which the visitor signs in. Raises PageError if the issuer is not available."""
        async with self._deadline() as deadline:
            metadata = await self._read_metadata(deadline)
        offered = metadata.get("scopes_supported", ["email"])
        scopes = ["openid", "email", self._settings.ops_oidc_claim]
        # Some issuers put a claim into the token only if the scope of the same name is requested. So request this scope
        # for our claims, if the issuer offers it.
        wanted = [name for name in scopes if name == "openid" or (isinstance(offered, list) and name in offered)]
        client = self._client(metadata, " ".join(dict.fromkeys(wanted)))
        url: str = client.create_authorization_url(
            self._endpoint(metadata, "authorization_endpoint"),
            state=pending.state,
            nonce=pending.nonce,
            code_verifier=pending.verifier,
        )[0]
        return url

    async def claims(self, code: str, pending: PendingSignIn) -> Mapping[str, Any]:
        """The claims about the visitor, in exchange for the authorization code that the browser brought.

        Raises PageError if the issuer is not available, refuses the code, or its ID token is not valid.
        """
        async with self._deadline() as deadline:
            metadata = await self._read_metadata(deadline)
            tokens = await self._redeem(metadata, code, pending, deadline)
            keys = await self._json(self._endpoint(metadata, "jwks_uri"), deadline)
        try:
            return self._checked(tokens, keys, pending.nonce)
        except (JoseError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error) if isinstance(error, JoseError) else "it is malformed"
            raise PageError(403, f"The issuer's ID token is not valid: {cut(reason, 200)}.", _SIGN_IN_AGAIN) from error

    def _checked(self, tokens: Mapping[str, Any], keys: Mapping[str, Any], nonce: str) -> Mapping[str, Any]:
        # Leave out keys of unknown types: a single key of an unknown type would make the import of all keys fail.
        usable = [key for key in keys["keys"] if key.get("kty") in _KEY_TYPES and key.get("use", "sig") == "sig"]
        token = jwt.decode(
            str(tokens["id_token"]),
            KeySet.import_key_set({"keys": usable}),
            registry=JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False),
        )
        client_id = self._settings.ops_oidc_client_id
        required = {
            "iss": {"essential": True, "value": self._issuer},
            "aud": {"essential": True, "value": client_id},
            "sub": {"essential": True, "validate": lambda _, value: isinstance(value, str) and not value.isspace()},
        }
        known = {"nonce": nonce, "client_id": client_id, "access_token": tokens.get("access_token")}
        claims = CodeIDToken(token.claims, token.header, required, known)
        claims.validate(leeway=LEEWAY_SECONDS)
        return dict(claims)

    async def _redeem(
        self, metadata: Mapping[str, Any], code: str, pending: PendingSignIn, deadline: float
    ) -> Mapping[str, Any]:
        client = self._client(metadata)
        body = prepare_token_request(
            "authorization_code", code=code, redirect_uri=self._redirect_uri, code_verifier=pending.verifier
        )
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        auth = client.client_auth(client.token_endpoint_auth_method)
        url, headers, body = auth.prepare("POST", self._endpoint(metadata, "token_endpoint"), headers, body)
        response = await self._send(url, deadline, headers, body.encode())
        error = response.document.get("error")
        if response.status == 200 and "id_token" in response.document:
            return response.document
        if error in ("invalid_client", "unauthorized_client"):
            remedy = "Correct DISPATCHER_OPS_OIDC_CLIENT_ID and DISPATCHER_OPS_OIDC_CLIENT_SECRET. " + _TRY_AGAIN
            raise PageError(503, f"The issuer does not accept this site as a client: {error}.", remedy)
        if isinstance(error, str) and response.status < 500:
            raise PageError(403, f"The issuer refused the sign-in: {cut(error, 100)}.", _SIGN_IN_AGAIN)
        raise _unavailable(f"the token endpoint answered {response.status} without an ID token")

    def _client(self, metadata: Mapping[str, Any], scope: str = "openid") -> Any:
        methods = metadata.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        is_basic = isinstance(methods, list) and "client_secret_basic" in methods
        return OAuth2Client(
            session=None,
            client_id=self._settings.ops_oidc_client_id,
            client_secret=self._settings.ops_oidc_client_secret,
            token_endpoint_auth_method="client_secret_basic" if is_basic else "client_secret_post",
            scope=scope,
            redirect_uri=self._redirect_uri,
            code_challenge_method="S256",
        )

    async def _read_metadata(self, deadline: float) -> Mapping[str, Any]:
        if self._metadata is not None and time.monotonic() - self._metadata[0] < METADATA_SECONDS:
            return self._metadata[1]
        found = await self._json(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration", deadline)
        if found.get("issuer") != self._issuer:
            name = cut(str(found.get("issuer")), 200)
            raise PageError(
                503,
                f"The OpenID Connect issuer's name is {name}, but DISPATCHER_OPS_OIDC_ISSUER is {self._issuer}.",
                "Correct DISPATCHER_OPS_OIDC_ISSUER. " + _TRY_AGAIN,
            )
        self._metadata = time.monotonic(), found
        return found

    def _endpoint(self, metadata: Mapping[str, Any], name: str) -> str:
        """A URL from the metadata. Only an issuer on the loopback may use HTTP. Raises PageError."""
        url = metadata.get(name)
        schemes = {"https", urlsplit(self._issuer).scheme}
        try:
            parts = urlsplit(url if isinstance(url, str) else "")
            is_usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not isinstance(url, str) or not is_usable or not (url.isascii() and url.isprintable()):
            raise _unavailable(f"the metadata has no usable {name}")
        return url

    async def _json(self, url: str, deadline: float) -> Mapping[str, Any]:
        response = await self._send(url, deadline)
        if response.status != 200:
            raise _unavailable(f"{urlsplit(url).path} answered {response.status}")
        if not response.document:
            raise _unavailable(f"{urlsplit(url).path} did not send a JSON object")
        return response.document

    async def _send(
        self, url: str, deadline: float, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> HttpResponse:
        """Sends a POST request if there is a body, else a GET request. Follows no redirect."""
        sent = {"User-Agent": f"EmailDispatcher/{VERSION}", "Accept": "application/json", **(headers or {})}
        try:
            transport = self._transport(url)
            if body is None:
                return await transport.get(url, sent, deadline)
            return await transport.post(url, sent, body, Deadline(deadline))
        except (NoFreeConnection, RequestNotSent, NoResponse, ConfigurationError, OSError) as error:
            raise _unavailable(str(error)) from error

    def _transport(self, url: str) -> HttpTransport:
        """The connections to a server, created once: to read all trusted certificates takes 20 ms."""
        parts = urlsplit(url)
        server = parts.scheme, parts.netloc
        if server not in self._transports:
            proxy = proxy_for(url) if parts.scheme == "https" else None
            self._transports[server] = HttpTransport(
                connections=CONCURRENT_SIGN_INS, ca_file=self._settings.ca_file, proxy=proxy
            )
        return self._transports[server]

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[float]:
        """Yields the deadline for the issuer's answers. Raises PageError if too many visitors wait for answers."""
        if self._slots.locked():
            raise PageError(503, "Too many people sign in at the moment.", "Try again in a few seconds.", retry_after=2)
        async with self._slots:
            yield asyncio.get_running_loop().time() + self._seconds


def _unavailable(reason: str) -> PageError:
    return PageError(503, f"The OpenID Connect issuer is not available: {reason}.", _TRY_AGAIN)
