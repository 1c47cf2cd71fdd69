"""An OpenID Connect issuer on the loopback: a real HTTP server that can misbehave.

It checks the client strictly: the redirect URI, PKCE, the client's secret, and that each code is redeemed once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import orjson
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.monitor.receiver import serving
from tests.waiting import DEADLINE_SECONDS

CLIENT_ID: Final = "dispatcher"
CLIENT_SECRET: Final = "a secret that no log may contain"
REDIRECT_URI: Final = "https://ops.example.com/mail/ops/sign-in/openid/return"
Claims = dict[str, Any]
Signer = Callable[[Claims, RSAKey], str]


@dataclass(frozen=True, slots=True)
class Code:
    nonce: str
    challenge: str


@cache
def _first_key() -> RSAKey:
    """The same for all issuers, because a new key takes 100 ms."""
    return RSAKey.generate_key(2048)


def signed(claims: Claims, key: RSAKey) -> str:
    return jwt.encode({"alg": "RS256", "kid": key.thumbprint()}, claims, key)


def unsigned(claims: Claims, _key: RSAKey) -> str:
    return f"{_part({'alg': 'none'})}.{_part(claims)}."


def signed_with_the_public_key(claims: Claims, key: RSAKey) -> str:
    """A token whose HS256 secret is the public key, which everybody knows."""
    head = f"{_part({'alg': 'HS256', 'kid': key.thumbprint()})}.{_part(claims)}"
    signature = hmac.digest(key.as_pem(private=False), head.encode(), "sha256")
    return f"{head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _part(content: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(content)).rstrip(b"=").decode()


class Issuer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = _first_key()
        self.published = [self.key]
        self.claims: dict[str, Any] = {}  # replaces claims of the ID tokens; None removes a claim
        self.sign: Signer = signed
        self.url = f"http://127.0.0.1:{self.server_port}/realms/ops"
        self.name = self.url  # the issuer that the metadata names
        self.codes: dict[str, Code] = {}
        self.may_answer = threading.Event()  # while it is cleared, no request is answered
        self.may_answer.set()
        self.waiting = threading.Semaphore(0)  # released by each request that waits for `may_answer`

    def rotate(self) -> None:
        self.key = RSAKey.generate_key(2048)
        self.published = [self.key]

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.name,
            "authorization_endpoint": f"{self.url}/authorize?theme=dark",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "scopes_supported": ["openid", "email", "groups"],
        }

    def authorize(self, query: Mapping[str, str]) -> str:
        expected = {
            "client_id": CLIENT_ID,
            "redirect_uri": REDIRECT_URI,
            "response_type": "code",
            "scope": "openid email groups",
            "code_challenge_method": "S256",
            "theme": "dark",
        }
        assert {name: query.get(name) for name in expected} == expected
        code = secrets.token_urlsafe(16)
        self.codes[code] = Code(query["nonce"], query["code_challenge"])
        return f"{REDIRECT_URI}?{urlencode({'code': code, 'state': query['state'], 'iss': self.name})}"

    def redeem(self, form: Mapping[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        login = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if authorization != f"Basic {login}":
            return 401, {"error": "invalid_client"}
        code = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if code is None or form.get("redirect_uri") != REDIRECT_URI or code.challenge != challenge:
            return 400, {"error": "invalid_grant", "error_description": "for ann@example.org"}
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT_ID, "sub": "ann-1", "iat": now, "exp": now + 300, "nonce": code.nonce}
        claims |= {"email": "ann@example.org", "email_verified": True, "groups": ["staff", "mail-operators"]}
        claims = {name: value for name, value in (claims | self.claims).items() if value is not None}
        return 200, {"token_type": "Bearer", "access_token": "unused", "id_token": self.sign(claims, self.key)}


class _Handler(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        self._wait()
        parts = urlsplit(self.path)
        match parts.path.removeprefix("/realms/ops"):
            case "/.well-known/openid-configuration":
                self._answer(200, self.server.metadata())
            case "/keys":
                self._answer(200, {"keys": [key.as_dict(private=False) for key in self.server.published]})
            case "/authorize":
                query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                self.send_response(303)
                self.send_header("Location", self.server.authorize(query))
                self.send_header("Content-Length", "0")
                self.end_headers()
            case _:
                self._answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._wait()
        form = {name: values[-1] for name, values in parse_qs(body).items()}
        self._answer(*self.server.redeem(form, self.headers.get("Authorization", "")))

    def _wait(self) -> None:
        if not self.server.may_answer.is_set():
            self.server.waiting.release()
            self.server.may_answer.wait(DEADLINE_SECONDS)

    def _answer(self, status: int, document: Mapping[str, Any]) -> None:
        body = orjson.dumps(document)
        with suppress(ConnectionError):  # the client may have stopped waiting
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    with Issuer() as issuer, serving(issuer, issuer.may_answer):
        yield issuer
