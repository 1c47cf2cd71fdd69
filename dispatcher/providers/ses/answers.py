"""What SES's answers mean: an outcome, or a fault. `docs/providers.md` shows it as a table.

For a call with several emails, an answer of 200 speaks of each entry for itself. Another concerns all of them: nothing
was taken.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import RefusedTogether
from dispatcher.transport.http_answer import Answer, NothingLeft, message_name, number

NAME: Final = "ses"


@dataclass(frozen=True, slots=True)
class Fault:
    """The account or the set-up is to blame, not the email.

    Attributes:
        remedy: What a person can do.
    """

    remedy: str


Verdict = Deferred | Rejected | Fault

_THROTTLED: Final = Deferred(Reason.THROTTLED)
_SERVER: Final = Deferred(Reason.SERVER_ERROR)
_CONTENT: Final = Rejected(Reason.INVALID_CONTENT)
_SENDER: Final = Rejected(Reason.REJECTED_SENDER)
_TOO_LARGE: Final = Rejected(Reason.TOO_LARGE)
_QUOTA: Final = Fault("Wait, or ask AWS for a higher sending quota; `dispatcher doctor` shows it.")
_PAUSED: Final = Fault("Look into SES's console and the account's inbox; nothing can be sent before AWS lets you.")
_CREDENTIALS: Final = Fault("Check AWS's credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, profile or role.")
_PERMISSION: Final = Fault("Allow these credentials ses:SendEmail (raw and templated too) for this identity.")
_CLOCK: Final = Fault("Set this host's clock: AWS takes no request that is minutes off.")
_SET_UP: Final = Fault("Check DISPATCHER_SES_CONFIGURATION_SET and the region, AWS_REGION.")
_ENDPOINT: Final = Fault("Check DISPATCHER_SES_ENDPOINT_URL and AWS_REGION: this is not SES v2.")
_TRUST: Final = Fault("Mend the endpoint's certificate, or name its authority in DISPATCHER_CA_FILE.")

_CODES: Final[tuple[tuple[Verdict, str], ...]] = (
    # Those of SendEmail itself; a test holds them against botocore's model.
    (_THROTTLED, "TooManyRequestsException"),
    (_QUOTA, "LimitExceededException"),
    (_PAUSED, "AccountSuspendedException SendingPausedException"),
    (_CONTENT, "MessageRejected NotFoundException BadRequestException"),
    (_SENDER, "MailFromDomainNotVerifiedException"),
    # The words of SES v1, which shine through at times.
    (_PAUSED, "AccountSendingPausedException ConfigurationSetSendingPausedException"),
    (_SET_UP, "ConfigurationSetDoesNotExistException"),
    (_CONTENT, "TemplateDoesNotExistException"),
    # Those of every AWS service: https://docs.aws.amazon.com/ses/latest/APIReference-V2/CommonErrors.html, and
    # botocore's own list of what is throttling.
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
"""By SES's own code."""

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
"""For an answer without a code that we know. Any other 4xx is a definite no, any other 5xx one for now."""

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
"""By an entry's status in SendBulkEmail's answer, but for SUCCESS; a test holds it against botocore's model. FAILED
says nothing but that SES could not process this one: it is tried again, and says nothing of SES."""

_OF_THE_CALL: Final = frozenset({"NotFoundException", "TemplateDoesNotExistException"})
"""What all emails of a call have in common was not found."""
GATEWAYS: Final = frozenset({502, 504})
"""Somebody between us and SES got no answer either (RFC 9110, sections 15.6.3 and 15.6.5)."""

_BROKEN_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_DAILY: Final = re.compile(r"daily|24.hour", re.IGNORECASE)
"""SES says the quota of a day and the rate of a second with the same code: "Daily message quota exceeded"."""
_UNVERIFIED: Final = re.compile(r"not verified", re.IGNORECASE)
_STOPPED: Final = re.compile(r"sending\W+(?:\w+\W+){0,5}(?:suspended|paused|disabled)", re.IGNORECASE)
_CONFIGURATION_SET: Final = re.compile(r"configuration.?set", re.IGNORECASE)
_LENGTH: Final = re.compile(r"length is more than|too large|exceed\w* .*\bsize|size .*exceed", re.IGNORECASE)
_MAX_RETRY_SECONDS: Final = 86_400


def outcome_of(answer: Answer, *, has_template: bool) -> Outcome:
    """What an answer to SendEmail means for the email.

    Args:
        has_template: The email names a template, which SES may not find.

    Raises:
        ProviderFault: it concerns the account or the set-up; SES took nothing.
    """
    if answer.status >= 300:
        return refusal_of(answer, has_template=has_template)
    name = answer.document.get("MessageId")
    if isinstance(name, str) and name:
        return Accepted(message_name(name))
    kind = answer.headers.get("content-type", "no content type")
    return Uncertain(scrub(f"an answer without a MessageId ({kind})"), str(answer.status))


