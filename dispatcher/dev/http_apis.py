"""The parts of the APIs of SendGrid, SES, Resend and Twilio that `http_double` imitates.

Each class reads the email ids from a request, and makes the answers that accept, throttle or refuse the request. The
answers agree with the provider's public documentation.
"""

from __future__ import annotations

import email.utils
import math
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, parse_qsl, urlsplit
from uuid import uuid4

import orjson

from dispatcher.dev.http_behaviour import Reply, answer

MAX_PERSONALIZATIONS: Final = 1000
MAX_BULK_ENTRIES: Final = 50


@dataclass(frozen=True, slots=True)
class Mail:
    """One email or SMS of a request, with the addresses (in lower case) or phone numbers of all recipients."""

    email_id: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One request that asks the provider to send one email, or several in a bulk call. `octets` is the size of its
    body."""

    mails: tuple[Mail, ...]
    document: dict[str, Any]
    octets: int


class Api(Protocol):
    """One endpoint of a provider's API."""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        """Reads a request from its decoded body. If the body is invalid, raises KeyError, TypeError or a similar
        error."""
        ...

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:
        """The answer that refuses the whole request; None for every other request. See `Behaviour` for `culprits`;
        `names`: whether SendGrid's answer says which email of the request was refused."""
        ...

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:
        """The emails that the provider accepts. Called only if `refused` returned None."""
        ...

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:
        """The answer to a request for which `refused` returned None. The answer to a bulk call of SES has a status for
        each email, so it can refuse some of the emails."""
        ...

    def throttled(self, until: float) -> Reply:
        """The answer to a request above the rate limit, which ends at this time, in seconds since 1970."""
        ...

    def unauthorized(self) -> Reply:
        """The answer to a wrong API key."""
        ...

    def malformed(self) -> Reply:
        """The answer to an invalid body."""
        ...


class SendGrid:
    """`POST /v3/mail/send`: https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        common = document.get("custom_args")
        mails: dict[str, tuple[str, ...]] = {}
        for one in document["personalizations"]:
            email_id = (common or one.get("custom_args") or {}).get("email_id", "")
            addresses = tuple(each["email"].lower() for field in ("to", "cc", "bcc") for each in one.get(field, ()))
            mails[email_id] = mails.get(email_id, ()) + addresses
        if not mails:
            raise KeyError("personalizations")
        return Request(tuple(Mail(email_id, found) for email_id, found in mails.items()), document, octets)

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:
        """Status 400 if the request has too many emails, a repeated address or a refused address. Otherwise None."""
        people = request.document["personalizations"]
        addresses = [address for mail in request.mails for address in mail.addresses]
        if len(people) > MAX_PERSONALIZATIONS or len(addresses) > MAX_PERSONALIZATIONS:
            return sendgrid_error(400, "There are too many personalizations or recipients.", "personalizations")
        if len(set(addresses)) < len(addresses):
            return sendgrid_error(400, "Each email address in the personalization block should be unique.")
        if not culprits or culprits.keys().isdisjoint(addresses):
            return None
        errors = []
        for number, one in enumerate(people):
            found = {each["email"].lower() for field in ("to", "cc", "bcc") for each in one.get(field, ())}
            errors += [_error(culprits[each], f"personalizations.{number}.to") for each in found & culprits.keys()]
        return Reply(400, {"errors": errors}) if names else sendgrid_error(400, "Bad Request")

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:  # noqa: ARG002
        """All emails of the request, because SendGrid accepts or refuses a request as a whole."""
        return request.mails

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """Status 202 with `X-Message-Id`; in sandbox mode, status 200 without `X-Message-Id`."""
        sandbox = request.document.get("mail_settings", {}).get("sandbox_mode", {}).get("enable", False)
        if sandbox:
            return answer(200, {}, b"")
        return answer(202, {"X-Message-Id": secrets.token_urlsafe(16)}, b"")

    def throttled(self, until: float) -> Reply:
        """Status 429 with the time at which the limit resets, in whole seconds since 1970."""
        headers = {
            "X-RateLimit-Limit": "600",
            "X-RateLimit-Remaining": "0",
            "X-RateLimit-Reset": str(math.ceil(until)),
        }
        return Reply(429, _errors("too many requests"), headers)

    def unauthorized(self) -> Reply:
        return Reply(401, _errors("The provided authorization grant is invalid, expired, or revoked"))

    def malformed(self) -> Reply:
        return Reply(400, _errors("Bad Request"))


class Ses:
    """`POST /v2/email/outbound-emails`: https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendEmail.html"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        if "Content" not in document:
            raise KeyError("Content")
        return Request((_ses_mail(document, document.get("EmailTags", ())),), document, octets)

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:  # noqa: ARG002
        word = _word_for(request.mails[0], culprits)
        return None if word is None else _aws(400, "MessageRejected", word)

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:  # noqa: ARG002
        return request.mails

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:  # noqa: ARG002
        return _json(200, {"MessageId": _message_id()})

    def throttled(self, until: float) -> Reply:  # noqa: ARG002
        """Status 429. SES does not say when the limit ends."""
        return _aws(429, "TooManyRequestsException", "Maximum sending rate exceeded.")

    def unauthorized(self) -> Reply:
        """The answer of every AWS service to wrong credentials: status 403."""
        return _aws(403, "UnrecognizedClientException", "The security token included in the request is invalid.")

    def malformed(self) -> Reply:
        return _aws(400, "BadRequestException", "The request is not valid.")


