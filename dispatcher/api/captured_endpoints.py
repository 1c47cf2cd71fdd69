"""Finds, reads, awaits and deletes captured emails, for tests of applications.

The endpoints exist only on a machine for development: each provider captures, the operators' page is on, and the API
listens on the loopback and may be used without a key. Requests must come directly from this host, even with a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.admission.problems import Problem
from dispatcher.api.access import AccessControl
from dispatcher.api.face import Endpoint, row_schemas
from dispatcher.api.operation import Operation, object_schema, path_parameter, reference
from dispatcher.api.ops_page.origins import is_cross_site
from dispatcher.api.status_endpoints import Parameter, parameters
from dispatcher.domain import kinds
from dispatcher.domain.api_key import Scope
from dispatcher.domain.instant import parse_instant
from dispatcher.ops import captured
from dispatcher.ops.captured import CapturedFilter, CapturedMessage, CapturedRow, parse_name

WAIT_SECONDS: Final = 10.0
MAX_WAIT_SECONDS: Final = 60.0
MAX_WAITS: Final = 32
POLL_SECONDS: Final = 0.05
MAX_ROWS: Final = 100


class CapturedEndpoints:
    """When `stop` is set, requests no longer wait."""

    def __init__(self, access: AccessControl, folders: Sequence[Path], stop: asyncio.Event) -> None:
        self._access = access
        self._folders = folders
        self._stop = stop
        self._waits = asyncio.Semaphore(MAX_WAITS)

    @property
    def routes(self) -> list[tuple[str, str, Endpoint, Operation]]:
        one = "/v1/captured/{captured_id}"
        return [
            ("GET", "/v1/captured", self.find, FIND),
            ("DELETE", "/v1/captured", self.delete_all, DELETE_ALL),
            ("GET", "/v1/captured/wait", self.wait, WAIT),
            ("GET", one, self.read, READ),
            ("DELETE", one, self.delete, DELETE),
        ]

    async def find(self, request: Request) -> Response:
        async with self._admitted(request, _FILTER | _PAGE) as given:
            limit = given.pop("limit", MAX_ROWS)
            find = partial(captured.find_captured, self._folders, _filter(given), limit=limit)
            found, last = await asyncio.to_thread(find)
        return _json({"captured": found, "next": None if last is None else last.text})

    async def read(self, request: Request) -> Response:
        async with self._admitted(request, {}):
            return await self._read(request.path_params["captured_id"])

    async def wait(self, request: Request) -> Response:
        async with self._admitted(request, _FILTER | _TIMEOUT) as given:
            if self._waits.locked():
                raise Problem("overloaded", f"{MAX_WAITS} requests wait already.", retry_after=1)
            async with self._waits:
                until = time.monotonic() + given.pop("timeout", WAIT_SECONDS)
                find = partial(captured.find_captured, self._folders, _filter(given), limit=1, is_oldest_first=True)
                while not (self._stop.is_set() or await request.is_disconnected()):
                    began = time.monotonic()
                    found, rest = await asyncio.to_thread(find)
                    if found:
                        return await self._read(found[0].id)
                    if (now := time.monotonic()) >= until and (rest is None or now >= until + WAIT_SECONDS):
                        break
                    # A folder with very many emails must not keep the process busy.
                    await asyncio.sleep(0 if rest else max(POLL_SECONDS, 4 * (now - began)))
        raise Problem("nothing-captured")

    async def delete(self, request: Request) -> Response:
        async with self._admitted(request, {}):
            name = parse_name(request.path_params["captured_id"])
            if name is None or not await asyncio.to_thread(captured.delete_captured, self._folders, name):
                raise Problem("not-found")
        return _json({"deleted": 1})

    async def delete_all(self, request: Request) -> Response:
        async with self._admitted(request, {}):
            return _json({"deleted": await asyncio.to_thread(captured.delete_captured, self._folders)})

    async def _read(self, captured_id: str) -> Response:
        name = parse_name(captured_id)
        email = None if name is None else await asyncio.to_thread(captured.read_captured, self._folders, name)
        if email is None:
            raise Problem("not-found")
        return _json(email.message)

    @asynccontextmanager
    async def _admitted(self, request: Request, known: Mapping[str, Parameter]) -> AsyncIterator[dict[str, Any]]:
        """Admits those who may see the page Captured, but not through a proxy and not from another website. Returns the
        request's parameters."""
        self._access.check_local(request)
        if is_cross_site(request, None):
            raise Problem("host-forbidden", "The request came from another website.")
        async with self._access.admit(request, Scope.OPERATE) as caller:
            if caller.key is not None and caller.key.tenant_id is not None:
                raise Problem(
                    "insufficient-scope", "Use a key for all tenants: their captured emails are in one folder."
                )
            yield parameters(request, known)


