"""The outcome for each response of SES. `docs/providers.md` has a table of these rules.

In a bulk call, a response 200 reports on each entry. After any other response, SES has accepted none of the entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from dispatcher.domain.outcome import Accepted, AccountFault, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.provider_text import QUOTA_SECONDS, SENDER, STOPPED, cause_of
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import BulkCallRefused
from dispatcher.transport.http_response import GATEWAYS, HttpResponse, RequestNotSent, message_name, number
from dispatcher.transport.tls_faults import tls_fault

NAME: Final = "ses"


@dataclass(frozen=True, slots=True)
class SetupFault:
    """The account or the settings are at fault, not the email. `seconds`: how long not to try SES; None if unknown."""

    remedy: str
    seconds: float | None = None


Verdict = Deferred | Rejected | SetupFault

_THROTTLED: Final = Deferred(Reason.THROTTLED)
_SERVER: Final = Deferred(Reason.SERVER_ERROR)
_CONTENT: Final = Rejected(Reason.INVALID_CONTENT)
_SENDER: Final = Rejected(Reason.REJECTED_SENDER, fault=SENDER)
_RECIPIENT: Final = Rejected(Reason.REJECTED_RECIPIENT)
_TOO_LARGE: Final = Rejected(Reason.TOO_LARGE)
_QUOTA: Final = SetupFault("Wait, or ask AWS for a higher sending quota; `dispatcher doctor` shows it.", QUOTA_SECONDS)
_SANDBOX: Final = SetupFault("Ask AWS for production access: in the sandbox, SES sends only to verified recipients.")
_PAUSED: Final = SetupFault("See the SES console and the account's inbox. Sending stays paused until AWS enables it.")
_CREDENTIALS: Final = SetupFault(
    "Check AWS's credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, profile or role."
)
_PERMISSION: Final = SetupFault(
    "Allow these credentials to call ses:SendEmail for this identity, with raw and templated content too."
)
_CLOCK: Final = SetupFault("Correct this host's clock: AWS rejects requests whose time is minutes off.")
_SET_UP: Final = SetupFault("Check DISPATCHER_SES_CONFIGURATION_SET and the region, AWS_REGION.")
_ENDPOINT: Final = SetupFault("Check DISPATCHER_SES_ENDPOINT_URL and AWS_REGION: the endpoint is not SES v2.")

_CODES: Final[tuple[tuple[Verdict, str], ...]] = (
    # Errors of SendEmail itself; a test compares them with botocore's model.
    (_THROTTLED, "TooManyRequestsException"),
    (_QUOTA, "LimitExceededException"),
    (_PAUSED, "AccountSuspendedException SendingPausedException"),
    (_CONTENT, "MessageRejected NotFoundException BadRequestException"),
    (_SENDER, "MailFromDomainNotVerifiedException"),
    # Errors of SES v1, which SES v2 sometimes returns.
    (_PAUSED, "AccountSendingPausedException ConfigurationSetSendingPausedException"),
    (_SET_UP, "ConfigurationSetDoesNotExistException"),
    (_CONTENT, "TemplateDoesNotExistException"),
    # Errors of every AWS service: https://docs.aws.amazon.com/ses/latest/APIReference-V2/CommonErrors.html, and
    # botocore's own list of throttling errors.
    (_THROTTLED, "Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException"),
    (_THROTTLED, "RequestLimitExceeded BandwidthLimitExceeded ProvisionedThroughputExceededException SlowDown"),
    (_THROTTLED, "TransactionInProgressException PriorRequestNotComplete EC2ThrottledException"),
    (_SERVER, "InternalFailure InternalError InternalServerError InternalServerException InternalServiceError"),
    (_SERVER, "ServiceUnavailable ServiceUnavailableException RequestTimeout RequestTimeoutException"),
    (_CONTENT, "ValidationError ValidationException SerializationException InvalidParameterValue MissingParameter"),
    (_TOO_LARGE, "RequestEntityTooLarge RequestEntityTooLargeException"),
    (_PERMISSION, "AccessDenied AccessDeniedException NotAuthorized UnauthorizedOperation"),
    (_CREDENTIALS, "InvalidClientTokenId UnrecognizedClientException InvalidAccessKeyId AuthFailure InvalidToken"),
    (_CREDENTIALS, "SignatureDoesNotMatch InvalidSignatureException IncompleteSignature IncompleteSignatureException"),
    (_CREDENTIALS, "MissingAuthenticationToken MissingAuthenticationTokenException ExpiredToken ExpiredTokenException"),
    (_CREDENTIALS, "OptInRequired SubscriptionRequiredException"),
    (_CLOCK, "RequestExpired RequestTimeTooSkewed RequestInTheFuture"),
    (_ENDPOINT, "InvalidAction UnknownOperationException"),
)

VERDICTS: Final[Mapping[str, Verdict]] = MappingProxyType(
    {code: verdict for verdict, codes in _CODES for code in codes.split()}
)
"""The verdicts by SES's error code."""