def outcomes_of_call(answer: Answer, count: int) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What an answer to SendBulkEmail means for each of so many emails; of those that it does not speak of, uncertain.

    Raises:
        ProviderFault: it concerns the account or the set-up; SES took nothing.
    """
    if answer.status >= 300:
        return _refusal_of_call(refusal_of(answer, has_template=True), count)
    results = answer.document.get("BulkEmailEntryResults")
    if not isinstance(results, list) or len(results) != count or not all(isinstance(each, dict) for each in results):
        unknown: Outcome = Uncertain("an answer that does not tell of each email", str(answer.status))
        return [unknown] * count
    return [_entry_outcome(result) for result in results]


def _refusal_of_call(outcome: Outcome, count: int) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What it means for each that SES refused the call."""
    is_common = not isinstance(outcome, Rejected) or outcome.reason is Reason.REJECTED_SENDER
    if is_common or (isinstance(outcome, Rejected) and outcome.code in _OF_THE_CALL):
        return [outcome] * count
    return RefusedTogether()


def _entry_outcome(result: Mapping[str, Any]) -> Outcome | ProviderFault:
    """The outcome of one entry of SendBulkEmail, by its status."""
    status = result.get("Status")
    if status == "SUCCESS":
        return Accepted(message_name(result.get("MessageId")))
    verdict = BY_ENTRY.get(status) if isinstance(status, str) else None
    words = scrub(str(result.get("Error") or ""))
    if verdict is None:
        return Uncertain(words or "an entry without a status that we know", scrub(str(status or "")) or None)
    assert isinstance(status, str)
    verdict = _refined(verdict, status, words, has_template=True)
    if isinstance(verdict, Fault):
        return ProviderFault(NAME, f"SES refuses every email ({status}): {words}", remedy=verdict.remedy)
    return replace(verdict, detail=words or None, code=status)


def refusal_of(answer: Answer, *, has_template: bool = False) -> Outcome:
    """The outcome of an answer with a status of 300 or more; otherwise as `outcome_of`."""
    told = _told(answer)
    if told is None:
        return Uncertain("an answer with no sense in it", str(answer.status))
    status, (code, words) = answer.status, told
    retry_after = _retry_after(answer)
    verdict = VERDICTS.get(code) or BY_STATUS.get(status)
    if verdict is None:
        if status < 400 or status in GATEWAYS:
            return Uncertain(words or "an answer without words", code or str(status))
        verdict = Rejected(Reason.REFUSED) if status < 500 else _SERVER
    verdict = _refined(verdict, code, words, has_template)
    match verdict:
        case Fault(remedy):
            raise ProviderFault(NAME, f"SES refuses every email ({code or status}): {words}", remedy=remedy)
        case Deferred():
            return replace(verdict, detail=words or None, code=code or str(status), retry_after=retry_after)
        case Rejected():
            return replace(verdict, detail=words or None, code=code or str(status))


def unsent(error: NothingLeft) -> Deferred:
    """The outcome where nothing left.

    Raises:
        ProviderFault: the endpoint's certificate or its TLS cannot be used.
    """
    cause = error.__cause__
    if error.is_untrusted:
        raise ProviderFault(
            NAME, f"the endpoint's certificate cannot be trusted: {error.detail}.", remedy=_TRUST.remedy
        ) from error
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, _BROKEN_OFF):
        raise ProviderFault(NAME, f"TLS with the endpoint failed: {error.detail}.", remedy=_ENDPOINT.remedy) from error
    return error.outcome


def unsigned(error: Exception) -> ProviderFault:
    """The fault of a search for credentials: there are none, or half of them, or the server that gives them refuses."""
    return ProviderFault(NAME, f"no request could be signed ({type(error).__name__}).", remedy=_CREDENTIALS.remedy)


@cache
def _parser() -> Any:
    from botocore.parsers import create_parser  # see the package's docstring

    return create_parser("rest-json")


def _told(answer: Answer) -> tuple[str, str] | None:
    """Code and words of a refusal, as botocore finds them; None where it finds no sense in it."""
    response = {"status_code": answer.status, "headers": answer.headers, "body": answer.body}
    try:
        told = _parser().parse(response, None)["Error"]
    except Exception:  # noqa: BLE001 - whatever it stumbles over, the answer is none of SES's
        return None
    code = str(told.get("Code") or "")
    # botocore puts the status where the answer names no code.
    return "" if code == str(answer.status) else scrub(code), scrub(str(told.get("Message") or ""))


def is_denied(answer: Answer) -> bool:
    """Whether SES refuses because these credentials may not ask."""
    told = _told(answer) if answer.status >= 300 else None
    return told is not None and told[0].startswith("AccessDenied")


def _refined(verdict: Verdict, code: str, words: str, has_template: bool) -> Verdict:
    """The same code has several meanings; SES's words tell them apart."""
    if verdict is _THROTTLED:
        return _QUOTA if _DAILY.search(words) else verdict
    if verdict is not _CONTENT:
        return verdict
    if _CONFIGURATION_SET.search(words) or (code == "NotFoundException" and not has_template):
        return _SET_UP
    if _STOPPED.search(words):
        return _PAUSED
    if _UNVERIFIED.search(words):
        return _SENDER
    return _TOO_LARGE if _LENGTH.search(words) else verdict


def _retry_after(answer: Answer) -> float | None:
    milliseconds = number(answer.headers.get("x-amz-retry-after", ""))
    seconds = answer.retry_after if milliseconds is None else milliseconds / 1000
    return None if seconds is None else min(seconds, _MAX_RETRY_SECONDS)
