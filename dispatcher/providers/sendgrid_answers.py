"""What SendGrid's answers mean. The table in `docs/providers.md`, in code.

Sources: https://www.twilio.com/docs/sendgrid/api-reference/how-to-use-the-sendgrid-v3-api/responses and …/rate-limits,
…/for-developers/sending-email/sandbox-mode, and RFC 9110 for what SendGrid does not document.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson
from python_http_client.exceptions import err_dict

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.http import Answer

NAME: Final = "sendgrid"
MAX_ERRORS: Final = 5
"""Of a list of errors, how many the detail shows."""
MAX_MESSAGE_ID_CHARACTERS: Final = 128

_ACCEPTED: Final = 202
_VALID: Final = 200
_TOO_MANY: Final = 429
_GATEWAYS: Final = frozenset({502, 504})
"""Somebody between us and SendGrid got no answer either (RFC 9110, sections 15.6.3 and 15.6.5); SendGrid documents
neither, and does send 504 (sendgrid-php#933)."""
_OF_THE_ACCOUNT: Final[Mapping[int, tuple[str, str]]] = {
    401: ("refused the API key, or the account may not send", "Check SENDGRID_API_KEY, and the account's plan."),
    403: ("does not let this account or key send", "Give the key the scope mail.send; check the account's standing."),
    404: ("has nothing at this address", "Check DISPATCHER_SENDGRID_HOST."),
    405: ("has nothing to post to at this address", "Check DISPATCHER_SENDGRID_HOST."),
    451: ("may not serve this account from here", "Check the region: DISPATCHER_SENDGRID_HOST names global or EU."),
}
_UNUSABLE: Final = ("answers with what we cannot use", "Check DISPATCHER_SENDGRID_HOST.")
_REJECTIONS: Final[Mapping[int, Reason]] = {
    400: Reason.INVALID_CONTENT,
    413: Reason.TOO_LARGE,
    422: Reason.INVALID_CONTENT,
}
_SENDER: Final = re.compile(r"from\b", re.IGNORECASE)
_SENDER_WORDS: Final = re.compile(r"verified sender identity", re.IGNORECASE)
_RECIPIENT: Final = re.compile(r"personalizations(?:[.\[]\d+\]?)?\.(?:to|cc|bcc)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One of SendGrid's errors.

    Attributes:
        field: What it concerns, such as `personalizations.0.to.0.email`; empty if it does not say.
    """

    field: str
    message: str


def outcome_of(answer: Answer, *, sandbox: bool = False) -> Outcome:
    """What an answer to `POST /v3/mail/send` means for the email.

    Args:
        sandbox: The email asked for sandbox mode, where SendGrid says 200 to what it would have accepted.

    Raises:
        ProviderFault: it concerns the account or the set-up; SendGrid took nothing.
    """
    if answer.status == _ACCEPTED:
        return Accepted(_message_id(answer))
    if sandbox and answer.status == _VALID and not answer.body.strip():
        return Accepted(_message_id(answer), "sandbox mode: SendGrid found the email valid and delivers it to nobody")
    if answer.status < 400 or answer.status in _GATEWAYS:
        return Uncertain(_summary(answer), str(answer.status))
    if answer.status >= 500:
        return Deferred(Reason.SERVER_ERROR, _summary(answer), str(answer.status), _retry_after(answer.headers))
    return _refusal(answer)


def fault_of(answer: Answer) -> ProviderFault:
    """The fault that an answer stands for, where it concerns the account or the set-up."""
    what, remedy = _OF_THE_ACCOUNT.get(answer.status, _UNUSABLE)
    return ProviderFault(NAME, f"SendGrid {what}: {_summary(answer).rstrip('.')}.", remedy=remedy)


def fields_of(answer: Answer) -> list[str]:
    """The fields that SendGrid's errors name."""
    return [complaint.field for complaint in _complaints(answer.body) if complaint.field]


def _refusal(answer: Answer) -> Outcome:
    """What a 4xx means: always a definite no."""
    code = str(answer.status)
    if answer.status == _TOO_MANY:
        return Deferred(Reason.THROTTLED, _summary(answer), code, _throttled_for(answer.headers))
    if answer.status == 408:
        return Deferred(Reason.SERVER_ERROR, _summary(answer), code)
    complaints = _complaints(answer.body)
    if answer.status in (400, 403) and any(map(_blames_sender, complaints)):
        return Rejected(Reason.REJECTED_SENDER, _summary(answer), code)
    if answer.status == 400 and complaints and all(_RECIPIENT.match(one.field) for one in complaints):
        return Rejected(Reason.REJECTED_RECIPIENT, _summary(answer), code)
    if answer.status in _OF_THE_ACCOUNT:
        raise fault_of(answer)
    return Rejected(_REJECTIONS.get(answer.status, Reason.REFUSED), _summary(answer), code)


def _blames_sender(complaint: _Complaint) -> bool:
    return bool(_SENDER.match(complaint.field) or _SENDER_WORDS.search(complaint.message))


def _message_id(answer: Answer) -> str | None:
    text = answer.headers.get("x-message-id", "")
    fits = text.isascii() and text.isprintable() and 0 < len(text) <= MAX_MESSAGE_ID_CHARACTERS
    return text if fits else None


def _summary(answer: Answer) -> str:
    """The answer in one scrubbed line: status, python-sendgrid's name for it, SendGrid's words or what came instead."""
    known = err_dict.get(answer.status)
    name = known.__name__ if known else "unexpected" if answer.status < 400 else ""
    complaints = _complaints(answer.body)
    words = "; ".join(f"{one.field}: {one.message}" if one.field else one.message for one in complaints[:MAX_ERRORS])
    return scrub(" ".join(part for part in (str(answer.status), name, words or _glimpse(answer)) if part))


def _glimpse(answer: Answer) -> str:
    """What came in place of SendGrid's errors."""
    if not answer.body.strip():
        return "with an empty body"
    kind = answer.headers.get("content-type", "no type")
    # No words of a page: who knows whose it is. Its title says enough.
    title = re.search(rb"<title[^>]*>([^<]{1,100})", answer.body[:4000], re.IGNORECASE)
    words = f", titled {title[1].decode('utf-8', 'replace').strip()!r}" if title else ""
    return f"with {len(answer.body)} octets of {kind[:60]}{words}"


def _complaints(body: bytes) -> list[_Complaint]:
    """SendGrid's errors; none where the body is not what it documents."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    errors = document.get("errors") if isinstance(document, dict) else None
    if not isinstance(errors, list):
        return []
    found = [_complaint(error) for error in errors]
    return [complaint for complaint in found if complaint.message or complaint.field]


def _complaint(error: object) -> _Complaint:
    if not isinstance(error, dict):
        return _Complaint("", error if isinstance(error, str) else "")
    field, message = error.get("field"), error.get("message")
    known = field if isinstance(field, str) and field != "null" else ""
    return _Complaint(known, message if isinstance(message, str) else "")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for (RFC 9110, section 10.2.3); None if it is not there."""
    after = headers.get("retry-after", "").strip()
    if _is_number(after):
        return float(after)
    instant = _instant(after)
    return None if instant is None else max(0.0, instant - _server_time(headers))


def _throttled_for(headers: Mapping[str, str]) -> float | None:
    """Seconds until the rate limit is reset, or those that `Retry-After` asks for if they are more."""
    after = _retry_after(headers)
    reset = headers.get("x-ratelimit-reset", "").strip()
    if not _is_number(reset):
        return after
    return max(0.0, float(reset) - _server_time(headers), after or 0.0)


def _server_time(headers: Mapping[str, str]) -> float:
    """Now, by the server's own clock where it tells it: ours may be wrong."""
    instant = _instant(headers.get("date", ""))
    return time.time() if instant is None else instant


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def _instant(http_date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(http_date).timestamp()
    except (ValueError, OverflowError):
        return None
