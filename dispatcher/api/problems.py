"""Problems: every answer that is no success, as RFC 9457 has it, each kind declared once.

A problem's `code` is its kind, and so is the end of its `type`; `errors` names what in the request is wrong, by a JSON
pointer into the body, a header's name or a parameter's. Nothing of the request is repeated: it may be private.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import quote

import orjson
from starlette.responses import Response

MEDIA_TYPE: Final = "application/problem+json"
_TYPE: Final = "urn:email-dispatcher:problem:"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem.

    Attributes:
        status: The HTTP status.
        title: The same sentence whatever the request.
    """

    status: int
    title: str


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "malformed-request": Kind(400, "The request cannot be read."),
        "malformed-json": Kind(400, "The body is not JSON."),
        "invalid-parameter": Kind(400, "A parameter has a value that it cannot have."),
        "idempotency-key-missing": Kind(400, "Neither the header Idempotency-Key nor the body gives the email a key."),
        "idempotency-key-invalid": Kind(400, "The header Idempotency-Key is not usable."),
        "unauthorized": Kind(401, "An API key is needed in the header Authorization."),
        "insufficient-scope": Kind(403, "The API key may not do this."),
        "tenant-forbidden": Kind(403, "The API key is another tenant's."),
        "sender-forbidden": Kind(403, "The API key may not send from this address."),
        "host-forbidden": Kind(403, "Without API keys, requests must be for this host itself."),
        "not-found": Kind(404, "There is nothing here."),
        "method-not-allowed": Kind(405, "The method is not allowed here."),
        "request-timeout": Kind(408, "The request did not arrive in time."),
        "idempotency-key-in-use": Kind(409, "An email with this key is being enqueued at this moment."),
        "not-held": Kind(409, "The email is not held, or cannot be sent again."),
        "body-too-large": Kind(413, "The body is too large."),
        "unsupported-media-type": Kind(415, "The body must be application/json."),
        "invalid-email": Kind(422, "The email breaks a rule."),
        "email-not-allowed": Kind(422, "The email has what this API does not allow."),
        "no-capable-provider": Kind(422, "No configured provider could ever carry the email."),
        "idempotency-key-reused": Kind(422, "The key names an email with another content."),
        "invalid-body": Kind(422, "The body does not have the form that is needed."),
        "rate-limited": Kind(429, "The API key sends too many requests."),
        "quota-exceeded": Kind(429, "The API key has used up its recipients of today."),
        "headers-too-large": Kind(431, "The request's head is too large."),
        "internal-error": Kind(500, "Something failed that should not."),
        "overloaded": Kind(503, "Too much is going on at once."),
        "database-unavailable": Kind(503, "The database does not answer."),
    }
)


@dataclass(frozen=True, slots=True)
class Flaw:
    """What in the request is wrong.

    Attributes:
        place: `pointer` (a JSON pointer into the body), `header` or `parameter`.
        name: Which.
        detail: Why, without what stands there.
    """

    place: str
    name: str
    detail: str

    def document(self) -> dict[str, str]:
        """As it stands under `errors`."""
        return {self.place: self.name, "detail": self.detail}


class Problem(Exception):
    """A request is refused, or cannot be served.

    Attributes:
        code: A word of `KINDS`.
        detail: A sentence about this request; None where the title says it all.
        flaws: What in the request is wrong.
        retry_after: Seconds after which the same request may succeed.
        closes: Whether the connection ends with the answer, because a part of the request is left unread.
    """

    def __init__(
        self,
        code: str,
        detail: str | None = None,
        *,
        flaws: Sequence[Flaw] = (),
        retry_after: int | None = None,
        closes: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail
        self.flaws = tuple(flaws)
        self.retry_after = retry_after
        self.closes = closes
        self.headers = headers

    @property
    def status(self) -> int:
        """The HTTP status."""
        return KINDS[self.code].status

    def alone(self) -> Self:
        """The problem as a value: without its traceback and context, whose frames have all that a request had."""
        self.__context__ = None
        return self.with_traceback(None)

    def document(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        kind = KINDS[self.code]
        document: dict[str, Any] = {"type": _TYPE + self.code, "title": kind.title, "status": kind.status}
        document["code"] = self.code
        if self.detail:
            document["detail"] = self.detail
        if self.flaws:
            document["errors"] = [flaw.document() for flaw in self.flaws]
        return document

    def response(self) -> Response:
        """The problem as an answer."""
        headers = dict(self.headers)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.closes:
            headers["Connection"] = "close"
        return Response(orjson.dumps(self.document()), self.status, headers, MEDIA_TYPE)


_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def pointer_of(field: str, below: str = "") -> str:
    """The JSON pointer, as a URI fragment, to a field that the domain names, such as `to[1]`.

    Args:
        below: Where the email stands in the body, such as `/emails/3`.
    """
    if field == "email":  # the domain's word for the whole
        return f"#{below}"
    if field.startswith("headers."):  # a header's name may have dots in it
        steps = ["headers", field.removeprefix("headers.")]
    else:
        steps = [name or index for name, index in _STEP.findall(field)]
    return "#" + below + "".join(f"/{_escaped(step)}" for step in steps)


def _escaped(step: str) -> str:
    """RFC 6901, section 3, then 6: and percent-encoded where a fragment cannot hold it."""
    return quote(step.replace("~", "~0").replace("/", "~1"), safe="!$&'()*+,;=:@?-._~")
