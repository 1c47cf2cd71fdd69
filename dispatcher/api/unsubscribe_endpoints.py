"""One-click unsubscribe (RFC 8058): the page and the action behind the List-Unsubscribe header.

A request needs no API key: the token in its path is signed. GET changes nothing, because mail scanners follow links. A
forged token gets the same answer as the token of an email that does not exist, and takes no database session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dispatcher.admission.problems import Problem
from dispatcher.api.access import AccessControl
from dispatcher.ops.suppressions import unsubscribe
from dispatcher.store.address_hashes import AddressHasher, is_unsubscribe_token
from dispatcher.store.connections import Pool, session

CALLER: Final = "unsubscribe"
"""All unsubscribe requests count as this one caller of the API. So together they have the limits of one caller, and
cannot displace other clients."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>Unsubscribe</title><h1>Unsubscribe</h1>{}</html>"
)
_QUESTION: Final = _PAGE.format(
    '<p>Do you want to get no more emails from this sender?</p><form method="post"><button>Unsubscribe</button></form>'
)
_DONE: Final = _PAGE.format("<p>You are unsubscribed.</p>")


@dataclass(slots=True)
class UnsubscribeEndpoints:
    """Serves the links of List-Unsubscribe headers: asks for confirmation, then suppresses the recipient."""

    access: AccessControl
    pool: Pool
    _hasher: AddressHasher | None = None

    async def ask(self, request: Request) -> Response:
        with self.access.slot(CALLER):
            await self._check(request.path_params["token"])
        return HTMLResponse(_QUESTION, headers=HEADERS)

    async def unsubscribe(self, request: Request) -> Response:
        """Suppresses the recipient of the token. Idempotent. Does not read the body."""
        with self.access.slot(CALLER):
            await self._check(request.path_params["token"])
            async with session(self.pool) as connection:
                if not await unsubscribe(connection, request.path_params["token"]):
                    raise Problem("not-found")
        return HTMLResponse(_DONE, headers=HEADERS)

    async def _check(self, token: str) -> None:
        if is_unsubscribe_token(token):
            if self._hasher is None:
                self._hasher = await AddressHasher.open(self.pool)
            if self._hasher.read_unsubscribe_token(token) is not None:
                return
        raise Problem("not-found")