BY_STATUS: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        401: _CREDENTIALS,
        403: _PERMISSION,
        404: _ENDPOINT,
        405: _ENDPOINT,
        407: _ENDPOINT,
        408: _SERVER,
        413: _TOO_LARGE,
        429: _THROTTLED,
    }
)
"""The verdicts by status, for a response without a known error code. Any other 4xx is `Rejected`, any other 5xx
`Deferred`."""

BY_ENTRY: Final[Mapping[str, Verdict]] = MappingProxyType(
    {
        "MESSAGE_REJECTED": _CONTENT,
        "INVALID_PARAMETER": _CONTENT,
        "TEMPLATE_NOT_FOUND": _CONTENT,
        "MAIL_FROM_DOMAIN_NOT_VERIFIED": _SENDER,
        "ACCOUNT_THROTTLED": _THROTTLED,
        "ACCOUNT_DAILY_QUOTA_EXCEEDED": _QUOTA,
        "ACCOUNT_SUSPENDED": _PAUSED,
        "ACCOUNT_SENDING_PAUSED": _PAUSED,
        "CONFIGURATION_SET_SENDING_PAUSED": _PAUSED,
        "CONFIGURATION_SET_NOT_FOUND": _SET_UP,
        "INVALID_SENDING_POOL_NAME": _SET_UP,
        "TRANSIENT_FAILURE": _SERVER,
        "FAILED": Deferred(Reason.REFUSED),
    }
)
"""The verdicts by the status of an entry in SendBulkEmail's response, except SUCCESS. A test compares the statuses with
botocore's model. FAILED means only that SES could not process this entry: the email is retried, and the failure does
not count against SES."""

_OF_THE_CALL: Final = frozenset({"NotFoundException", "TemplateDoesNotExistException"})
"""Error codes which mean that SES did not find something that all emails of the call share, such as the template."""
_ENDED: Final = re.compile("ExpiredToken(Exception)?|Invalid(ClientToken|AccessKey)Id|UnrecognizedClientException")
"""Error codes of credentials that have expired or no longer exist."""

_NOT_VERIFIED: Final = re.compile(r"not verified(?:.*region \S+: *(.*))?", re.IGNORECASE | re.DOTALL)
"""Matches the identities that failed SES's check, if the message lists them."""
_SYNTAX: Final = re.compile(
    r"illegal address|missing final '@|invalid (?:e-?mail )?address|(?:local address|domain) (?:contain|start|end)",
    re.IGNORECASE,
)
_SIGNED_AT: Final = re.compile(r"signature (?:expired|not yet current)|(?:earlier|later) than", re.IGNORECASE)
"""Matches "Signature expired: 20261128T… is now earlier than …", which has the same code as a wrong secret key."""
_CONFIGURATION_SET: Final = re.compile(r"configuration.?set", re.IGNORECASE)
_LENGTH: Final = re.compile(r"length is more than|too large|exceed\w* .*\bsize|size .*exceed", re.IGNORECASE)
_MAX_RETRY_SECONDS: Final = 86_400


def outcome_of(response: HttpResponse, *, has_template: bool, sender: str = "") -> Outcome:
    """The outcome for a response to SendEmail. Raises ProviderFault if not the email is at fault."""
    if response.status >= 300:
        return refusal_of(response, has_template=has_template, sender=sender)
    name = response.document.get("MessageId")
    if isinstance(name, str) and name:
        return Accepted(message_name(name))
    kind = response.headers.get("content-type", "no content type")
    return Uncertain(scrub(f"a response without a MessageId ({kind})"), str(response.status))


def bulk_outcomes_of(response: HttpResponse, count: int) -> list[Outcome | ProviderFault] | BulkCallRefused:
    """The outcome of each email of a SendBulkEmail; all are uncertain if the response does not report on each."""
    if response.status >= 300:
        outcome = refusal_of(response, has_template=True)
        is_common = not isinstance(outcome, Rejected) or outcome.reason is Reason.REJECTED_SENDER
        if is_common or (isinstance(outcome, Rejected) and outcome.code in _OF_THE_CALL):
            return [outcome] * count
        return BulkCallRefused()
    results = response.document.get("BulkEmailEntryResults")
    if not isinstance(results, list) or len(results) != count or not all(isinstance(each, dict) for each in results):
        unknown: Outcome = Uncertain("the response does not report on each email", str(response.status))
        return [unknown] * count
    return [_entry_outcome(result) for result in results]


def _entry_outcome(result: Mapping[str, Any]) -> Outcome | ProviderFault:
    """The outcome for one entry of SendBulkEmail, by the entry's status."""
    status = result.get("Status")
    if status == "SUCCESS":
        return Accepted(message_name(result.get("MessageId")))
    verdict = BY_ENTRY.get(status) if isinstance(status, str) else None
    message = str(result.get("Error") or "")
    words = scrub(message)
    if verdict is None:
        return Uncertain(words or "the entry's status is unknown", scrub(str(status or "")) or None)
    assert isinstance(status, str)
    verdict = _refined(verdict, status, message, has_template=True)
    if isinstance(verdict, SetupFault):
        return _fault(verdict, status, words)
    return replace(verdict, detail=words or None, code=status)


