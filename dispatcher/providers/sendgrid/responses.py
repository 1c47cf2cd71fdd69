"""The outcome for each response of SendGrid. `docs/providers.md` has a table of these rules.

In a bulk call, a 202 accepts all emails, and a 4xx refuses all emails. Some 4xx responses name the personalizations
(parts of the request) that caused the refusal.

Sources: https://www.twilio.com/docs/sendgrid/api-reference/how-to-use-the-sendgrid-v3-api/responses and …/rate-limits,
…/for-developers/sending-email/sandbox-mode, and RFC 9110 for what SendGrid does not document.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dispatcher.domain.outcome import Accepted, AccountFault, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.provider_text import SENDER, cause_of
from dispatcher.domain.scrub import scrub
from dispatcher.domain.values import dataclass
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import BulkCallRefused, BulkEntry
from dispatcher.transport.http_response import GATEWAYS, HttpResponse, message_name, number

NAME: Final = "sendgrid"
MAX_ERRORS: Final = 5
"""How many of SendGrid's errors a detail lists."""

_ACCEPTED: Final = 202
_VALID: Final = 200
_TOO_MANY: Final = 429
_OF_THE_ACCOUNT: Final[Mapping[int, tuple[str, str]]] = {
    401: ("refused the API key, or the account may not send", "Check SENDGRID_API_KEY, and the account's plan."),
    403: ("does not let this account or key send", "Give the key the scope mail.send; check the account's status."),
    404: ("does not have this URL", "Check DISPATCHER_SENDGRID_HOST."),
    405: ("does not accept a POST to this URL", "Check DISPATCHER_SENDGRID_HOST."),
    451: (
        "may not serve this account in this region",
        "Set DISPATCHER_SENDGRID_HOST to the account's region, global or EU.",
    ),
}
_UNUSABLE: Final = ("sent an unexpected response", "Check DISPATCHER_SENDGRID_HOST.")
_REJECTIONS: Final[Mapping[int, Reason]] = {
    400: Reason.INVALID_CONTENT,
    413: Reason.TOO_LARGE,
    422: Reason.INVALID_CONTENT,
}
_NAMED: Final = re.compile(r"personalizations(?:\.|\[)(\d+)")
_COMMON: Final = re.compile(r"(?:template_id|reply_to|reply_to_list|categories)\b")
_SENDER: Final = re.compile(r"from\b", re.IGNORECASE)
_RECIPIENT: Final = re.compile(r"personalizations(?:[.\[]\d+\]?)?\.(?:to|cc|bcc)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One entry of SendGrid's error list. `field`: such as `personalizations.0.to.0.email`, or empty."""

    field: str
    message: str


def outcome_of(response: HttpResponse, *, sandbox: bool = False) -> Outcome:
    """The outcome for a response to `POST /v3/mail/send`. Raises ProviderFault if not the email is at fault."""
    if response.status == _ACCEPTED:
        return Accepted(message_name(response.headers.get("x-message-id")))
    if sandbox and response.status == _VALID and not response.body.strip():
        return Accepted(
            message_name(response.headers.get("x-message-id")),
            "sandbox mode: SendGrid validated the email and does not deliver it",
        )
    # SendGrid documents no status of GATEWAYS, but does send 504 (sendgrid-php#933).
    if response.status < 400 or response.status in GATEWAYS:
        return Uncertain(_summary(response), str(response.status))
    if response.status >= 500:
        return Deferred(Reason.SERVER_ERROR, _summary(response), str(response.status), response.retry_after)
    return _refusal(response)


def bulk_outcomes_of(
    response: HttpResponse, parts: Sequence[BulkEntry], *, sandbox: bool
) -> list[Outcome] | BulkCallRefused:
    """The outcome of each email of a bulk call; `BulkCallRefused` if some of its emails are probably the cause."""
    outcome = outcome_of(response, sandbox=sandbox)
    if not isinstance(outcome, Rejected):
        return [outcome] * len(parts)
    fields = [complaint.field for complaint in _complaints(response) if complaint.field]
    if outcome.reason is Reason.REJECTED_SENDER or any(map(_COMMON.match, fields)):
        # The fault is in a field that all emails of the call share. So SendGrid would also refuse each email if we sent
        # it in a separate request.
        return [outcome] * len(parts)
    return BulkCallRefused(_suspects(fields, parts))


def fault_of(response: HttpResponse) -> ProviderFault:
    """The fault for a response that concerns the account or the settings."""
    what, remedy = _OF_THE_ACCOUNT.get(response.status, _UNUSABLE)
    causes = [cause_of(one.message) for one in _complaints(response)]
    seconds = next((cause.seconds for cause in causes if isinstance(cause, AccountFault)), None)
    message = f"SendGrid {what}: {_summary(response).rstrip('.')}."
    return ProviderFault(NAME, message, remedy=remedy, seconds=seconds)


def _refusal(response: HttpResponse) -> Outcome:
    """The outcome for a 4xx. A 4xx always means that SendGrid accepted no email."""
    code = str(response.status)
    if response.status == _TOO_MANY:
        return Deferred(Reason.THROTTLED, _summary(response), code, _throttled_for(response))
    if response.status == 408:
        return Deferred(Reason.SERVER_ERROR, _summary(response), code)
    complaints = _complaints(response)
    if response.status in (400, 403) and any(map(_blames_sender, complaints)):
        return Rejected(Reason.REJECTED_SENDER, _summary(response), code, SENDER)
    if response.status == 400 and complaints and all(_RECIPIENT.match(one.field) for one in complaints):
        return Rejected(Reason.REJECTED_RECIPIENT, _summary(response), code)
    if response.status in _OF_THE_ACCOUNT:
        raise fault_of(response)
    return Rejected(_REJECTIONS.get(response.status, Reason.REFUSED), _summary(response), code)


def _blames_sender(complaint: _Complaint) -> bool:
    return bool(_SENDER.match(complaint.field)) or (not complaint.field and cause_of(complaint.message) == SENDER)


def _summary(response: HttpResponse) -> str:
    """The status, python-sendgrid's name of the error, and SendGrid's errors or a description of the body, scrubbed."""
    from python_http_client.exceptions import err_dict  # imported here, because the import takes 100 ms

    known = err_dict.get(response.status)
    name = known.__name__ if known else "unexpected" if response.status < 400 else ""
    complaints = _complaints(response)
    words = "; ".join(f"{one.field}: {one.message}" if one.field else one.message for one in complaints[:MAX_ERRORS])
    return scrub(" ".join(part for part in (str(response.status), name, words or _glimpse(response)) if part))


def _glimpse(response: HttpResponse) -> str:
    """A short description of a body that contains no SendGrid errors: its size, type and title."""
    title = re.search(rb"<title[^>]*>([^<]{1,100})", response.body[:4000], re.IGNORECASE)
    words = f", titled {title[1].decode('utf-8', 'replace').strip()!r}" if title else ""
    return f"{response.shown_body}{words}"


def _complaints(response: HttpResponse) -> list[_Complaint]:
    """SendGrid's errors; empty if the body does not have the documented form."""
    errors = response.document.get("errors")
    found = [_complaint(error) for error in errors] if isinstance(errors, list) else []
    return [complaint for complaint in found if complaint.message or complaint.field]


def _complaint(error: object) -> _Complaint:
    if not isinstance(error, dict):
        return _Complaint("", error if isinstance(error, str) else "")
    field, message = error.get("field"), error.get("message")
    known = field if isinstance(field, str) and field != "null" else ""
    return _Complaint(known, message if isinstance(message, str) else "")


def _throttled_for(response: HttpResponse) -> float | None:
    """Seconds until the rate limit resets: the longer of `X-RateLimit-Reset` and `Retry-After`; None without both."""
    after = response.retry_after
    reset = number(response.headers.get("x-ratelimit-reset", "").strip())
    return after if reset is None else max(0.0, reset - response.server_time, after or 0.0)


def _suspects(fields: Collection[str], parts: Sequence[BulkEntry]) -> frozenset[int]:
    """The positions in `parts` of the emails whose fields, such as `personalizations.0.to.0.email`, were refused."""
    owners = [position for position, part in enumerate(parts) for _ in part.content.personalizations]
    named = [int(found[1]) for field in fields if (found := _NAMED.match(field))]
    return frozenset(owners[number] for number in named if number < len(owners))