class SesBulk(Ses):
    """`POST /v2/email/outbound-bulk-emails`, with a status for each entry:
    https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendBulkEmail.html
    """

    def read(self, document: dict[str, Any], octets: int) -> Request:
        if not document["DefaultContent"]["Template"]["TemplateName"]:
            raise KeyError("TemplateName")
        entries = document["BulkEmailEntries"]
        mails = tuple(_ses_mail(entry, entry.get("ReplacementTags", ())) for entry in entries)
        return Request(mails, document, octets)

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:  # noqa: ARG002
        """Status 400 if the request has too many emails or recipients, or no email. Otherwise None."""
        recipients = sum(len(mail.addresses) for mail in request.mails)
        return None if 0 < len(request.mails) <= MAX_BULK_ENTRIES >= recipients else self.malformed()

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:
        """The emails that have no recipient in `culprits`."""
        return [mail for mail in request.mails if _word_for(mail, culprits) is None]

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:
        """Status 200, with a status for each email: `SUCCESS`, or for a refused email the status in `culprits`."""
        return _json(200, {"BulkEmailEntryResults": [_entry(_word_for(mail, culprits)) for mail in request.mails]})


class Resend:
    """`POST /emails`: https://resend.com/docs/api-reference/emails/send-email (`HttpSession` has its idempotency
    keys)"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        named = {tag["name"]: tag["value"] for tag in document.get("tags", ())}
        addresses = tuple(_bare(text) for field in ("to", "cc", "bcc") for text in document.get(field, ()))
        if not (document["from"] and document["to"]):
            raise KeyError("to")
        return Request((Mail(named.get("email_id", ""), addresses),), document, octets)

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:  # noqa: ARG002
        word = _word_for(request.mails[0], culprits)
        return None if word is None else resend_error(422, "validation_error", word)

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:  # noqa: ARG002
        return request.mails

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:  # noqa: ARG002
        return _json(200, {"id": str(uuid4())})

    def throttled(self, until: float) -> Reply:
        """Status 429 with the seconds until the limit resets."""
        seconds = str(max(0, math.ceil(until - time.time())))
        headers = {"ratelimit-limit": "2", "ratelimit-remaining": "0", "ratelimit-reset": seconds}
        message = "Too many requests. You can only make 2 requests per second."
        return resend_error(429, "rate_limit_exceeded", message, {**headers, "retry-after": seconds})

    def unauthorized(self) -> Reply:
        return resend_error(403, "invalid_api_key", "API key is invalid")

    def malformed(self) -> Reply:
        return resend_error(422, "missing_required_field", "Missing `to` field.")

    def changed(self) -> Reply:
        """Status 409: the idempotency key was used before, for a request with a different body."""
        return resend_error(409, "invalid_idempotent_request", "The request body was modified.")


class Twilio:
    """`POST /Messages.json`, a form: https://www.twilio.com/docs/messaging/api/message-resource"""

    def read(self, document: dict[str, Any], octets: int) -> Request:
        """See `Api.read`. The email id is a parameter of the URL to which Twilio would post the SMS's status."""
        if not (document["Body"] and (document.get("From") or document.get("MessagingServiceSid"))):
            raise KeyError("From")
        callback = parse_qs(urlsplit(document.get("StatusCallback", "")).query)
        mail = Mail(callback.get("email_id", [""])[0], (document["To"],))
        return Request((mail,), document, octets)

    def refused(self, request: Request, culprits: Mapping[str, str], *, names: bool) -> Reply | None:  # noqa: ARG002
        """If the phone number is in `culprits`, status 400 with the error code from there. Otherwise None."""
        word = _word_for(request.mails[0], culprits)
        return None if word is None else twilio_error(400, int(word), f"refused: {request.mails[0].addresses[0]}")

    def taken(self, request: Request, culprits: Mapping[str, str]) -> Sequence[Mail]:  # noqa: ARG002
        return request.mails

    def accepted(self, request: Request, culprits: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """HTTP status 201, with Twilio's description of the SMS. The status in the description is `queued`."""
        form = request.document
        message = {
            "sid": f"SM{secrets.token_hex(16)}",
            "to": form["To"],
            "from": form.get("From"),
            "messaging_service_sid": form.get("MessagingServiceSid"),
            "body": form["Body"],
            "status": "queued",
            "error_code": None,
            "error_message": None,
            "date_created": email.utils.formatdate(usegmt=True),
        }
        return _json(201, message)

    def found(self, target: str, messages: Collection[Mapping[str, Any]]) -> Reply:
        """The answer to `GET /Messages/SID.json` (one SMS), or to `GET /Messages.json` (the latest SMS to one
        number)."""
        url = urlsplit(target)
        if one := _TWILIO_MESSAGE.search(url.path):
            known = next((each for each in messages if each["sid"] == one[1]), None)
            return Reply(200, known) if known else twilio_error(404, 20404, "The requested resource was not found")
        asked = dict(parse_qsl(url.query))
        size, day = int(asked.get("PageSize", "50")), asked.get("DateSent>", "")
        listed = [
            each
            for each in messages
            if each["to"] == asked.get("To", each["to"])
            and email.utils.parsedate_to_datetime(each["date_created"]).date().isoformat() >= day
        ]
        more = "/2010-04-01/next" if len(listed) > size else None
        return Reply(200, {"messages": listed[::-1][:size], "next_page_uri": more})

    def throttled(self, until: float) -> Reply:  # noqa: ARG002
        """Status 429. Twilio does not say when the limit ends."""
        return twilio_error(429, 20429, "Too Many Requests")

    def unauthorized(self) -> Reply:
        return twilio_error(401, 20003, "Authenticate")

    def malformed(self) -> Reply:
        return twilio_error(400, 21604, "A 'To' phone number is required.")


def twilio_error(status: int, code: int, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    more = f"https://www.twilio.com/docs/errors/{code}"
    return Reply(status, {"code": code, "message": message, "more_info": more, "status": status}, headers or {})


def resend_error(status: int, name: str, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {"statusCode": status, "name": name, "message": message}, headers or {})


def _ses_mail(document: Mapping[str, Any], tags: Collection[Mapping[str, str]]) -> Mail:
    named = {tag["Name"]: tag["Value"] for tag in tags}
    places = document.get("Destination", {})
    fields = ("ToAddresses", "CcAddresses", "BccAddresses")
    addresses = [_bare(text) for field in fields for text in places.get(field, ())]
    return Mail(named.get("email_id", ""), tuple(addresses))


def _bare(text: str) -> str:
    return text[text.rfind("<") + 1 :].rstrip(">").lower()


def _word_for(mail: Mail, culprits: Mapping[str, str]) -> str | None:
    return next((culprits[address] for address in mail.addresses if address in culprits), None) if culprits else None


def _entry(word: str | None) -> dict[str, str]:
    return {"Status": word, "Error": "not this one"} if word else {"Status": "SUCCESS", "MessageId": _message_id()}


def _message_id() -> str:
    return f"0100{secrets.token_hex(8)}-{secrets.token_hex(4)}-000000"


def _json(status: int, document: object) -> bytes:
    return answer(status, {"Content-Type": "application/json"}, orjson.dumps(document))


def sendgrid_error(status: int, message: str, field: str | None = None) -> Reply:
    return Reply(status, _errors(message, field))


def _errors(message: str, field: str | None = None) -> dict[str, object]:
    return {"errors": [_error(message, field)]}


def _error(message: str, field: str | None) -> dict[str, object]:
    return {"message": message, "field": field, "help": None}


def _aws(status: int, kind: str, message: str) -> Reply:
    return Reply(status, {"message": message}, {"x-amzn-ErrorType": kind, "Date": _http_date()})


def _http_date() -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())


SENDGRID = SendGrid()
RESEND = Resend()
TWILIO = Twilio()
_TWILIO_PATH: Final = re.compile(r"/2010-04-01/Accounts/AC[0-9a-f]{32}/Messages\.json")
_TWILIO_MESSAGE: Final = re.compile(r"/Messages/([A-Z]{2}[0-9a-f]{32})\.json$")
APIS: dict[str, Api] = {
    "/emails": RESEND,
    "/v3/mail/send": SENDGRID,
    "/v2/email/outbound-emails": Ses(),
    "/v2/email/outbound-bulk-emails": SesBulk(),
}
"""The endpoints by path. Twilio's endpoint is missing here, because its path contains the account's id."""


def api_of(path: str) -> Api | None:
    """The endpoint with this path; None if no API has this path."""
    return TWILIO if _TWILIO_PATH.fullmatch(path) else APIS.get(path)


def document_of(api: Api, body: bytes | bytearray) -> Any:
    """The decoded body of a request: the fields of a form for Twilio, JSON for all other APIs."""
    if api is TWILIO:
        return dict(parse_qsl(body.decode(), strict_parsing=True, max_num_fields=20))
    return orjson.loads(body)
