"""What SendGrid's answers mean: the table in `docs/providers.md`, in code.

For a call with several emails, a 202 accepts all; a 4xx refuses all, and names at best the personalization that it
dislikes.

Sources: https://www.twilio.com/docs/sendgrid/api-reference/how-to-use-the-sendgrid-v3-api/responses and …/rate-limits,
…/for-developers/sending-email/sandbox-mode, and RFC 9110 for what SendGrid does not document.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Part, RefusedTogether
from dispatcher.transport.http_answer import Answer, message_name, number

NAME: Final = "sendgrid"
MAX_ERRORS: Final = 5
"""Of a list of errors, how many the detail shows."""

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
_NAMED: Final = re.compile(r"personalizations(?:\.|\[)(\d+)")
_COMMON: Final = re.compile(r"(?:template_id|reply_to|reply_to_list|categories)\b")
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
        return Accepted(message_name(answer.headers.get("x-message-id")))
    if sandbox and answer.status == _VALID and not answer.body.strip():
        return Accepted(
            message_name(answer.headers.get("x-message-id")),
            "sandbox mode: SendGrid found the email valid and delivers it to nobody",
        )
    if answer.status < 400 or answer.status in _GATEWAYS:
        return Uncertain(_summary(answer), str(answer.status))
    if answer.status >= 500:
        return Deferred(Reason.SERVER_ERROR, _summary(answer), str(answer.status), answer.retry_after)
    return _refusal(answer)


def outcomes_of_call(answer: Answer, parts: Sequence[Part], *, sandbox: bool) -> list[Outcome] | RefusedTogether:
    """What an answer means for each of the emails.

    Raises:
        ProviderFault: see `outcome_of`.
    """
    outcome = outcome_of(answer, sandbox=sandbox)
    if not isinstance(outcome, Rejected):
        return [outcome] * len(parts)
    fields = [complaint.field for complaint in _complaints(answer) if complaint.field]
    if outcome.reason is Reason.REJECTED_SENDER or any(map(_COMMON.match, fields)):
        # Each of them alone would be refused alike.
        return [outcome] * len(parts)
    return RefusedTogether(_suspects(fields, parts))


def fault_of(answer: Answer) -> ProviderFault:
    """The fault that an answer stands for, where it concerns the account or the set-up."""
    what, remedy = _OF_THE_ACCOUNT.get(answer.status, _UNUSABLE)
    return ProviderFault(NAME, f"SendGrid {what}: {_summary(answer).rstrip('.')}.", remedy=remedy)


def _refusal(answer: Answer) -> Outcome:
    """What a 4xx means: always a definite no."""
    code = str(answer.status)
    if answer.status == _TOO_MANY:
        return Deferred(Reason.THROTTLED, _summary(answer), code, _throttled_for(answer))
    if answer.status == 408:
        return Deferred(Reason.SERVER_ERROR, _summary(answer), code)
    complaints = _complaints(answer)
    if answer.status in (400, 403) and any(map(_blames_sender, complaints)):
        return Rejected(Reason.REJECTED_SENDER, _summary(answer), code)
    if answer.status == 400 and complaints and all(_RECIPIENT.match(one.field) for one in complaints):
        return Rejected(Reason.REJECTED_RECIPIENT, _summary(answer), code)
    if answer.status in _OF_THE_ACCOUNT:
        raise fault_of(answer)
    return Rejected(_REJECTIONS.get(answer.status, Reason.REFUSED), _summary(answer), code)


def _blames_sender(complaint: _Complaint) -> bool:
    return bool(_SENDER.match(complaint.field) or _SENDER_WORDS.search(complaint.message))


def _summary(answer: Answer) -> str:
    """The answer in one scrubbed line: status, python-sendgrid's name for it, SendGrid's words or what came instead."""
    from python_http_client.exceptions import err_dict  # with its package 100 ms: only who sends knows it

    known = err_dict.get(answer.status)
    name = known.__name__ if known else "unexpected" if answer.status < 400 else ""
    complaints = _complaints(answer)
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


def _complaints(answer: Answer) -> list[_Complaint]:
    """SendGrid's errors; none where the body is not what it documents."""
    errors = answer.document.get("errors")
    found = [_complaint(error) for error in errors] if isinstance(errors, list) else []
    return [complaint for complaint in found if complaint.message or complaint.field]


def _complaint(error: object) -> _Complaint:
    if not isinstance(error, dict):
        return _Complaint("", error if isinstance(error, str) else "")
    field, message = error.get("field"), error.get("message")
    known = field if isinstance(field, str) and field != "null" else ""
    return _Complaint(known, message if isinstance(message, str) else "")


def _throttled_for(answer: Answer) -> float | None:
    """Seconds until the rate limit is reset, or those that `Retry-After` asks for if they are more."""
    after = answer.retry_after
    reset = number(answer.headers.get("x-ratelimit-reset", "").strip())
    return after if reset is None else max(0.0, reset - answer.server_time, after or 0.0)


def _suspects(fields: Collection[str], parts: Sequence[Part]) -> frozenset[int]:
    """The positions of the emails whose personalizations are named."""
    owners = [position for position, part in enumerate(parts) for _ in part.content.personalizations]
    named = [int(found[1]) for field in fields if (found := _NAMED.match(field))]
    return frozenset(owners[number] for number in named if number < len(owners))
