"""One-click unsubscribe (RFC 8058): the page and the action behind the List-Unsubscribe header.

A request needs no API key: the token in its path is signed. GET changes nothing, because mail scanners follow links. A
forged token gets the same answer as the token of an email that does not exist, and takes no database session.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from dispatcher.admission.problems import Problem
from dispatcher.api.access import AccessControl
from dispatcher.ops.suppressions import unsubscribe
from dispatcher.store.address_hashes import AddressHasher, is_unsubscribe_token
from dispatcher.store.connections import Pool, session
from dispatcher.store.emails import find_email

CALLER: Final = "unsubscribe"
"""All unsubscribe requests count as this one caller of the API. So together they have the limits of one caller, and
cannot displace other clients."""
WHOLE: Final = "all"
"""The query with which a request means all emails of the tenant, and not only the topic of the email."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>Unsubscribe</title><main><h1>Unsubscribe</h1>{}</main></html>"
)
_QUESTION: Final = _PAGE.format(
    '<p>Do you want to get no more emails from this sender?</p><form method="post"><button>Unsubscribe</button></form>'
)
_QUESTION_OF_TOPIC: Final = (
    "<p>Which emails do you want to stop?</p>"
    '<form method="post"><p><button>Unsubscribe from “{topic}”</button></p>'
    f'<p><button formaction="?{WHOLE}" aria-describedby="all">Unsubscribe from all emails of this sender</button></p>'
    '<p id="all">All emails: also receipts and codes.</p></form>'
)
_DONE: Final = _PAGE.format("<p>You get no more emails from this sender.</p>")
_DONE_OF_TOPIC: Final = (
    "<p>You get no more emails of “{topic}” from this sender.</p>"
    f'<form method="post" action="?{WHOLE}"><button>Unsubscribe from all emails of this sender</button></form>'
)


@dataclass(slots=True)
class UnsubscribeEndpoints:
    """Serves the links of List-Unsubscribe headers: asks for confirmation, then suppresses the recipient."""

    access: AccessControl
    pool: Pool
    _hasher: AddressHasher | None = None

    async def ask(self, request: Request) -> Response:
        with self.access.slot(CALLER):
            email_id = await self._email_of(request.path_params["token"])
            email = await find_email(self.pool, email_id)
        return _page(None if email is None else email.topic, _QUESTION, _QUESTION_OF_TOPIC)

    async def unsubscribe(self, request: Request) -> Response:
        """Suppresses the recipient of the token. Idempotent. Does not read the body."""
        token, is_whole = request.path_params["token"], WHOLE in request.query_params
        with self.access.slot(CALLER):
            await self._email_of(token)
            async with session(self.pool) as connection:
                if not (left := await unsubscribe(connection, token, is_whole=is_whole)):
                    raise Problem("not-found")
        return _page(left[0], _DONE, _DONE_OF_TOPIC)

    async def _email_of(self, token: str) -> UUID:
        if is_unsubscribe_token(token):
            if self._hasher is None:
                self._hasher = await AddressHasher.open(self.pool)
            if (found := self._hasher.read_unsubscribe_token(token)) is not None:
                return found[0]
        raise Problem("not-found")


def _page(topic: str | None, of_sender: str, of_topic: str) -> HTMLResponse:
    text = of_sender if topic is None else _PAGE.format(of_topic.format(topic=escape(topic)))
    return HTMLResponse(text, headers=HEADERS)
