"""The outcome for each response of Resend. `docs/providers.md` has a table of these rules.

Sources: https://resend.com/docs/api-reference/errors, …/rate-limit, …/dashboard/emails/idempotency-keys, and RFC 9110
for what Resend does not document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.provider_text import QUOTA_SECONDS, SENDER, cause_of
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.http_response import GATEWAYS, HttpResponse, message_name, number

NAME: Final = "resend"
RESTRICTED_KEY: Final = "restricted_api_key"
"""Resend's error if a key that may only send is used for another request."""

_QUOTAS: Final = frozenset({"daily_quota_exceeded", "monthly_quota_exceeded"})
_OF_THE_ACCOUNT: Final[Mapping[int, tuple[str, str]]] = {
    401: ("refused the API key", "Check RESEND_API_KEY."),
    403: ("does not let this account or key send", "Check RESEND_API_KEY, and the account's status."),
    404: ("does not have this URL", "Check DISPATCHER_RESEND_URL."),
    405: ("does not accept a POST to this URL", "Check DISPATCHER_RESEND_URL."),
    429: ("sends no more emails for this account: its quota is used up", "Raise the quota, or wait until it resets."),
    451: ("suspects a security problem", "Ask Resend's support."),
}
_UNUSABLE: Final = ("sent an unexpected response", "Check DISPATCHER_RESEND_URL.")
_TESTING: Final = ("sends only to your own address until a domain is verified", "Verify a domain in Resend.")
_SENDER: Final = re.compile(r"`from`", re.IGNORECASE)
_RECIPIENT: Final = re.compile(r"`(?:to|cc|bcc)`", re.IGNORECASE)


def outcome_of(response: HttpResponse) -> Outcome:
    """The outcome for a response to `POST /emails`. Raises ProviderFault if not the email is at fault."""
    status, code = response.status, _code(response)
    if status == 200 and (accepted := message_name(response.document.get("id"))):
        return Accepted(accepted)
    if status < 400 or status in GATEWAYS:
        return Uncertain(_summary(response), code)
    if status == 409:
        # Another request with this email's key is in progress, or arrived earlier with a different body. Resend may
        # have accepted this other request.
        return Uncertain(_summary(response), code)
    if status == 408 or status >= 500:
        return Deferred(Reason.SERVER_ERROR, _summary(response), code, response.retry_after)
    if status == 429 and _name(response) not in _QUOTAS:
        return Deferred(Reason.THROTTLED, _summary(response), code, _throttled_for(response))
    if reason := _rejection(response):
        return Rejected(reason, _summary(response), code, SENDER if reason is Reason.REJECTED_SENDER else None)
    raise fault_of(response)


def fault_of(response: HttpResponse) -> ProviderFault:
    """The fault for a response that concerns the account or the settings."""
    what, remedy = _OF_THE_ACCOUNT.get(response.status, _UNUSABLE)
    if "testing emails" in _message(response):
        what, remedy = _TESTING
    seconds = QUOTA_SECONDS if _name(response) in _QUOTAS else None
    return ProviderFault(NAME, f"Resend {what}: {_summary(response).rstrip('.')}.", remedy=remedy, seconds=seconds)


def _rejection(response: HttpResponse) -> Reason | None:
    """Why Resend will never accept the email; None if the account or the settings are at fault."""
    status, message = response.status, _message(response)
    is_of_sender = _SENDER.search(message) or (status == 403 and cause_of(message) == SENDER)
    if _name(response) == "invalid_from_address" or (status in (400, 403, 422) and is_of_sender):
        return Reason.REJECTED_SENDER
    if status in _OF_THE_ACCOUNT:
        return None
    if status == 413:
        return Reason.TOO_LARGE
    if status not in (400, 422):
        return Reason.REFUSED
    return Reason.REJECTED_RECIPIENT if _RECIPIENT.search(message) else Reason.INVALID_CONTENT


def _throttled_for(response: HttpResponse) -> float | None:
    """Seconds until the rate limit resets: the longer of `Retry-After` and `RateLimit-Reset`; None without both."""
    known = [response.retry_after, number(response.headers.get("ratelimit-reset", "").strip())]
    return max((seconds for seconds in known if seconds is not None), default=None)


def _name(response: HttpResponse) -> str:
    """Resend's name of the error, such as `validation_error`; empty if the response has none."""
    name = response.document.get("name")
    return name if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= 64 else ""


def _message(response: HttpResponse) -> str:
    message = response.document.get("message")
    return message if isinstance(message, str) else ""


def _code(response: HttpResponse) -> str:
    return f"{response.status} {_name(response)}".rstrip()


def _summary(response: HttpResponse) -> str:
    """The status, Resend's name of the error, and its message or a description of the body, scrubbed."""
    words = _message(response)
    return scrub(f"{_code(response)}: {words}" if words else f"{response.status} {response.shown_body}")
