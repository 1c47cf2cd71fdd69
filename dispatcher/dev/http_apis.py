"""The shapes of SendGrid's and SES's APIs, as far as the HTTP double speaks them: where the email id stands in a
request, and what accepting, throttling and refusing look like. From their public documentation.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

from dispatcher.dev.http_behaviour import Reply, answer


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send, as it arrived.

    Attributes:
        document: The body, decoded.
        octets: The body's size.
    """

    email_id: str
    recipients: int
    document: dict[str, Any]
    octets: int


class Api(Protocol):
    """One provider's shape."""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        """The request that a body holds; raises KeyError, TypeError or the like if it holds none."""
        ...

    def accepted(self, request: Request) -> bytes:
        """The answer to an accepted email."""
        ...

    def throttled(self, until: float) -> Reply:
        """The answer to an email that came too fast."""
        ...

    def unauthorized(self) -> Reply:
        """The answer to a wrong key."""
        ...

    def malformed(self) -> Reply:
        """The answer to a body that holds no email."""
        ...


class SendGrid:
    """`POST /v3/mail/send`: https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        """See `Api.read`."""
        people = document["personalizations"]
        arguments = document.get("custom_args") or people[0].get("custom_args") or {}
        count = sum(len(one.get(field, ())) for one in people for field in ("to", "cc", "bcc"))
        return Request(arguments.get("email_id", ""), count, document, octets)

    def accepted(self, request: Request) -> bytes:
        """202 with `X-Message-Id`; 200 without one in sandbox mode, which is how SendGrid answers there."""
        sandbox = request.document.get("mail_settings", {}).get("sandbox_mode", {}).get("enable", False)
        if sandbox:
            return answer(200, {}, b"")
        return answer(202, {"X-Message-Id": secrets.token_urlsafe(16)}, b"")

    def throttled(self, until: float) -> Reply:
        """429 with the reset in whole epoch seconds."""
        headers = {
            "X-RateLimit-Limit": "600",
            "X-RateLimit-Remaining": "0",
            "X-RateLimit-Reset": str(math.ceil(until)),
        }
        return Reply(429, _errors("too many requests"), headers)

    def unauthorized(self) -> Reply:
        """401 in SendGrid's words."""
        return Reply(401, _errors("The provided authorization grant is invalid, expired, or revoked"))

    def malformed(self) -> Reply:
        """400 in SendGrid's words."""
        return Reply(400, _errors("Bad Request"))


class Ses:
    """`POST /v2/email/outbound-emails`: https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendEmail.html"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        """See `Api.read`."""
        tags = {tag["Name"]: tag["Value"] for tag in document.get("EmailTags", ())}
        places = document.get("Destination", {})
        count = sum(len(places.get(field, ())) for field in ("ToAddresses", "CcAddresses", "BccAddresses"))
        if "Content" not in document:
            raise KeyError("Content")
        return Request(tags.get("email_id", ""), count, document, octets)

    def accepted(self, request: Request) -> bytes:  # noqa: ARG002
        """200 with a message id."""
        name = f"0100{secrets.token_hex(8)}-{secrets.token_hex(4)}-000000"
        return answer(200, {"Content-Type": "application/json"}, b'{"MessageId":"' + name.encode() + b'"}')

    def throttled(self, until: float) -> Reply:  # noqa: ARG002
        """429; SES does not say for how long."""
        return _aws(429, "TooManyRequestsException", "Maximum sending rate exceeded.")

    def unauthorized(self) -> Reply:
        """403 as every AWS service has it."""
        return _aws(403, "UnrecognizedClientException", "The security token included in the request is invalid.")

    def malformed(self) -> Reply:
        """400 as SES has it."""
        return _aws(400, "BadRequestException", "The request is not valid.")


def sendgrid_error(status: int, message: str, field: str | None = None) -> Reply:
    """A refusal as SendGrid words it."""
    return Reply(status, _errors(message, field))


def _errors(message: str, field: str | None = None) -> dict[str, object]:
    return {"errors": [{"message": message, "field": field, "help": None}]}


def _aws(status: int, kind: str, message: str) -> Reply:
    return Reply(status, {"message": message}, {"x-amzn-ErrorType": kind, "Date": _http_date()})


def _http_date() -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())


SENDGRID = SendGrid()
APIS: dict[str, Api] = {"/v3/mail/send": SENDGRID, "/v2/email/outbound-emails": Ses()}
"""By path."""
