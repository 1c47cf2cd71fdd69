"""A double of the token endpoints of Microsoft Entra and of Google."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import orjson

from tests.providers.listeners import listening

SECRETS = ("cl1ent~secret~value", "1//refresh~token~value", "renewed~refresh~value", "eyJ.token")


def entra(error: str, code: str, words: str) -> tuple[int, dict[str, object]]:
    """An error as Microsoft Entra answers it; here, it also repeats the client's secret."""
    described = f"{code}: {words} {SECRETS[0]} Trace ID: 1f2e Correlation ID: 3d4c Timestamp: 2026-11-23 12:00:00Z"
    return (401 if error == "invalid_client" else 400), {"error": error, "error_description": described}


REFUSALS: dict[str, tuple[int, dict[str, object]]] = {
    "tenant": entra("invalid_request", "AADSTS90002", "Tenant 'acme' not found."),
    "app": entra("unauthorized_client", "AADSTS700016", "Application was not found in the directory."),
    "secret": entra("invalid_client", "AADSTS7000215", "Invalid client secret provided."),
    "expired secret": entra("invalid_client", "AADSTS7000222", "The provided client secret keys are expired."),
    "consent": entra("invalid_grant", "AADSTS65001", "The user or administrator has not consented to use."),
    "scope": entra("invalid_scope", "AADSTS70011", "The provided value for scope is not valid."),
    "revoked": (400, {"error": "invalid_grant", "error_description": "Token has been expired or revoked."}),
    "grant": (401, {"error": "unauthorized_client", "error_description": "Unauthorized"}),
    "client": (401, {"error": "invalid_client", "error_description": f"no client {SECRETS[1]}"}),
    "odd": (403, {"error": f"no! {SECRETS[0]}"}),
    "page": (200, {"html": "a captive portal"}),
}


@dataclass
class TokenEndpoint:
    """Issues a new token for each request, then in `issued`, or gives the `answer` instead. `life` is the value of
    `expires_in` (None: left out), `renewed` a refresh token in the answer, and `date` the header of a clock that is
    wrong. While `open` is cleared, the server does not answer. `forms` are the fields of each request."""

    answer: tuple[int, dict[str, object]] | None = None
    life: object = 3600
    renewed: str = ""
    date: str = "Thu, 01 Jan 1970 00:00:00 GMT"
    open: asyncio.Event = field(default_factory=asyncio.Event)
    forms: list[dict[str, str]] = field(default_factory=list)
    issued: set[str] = field(default_factory=set)
    url: str = ""

    def __post_init__(self) -> None:
        self.open.set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
            length = int(head.partition("content-length: ")[2].partition("\r")[0])
            self.forms.append(dict(parse_qsl((await reader.readexactly(length)).decode())))
            await self.open.wait()
            status, document = self.answer or (200, self._grant())
            body = orjson.dumps(document)
            writer.write(
                f"HTTP/1.1 {status} x\r\nDate: {self.date}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )

    def _grant(self) -> dict[str, object]:
        token = f"{SECRETS[3]}-{len(self.forms)}"
        self.issued.add(token)
        life = {} if self.life is None else {"expires_in": self.life}
        renewed = {"refresh_token": self.renewed} if self.renewed else {}
        return {"token_type": "Bearer", "access_token": token, "scope": "x", **life, **renewed}


@asynccontextmanager
async def token_endpoint() -> AsyncIterator[TokenEndpoint]:
    endpoint = TokenEndpoint()
    async with listening(endpoint.talk) as port:
        endpoint.url = f"http://127.0.0.1:{port}/acme/oauth2/v2.0/token"
        yield endpoint
