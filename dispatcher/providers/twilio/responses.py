"""The outcome for each response of Twilio. `docs/providers.md` has a table of these rules.

Sources: https://www.twilio.com/docs/api/errors, https://www.twilio.com/docs/usage/twilios-response, and RFC 9110 for
what Twilio does not document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.http_response import GATEWAYS, HttpResponse, message_name

NAME: Final = "twilio"
OPTED_OUT: Final = 21610
"""Twilio's error code if the recipient has answered STOP."""

_THROTTLED: Final = frozenset({14107, 20429, 21611, 63038})
"""Twilio's error codes if Twilio limits our rate, or if the sender's queue is full (21611)."""
_REJECTIONS: Final[Mapping[int, Reason]] = {
    21211: Reason.REJECTED_RECIPIENT,  # invalid number
    21214: Reason.REJECTED_RECIPIENT,  # unreachable number
    21217: Reason.REJECTED_RECIPIENT,  # invalid number
    21265: Reason.REJECTED_RECIPIENT,  # a short code cannot be a recipient
    21408: Reason.REJECTED_RECIPIENT,  # the account may not send to this region
    21421: Reason.REJECTED_RECIPIENT,  # invalid number
    21606: Reason.REJECTED_SENDER,  # a number that cannot send SMS
    21607: Reason.REJECTED_SENDER,
    21608: Reason.REJECTED_RECIPIENT,  # a trial account sends to verified numbers only
    OPTED_OUT: Reason.OPTED_OUT,
    21612: Reason.REJECTED_RECIPIENT,  # no route from this sender to this number
    21614: Reason.REJECTED_RECIPIENT,  # a landline
    21617: Reason.TOO_LARGE,
    21212: Reason.REJECTED_SENDER,
    21602: Reason.INVALID_CONTENT,
    21603: Reason.REJECTED_SENDER,
    21604: Reason.REJECTED_RECIPIENT,
    21605: Reason.TOO_LARGE,
    21618: Reason.INVALID_CONTENT,
    21619: Reason.INVALID_CONTENT,
    21659: Reason.REJECTED_SENDER,
    21660: Reason.REJECTED_SENDER,
    21661: Reason.REJECTED_SENDER,
    21703: Reason.REJECTED_SENDER,  # a Messaging Service without a number
    30007: Reason.INVALID_CONTENT,  # Twilio or a network has filtered the SMS
    30038: Reason.INVALID_CONTENT,  # the text looks like a one-time code that the account may not send
}
_OF_THE_ACCOUNT: Final[Mapping[int, tuple[str, str]]] = {
    401: ("refused the credentials", "Check DISPATCHER_TWILIO_ACCOUNT_SID and the auth token or API key."),
    402: ("sends nothing until the account is paid", "Top up the account."),
    403: ("does not let this account or key send", "Check the account's status and the key's permissions."),
    404: ("does not have this account", "Check DISPATCHER_TWILIO_ACCOUNT_SID and DISPATCHER_TWILIO_URL."),
    405: ("does not accept a POST to this URL", "Check DISPATCHER_TWILIO_URL."),
}
_UNUSABLE: Final = ("sent an unexpected response", "Check DISPATCHER_TWILIO_URL.")
_OF_THE_ACCOUNT_BY_CODE: Final = frozenset({20003, 20005, 20006, 20008, 30002, 30010})


def outcome_of(response: HttpResponse) -> Outcome:
    """The outcome for a response to `POST /Messages.json`. Raises ProviderFault if not the SMS is at fault."""
    status, error, code = response.status, _error(response), code_of(response)
    if status == 201 and (sid := message_name(response.document.get("sid"))):
        return Accepted(sid)
    if status < 400 or status in GATEWAYS:
        return Uncertain(_summary(response), code)
    if status == 429 or error in _THROTTLED:
        return Deferred(Reason.THROTTLED, _summary(response), code, response.retry_after)
    if status == 408 or status >= 500:
        return Deferred(Reason.SERVER_ERROR, _summary(response), code, response.retry_after)
    if error in _OF_THE_ACCOUNT_BY_CODE:
        raise fault_of(response)
    if (reason := _REJECTIONS.get(error)) is not None:
        return Rejected(reason, _summary(response), code)
    if status in _OF_THE_ACCOUNT:
        raise fault_of(response)
    if status == 413:
        return Rejected(Reason.TOO_LARGE, _summary(response), code)
    if error:  # Any other error code of Twilio concerns this SMS.
        return Rejected(Reason.REFUSED, _summary(response), code)
    raise fault_of(response)


def fault_of(response: HttpResponse) -> ProviderFault:
    """The fault for a response that concerns the account or the settings."""
    what, remedy = _OF_THE_ACCOUNT.get(response.status, _UNUSABLE)
    if _error(response) in _OF_THE_ACCOUNT_BY_CODE and response.status not in (401, 402, 403):
        what, remedy = _OF_THE_ACCOUNT[403]
    return ProviderFault(NAME, f"Twilio {what}: {_summary(response).rstrip('.')}.", remedy=remedy)


def _error(response: HttpResponse) -> int:
    """Twilio's error code; 0 if the response has none."""
    found = response.document.get("code")
    return found if isinstance(found, int) and not isinstance(found, bool) and 10_000 <= found <= 99_999 else 0


def code_of(response: HttpResponse) -> str:
    """The status, and Twilio's error code if there is one: `400 21211`."""
    return f"{response.status} {_error(response) or ''}".rstrip()


def _summary(response: HttpResponse) -> str:
    """The status, Twilio's error code, and the message or a description of the body, scrubbed."""
    message = response.document.get("message")
    if isinstance(message, str) and message and response.status >= 400:
        return scrub(f"{code_of(response)}: {message}")
    return scrub(f"{code_of(response)} {response.shown_body}")