def _filter(given: Mapping[str, Any]) -> CapturedFilter:
    return CapturedFilter(**{_FIELDS.get(name, name): value for name, value in given.items()})


def _nanoseconds(text: str) -> int:
    """When the captured email with this id was captured; or a time."""
    name = parse_name(text)
    if name is not None:
        return name.captured_ns
    try:
        return round(parse_instant(text).timestamp() * 1_000_000) * 1000
    except ValueError:
        raise ValueError("must be a time in ISO 8601, or the id of a captured email") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _kind(kind: kinds.Kind[Any], about: str) -> Parameter:
    return Parameter(kind.of_text, kind.schema, about)


_FIELDS: Final = {"after": "after_ns", "before": "before_ns"}
_PART: Final = kinds.text(1000)
_TIME: Final = {"type": "string", "maxLength": 100}
_FILTER: Final = {
    "to": _kind(_PART, "A recipient's whole address; or a part of the recipients, such as `@example.org`."),
    "subject": _kind(_PART, "A part of the subject."),
    "text": _kind(_PART, "A part of the sender, the recipients, the subject, the text or the HTML."),
    "after": Parameter(
        _nanoseconds, _TIME, "Only emails that were captured after this time, or after this email's id."
    ),
}
_PAGE: Final = {
    "before": Parameter(_nanoseconds, _TIME, "Only older emails: a time, or `next` of the page before."),
    "limit": _kind(kinds.whole(1, MAX_ROWS), "The most rows."),
}
_TIMEOUT: Final = {"timeout": _kind(kinds.number(0, MAX_WAIT_SECONDS), "How many seconds to wait; 10 by default.")}
_NULLABLE_TEXT: Final = {"type": ["string", "null"]}
_SCHEMAS: Final = row_schemas([CapturedRow, CapturedMessage]) | {
    "CapturedRows": object_schema(
        {"captured": {"type": "array", "items": reference("CapturedRow")}, "next": _NULLABLE_TEXT}
    ),
    "Deleted": object_schema({"deleted": {"type": "integer"}}),
}


def _operation(
    name: str, summary: str, description: str, schema: str, given: Mapping[str, Parameter], *problems: str
) -> Operation:
    in_path = (path_parameter("captured_id", {"type": "string"}, "The captured email's id."),)
    return Operation(
        name=name,
        summary=summary,
        description=description,
        response_schema=schema,
        parameters=in_path if "not-found" in problems else tuple(one.document(each) for each, one in given.items()),
        problems=("invalid-parameter", *problems),
        schemas=_SCHEMAS,
    )


FIND: Final = _operation(
    "list_captured",
    "Find captured emails",
    "Newest first. A search looks at 1,000 emails: while `next` is not null, pass it as `before` to continue.",
    "CapturedRows",
    _FILTER | _PAGE,
)
WAIT: Final = _operation(
    "wait_for_captured",
    "Wait for a captured email",
    "Answers with the oldest email that matches, as soon as there is one, or with `nothing-captured`.",
    "CapturedMessage",
    _FILTER | _TIMEOUT,
    "nothing-captured",
)
READ: Final = _operation(
    "get_captured",
    "Get a captured email",
    "Its text, HTML, links, attachments, and what mail clients do not support in it.",
    "CapturedMessage",
    {},
    "not-found",
)
DELETE: Final = _operation("delete_captured", "Delete a captured email", "It is gone.", "Deleted", {}, "not-found")
DELETE_ALL: Final = _operation("delete_all_captured", "Delete all captured emails", "They are gone.", "Deleted", {})
