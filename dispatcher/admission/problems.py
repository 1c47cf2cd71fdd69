"""The API's errors as RFC 9457 problem documents.

`code` identifies the problem's type, and is also the last part of `type`. `errors` locates each mistake by a JSON
pointer into the body, a header's name or a parameter's name. No problem repeats values: they may be private.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote

from dispatcher.domain.status import Status

MEDIA_TYPE: Final = "application/problem+json"
_TYPE: Final = "urn:email-dispatcher:problem:"


class ProblemType(NamedTuple):
    """The HTTP status of a problem type, and its title, which is the same for every request."""

    status: int
    title: str


PROBLEM_TYPES: Final[Mapping[str, ProblemType]] = MappingProxyType(
    {
        "malformed-request": ProblemType(
            400, "The HTTP request is malformed, or has a form that this API does not accept."
        ),
        "malformed-json": ProblemType(400, "The request body is not valid JSON."),
        "invalid-parameter": ProblemType(400, "A query parameter is unknown, repeated or has an invalid value."),
        "idempotency-key-missing": ProblemType(400, "The email has no message key."),
        "idempotency-key-invalid": ProblemType(400, "The Idempotency-Key header is not a valid key."),
        "unauthorized": ProblemType(401, "The request needs a valid API key in the Authorization header."),
        "insufficient-scope": ProblemType(403, "The API key lacks the scope that this operation needs."),
        "tenant-missing": ProblemType(400, "The API key is for all tenants, and the request has no tenant."),
        "tenant-forbidden": ProblemType(403, "The request has a different tenant than the API key."),
        "sender-forbidden": ProblemType(403, "The API key may not send from this address."),
        "lane-forbidden": ProblemType(403, "The API key may not use this lane."),
        "host-forbidden": ProblemType(403, "Without API keys, this API accepts only direct requests to localhost."),
        "signature-invalid": ProblemType(403, "The request is not signed by a provider that is configured here."),
        "signature-stale": ProblemType(403, "The request's signature is too old, or its time is in the future."),
        "topic-forbidden": ProblemType(403, "This API accepts no events from this SNS topic."),
        "not-found": ProblemType(404, "The resource does not exist."),
        "nothing-captured": ProblemType(404, "No captured email matched in time."),
        "method-not-allowed": ProblemType(405, "The path does not support this method."),
        "request-timeout": ProblemType(408, "The request did not arrive in time."),
        "idempotency-key-in-use": ProblemType(409, "Another transaction is enqueueing an email with this key."),
        "too-late": ProblemType(409, "The email can no longer be cancelled or rescheduled."),
        "not-resendable": ProblemType(409, "The email cannot be resent."),
        "may-repeat": ProblemType(409, "The email may have arrived, so a copy may repeat it."),
        "not-held": ProblemType(409, "The email is not held, or its content has been deleted."),
        "webhook-exists": ProblemType(409, "The tenant already has a webhook with this URL."),
        "too-many-webhooks": ProblemType(409, "The tenant already has the maximum number of webhooks."),
        "body-too-large": ProblemType(413, "The request body is too large."),
        "unsupported-media-type": ProblemType(
            415, "The request body must be application/json, in UTF-8, uncompressed."
        ),
        "invalid-email": ProblemType(422, "The email has an invalid field."),
        "email-not-allowed": ProblemType(
            422, "The email exceeds a limit of this API, or uses something that the API does not allow."
        ),
        "no-capable-provider": ProblemType(422, "No configured provider can send this email."),
        "idempotency-key-reused": ProblemType(422, "An email with this key and different content exists."),
        "invalid-body": ProblemType(422, "The request body has a missing, unknown or invalid field."),
        "rate-limited": ProblemType(429, "The API key exceeded its requests per second."),
        "quota-exceeded": ProblemType(429, "The API key exceeded its recipients per day."),
        "headers-too-large": ProblemType(431, "The request line and headers, or the chunk headers, are too large."),
        "internal-error": ProblemType(500, "An internal error occurred."),
        "overloaded": ProblemType(503, "The API is handling too many requests or too much data."),
        "database-unavailable": ProblemType(503, "The database is unavailable."),
        "provider-unavailable": ProblemType(503, "A server of the provider, which this request needs, is unavailable."),
    }
)


@dataclass(frozen=True, slots=True)
class FieldError:
    """One mistake in a request: an entry of the problem document's `errors`."""

    location: str  # `pointer` (a JSON pointer into the body), `header` or `parameter`
    name: str  # the pointer, or the name of the header or parameter
    detail: str  # a predicate such as `must be a list`, which never repeats the value

    def document(self) -> dict[str, str]:
        return {self.location: self.name, "detail": self.detail}


class Problem(Exception):
    """Raised for a request that the API refuses or cannot serve.

    `detail` is a sentence about this request; None if the title says enough. After `retry_after` seconds, the same
    request can succeed. `email_status` is set if the email's status is the cause. If `closes`, the API closes the
    connection after the response, because part of the request is unread.
    """

    def __init__(
        self,
        code: str,
        detail: str | None = None,
        *,
        errors: Sequence[FieldError] = (),
        retry_after: int | None = None,
        email_status: Status | None = None,
        closes: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after = retry_after
        self.email_status = email_status
        self.closes = closes
        self.headers = headers

    @property
    def status(self) -> int:
        return PROBLEM_TYPES[self.code].status

    def without_traceback(self) -> Self:
        """The problem without traceback and context, whose frames would keep the request's body in memory."""
        self.__context__ = None
        return self.with_traceback(None)

    def document(self) -> dict[str, Any]:
        problem_type = PROBLEM_TYPES[self.code]
        document: dict[str, Any] = {
            "type": _TYPE + self.code,
            "title": problem_type.title,
            "status": problem_type.status,
            "code": self.code,
        }
        if self.detail:
            document["detail"] = self.detail
        if self.email_status:
            document["email_status"] = self.email_status
        if self.errors:
            document["errors"] = [error.document() for error in self.errors]
        return document


_ENTRY: Final = re.compile(r"(\w+)\[(\d+)\](?:\.(.+))?")


def pointer_of(field: str, prefix: str = "") -> str:
    """The JSON pointer to a field of an email, as a URI fragment.

    `field` is as `InvalidEmail` names it, such as `to[1]`; `prefix` points to the email in the body: `/emails/3`.
    """
    if field == "email":  # `InvalidEmail` uses this name for the whole document
        return f"#{prefix}"
    if entry := _ENTRY.fullmatch(field):
        steps = [step for step in entry.groups() if step]
    else:  # the name of a header, a key of metadata, or the name of an unknown field can contain dots
        steps = field.split(".", 1) if field.startswith(("headers.", "metadata.", "calendar.")) else [field]
    escaped = (step.replace("~", "~0").replace("/", "~1") for step in steps)  # RFC 6901, section 3
    return "#" + prefix + "".join("/" + quote(step, safe="!$&'()*+,;=:@?-._~") for step in escaped)