def _fault(verdict: SetupFault, code: str, words: str) -> ProviderFault:
    message = f"SES refuses every email ({code}): {words}"
    return ProviderFault(NAME, message, remedy=verdict.remedy, seconds=verdict.seconds)


def refusal_of(response: HttpResponse, *, has_template: bool = False, sender: str = "") -> Outcome:
    """The outcome for a response with a status of 300 or more; arguments and exceptions as for `outcome_of`."""
    error = _error_of(response)
    if error is None:
        return Uncertain("the response cannot be parsed", str(response.status))
    status, (code, message) = response.status, error
    words = scrub(message)
    milliseconds = number(response.headers.get("x-amz-retry-after", ""))
    retry_after = response.retry_after if milliseconds is None else milliseconds / 1000
    if retry_after is not None:
        retry_after = min(retry_after, _MAX_RETRY_SECONDS)
    # SES v1 leaves out the suffix of some codes.
    verdict = VERDICTS.get(code) or VERDICTS.get(f"{code}Exception") or BY_STATUS.get(status)
    if verdict is None:
        if status < 400 or status in GATEWAYS:
            return Uncertain(words or "a response without a message", code or str(status))
        verdict = Rejected(Reason.REFUSED) if status < 500 else _SERVER
    verdict = _refined(verdict, code, message, has_template=has_template, sender=sender)
    match verdict:
        case SetupFault():
            raise _fault(verdict, code or str(status), words)
        case Deferred():
            return replace(verdict, detail=words or None, code=code or str(status), retry_after=retry_after)
        case Rejected():
            return replace(verdict, detail=words or None, code=code or str(status))


def unsent_outcome(error: RequestNotSent) -> Deferred:
    """The outcome for a request that was not sent. Raises ProviderFault if TLS cannot succeed (see `tls_fault`)."""
    if fault := tls_fault(NAME, "the endpoint", error.__cause__, url="DISPATCHER_SES_ENDPOINT_URL"):
        raise fault from error
    return error.outcome


def credentials_fault(error: Exception) -> ProviderFault:
    """The fault if botocore found no AWS credentials: they are missing or incomplete, or a server refused them."""
    return ProviderFault(
        NAME, f"no AWS credentials to sign requests with ({type(error).__name__}).", remedy=_CREDENTIALS.remedy
    )


@cache
def _parser() -> Any:
    from botocore.parsers import create_parser  # imported here, so that it is loaded only if ses is configured

    return create_parser("rest-json")


def _error_of(response: HttpResponse) -> tuple[str, str] | None:
    """The code and the unscrubbed message of an error response; None if botocore cannot parse them."""
    raw = {"status_code": response.status, "headers": response.headers, "body": response.body}
    try:
        error = _parser().parse(raw, None)["Error"]
    except Exception:  # noqa: BLE001 - any failure to parse means that the response is not SES's
        return None
    code = str(error.get("Code") or "")
    # If the response has no code, botocore returns the HTTP status as the code.
    return "" if code == str(response.status) else scrub(code), str(error.get("Message") or "")


def refuses_credentials(response: HttpResponse) -> bool:
    """Whether SES refused the request because its credentials have expired or no longer exist."""
    error = _error_of(response) if response.status in (400, 401, 403) else None
    return error is not None and _ENDED.fullmatch(error[0]) is not None


def is_denied(response: HttpResponse) -> bool:
    """Whether SES refused the request because the credentials lack a permission."""
    error = _error_of(response) if response.status >= 300 else None
    return error is not None and error[0].startswith("AccessDenied")


def _refined(verdict: Verdict, code: str, message: str, *, has_template: bool, sender: str = "") -> Verdict:
    """SES uses some codes for several causes. For example, MessageRejected can also mean an unverified sender."""
    if verdict is _CREDENTIALS:
        return _CLOCK if _SIGNED_AT.search(message) else verdict
    if verdict not in (_THROTTLED, _CONTENT):
        return verdict
    cause = cause_of(message)
    if cause in (STOPPED, SENDER) and (found := _NOT_VERIFIED.search(message)):
        # SES lists the identities that failed. In the sandbox, these can be recipients.
        address = sender.rpartition("<")[2].rstrip(">").lower()
        return _SANDBOX if address and found[1] and address not in found[1].lower() else _SENDER
    if isinstance(cause, AccountFault) and cause.seconds:
        return _QUOTA
    if verdict is _THROTTLED:
        return verdict
    if _CONFIGURATION_SET.search(message) or (code == "NotFoundException" and not has_template):
        return _SET_UP
    if cause == STOPPED:
        return _PAUSED
    if _SYNTAX.search(message):
        return _RECIPIENT
    return _TOO_LARGE if _LENGTH.search(message) else verdict
