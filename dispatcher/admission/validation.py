"""Validates emails from outside, and maps insert results to problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, assert_never

from dispatcher.admission.access import Caller
from dispatcher.admission.insert_batcher import InsertResult
from dispatcher.admission.policy import Policy
from dispatcher.admission.problems import FieldError, Problem, pointer_of
from dispatcher.admission.quotas import QuotaExhausted
from dispatcher.domain.api_key import Scope
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.email import Email
from dispatcher.domain.lanes import DEFAULT_LANES
from dispatcher.domain.message import Message
from dispatcher.domain.mistakes import MAX_MISTAKES, all_mistakes
from dispatcher.domain.sms import Sms, message_from_json
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import DispatcherError, InvalidEmail, StoreBusy, StoreUnavailable
from dispatcher.producers import ALREADY_EXPIRED, Acceptance, Enqueued
from dispatcher.providers.capabilities import capability_gap

KEY_HEADER: Final = "Idempotency-Key"
_KEY_NAMES: Final = f"{KEY_HEADER} or message_key"
KEY_RULE: Final = f"1 to {MAX_KEY_CHARACTERS} printable ASCII characters, with or without double quotes"
# The draft of the Idempotency-Key header requires a quoted string (RFC 8941, section 3.3.3). The pattern also allows a
# key without quotes, because many clients send such keys.
_CHARACTER: Final = r'(?:[!#-\[\]-~]|\\["\\])'
_BETWEEN: Final = f"{{0,{MAX_KEY_CHARACTERS - 2}}}"
KEY_PATTERN: Final = (
    rf'^(?:"{_CHARACTER}(?:(?: |{_CHARACTER}){_BETWEEN}{_CHARACTER})?"|[!#-~](?:[ -~]{_BETWEEN}[!-~])?)$'
)
_KEY: Final = re.compile(KEY_PATTERN)


def key_from_header(text: str) -> str | None:
    """The message key in a header Idempotency-Key; None if it is invalid."""
    if not _KEY.fullmatch(text):
        return None
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text


@dataclass(frozen=True, slots=True)
class EmailValidator:
    """Builds emails from JSON, and checks what this API, the key and the configured providers allow.

    `configured`: the capabilities of the configured providers; empty if this process does not know the providers.
    """

    policy: Policy
    configured: Mapping[str, Capabilities]
    lanes: tuple[str, ...] = DEFAULT_LANES

    def email(
        self, document: object, caller: Caller, *, key: str | None = None, prefix: str = "", finds_all: bool = True
    ) -> Email | Sms:
        """Builds a valid email from a JSON value; an SMS if its `channel` is `sms`. Raises the problem of its mistakes.

        `key`: the message key from the header. `prefix`: the JSON pointer to the value in the body. Without
        `finds_all`, the problem names only the first mistake.
        """
        if isinstance(document, dict):
            tenant, own_key = document.get("tenant_id"), document.get("message_key")
            if not isinstance(tenant, str | None):
                raise refusal([InvalidEmail("tenant_id", "must be a string")], prefix)
            document = dict(document, tenant_id=caller.tenant(tenant))
            if key is not None:
                if own_key not in (None, key):
                    reason = f"must equal the header {KEY_HEADER}, or be left out"
                    raise refusal([InvalidEmail("message_key", reason)], prefix)
                document["message_key"] = key
        try:
            email = message_from_json(document, allowed_headers=self.policy.settings.allowed_provider_headers)
        except InvalidEmail as error:
            # Without a variable: a list with the error would refer to this frame, and so to itself.
            raise refusal(self._mistakes(document, error) if finds_all else [error], prefix) from None
        self.check(email, caller, prefix)
        return email

    def check(self, email: Message, caller: Caller, prefix: str = "") -> None:
        """Checks what this process, the key and the configured providers allow. Raises the problem."""
        caller.check_senders(email.senders, prefix)
        if email.lane is not None and email.lane not in self.lanes:
            raise refusal([self._no_lane()], prefix)
        caller.check_lane(email.lane, prefix)
        if email.ignore_suppression:
            caller.check_scope(Scope.IGNORE_SUPPRESSION, "ignore_suppression", prefix)
        if faults := list(islice(self.policy.faults(email), MAX_MISTAKES)):
            raise refusal(faults, prefix, "email-not-allowed")
        if why := capability_gap(email, self.configured, self.policy.settings.account_rules):
            field_error = FieldError("pointer", pointer_of(why.field, prefix), why.message)
            raise Problem("no-capable-provider", str(why), errors=[field_error])

    def _mistakes(self, document: object, first: InvalidEmail) -> list[InvalidEmail]:
        if not isinstance(document, dict):
            return [first]
        found = all_mistakes(document, first, allowed_headers=self.policy.settings.allowed_provider_headers)
        lane = document.get("lane")
        if isinstance(lane, str) and lane not in self.lanes and all(each.field != "lane" for each in found):
            found.append(self._no_lane())
        return found

    def _no_lane(self) -> InvalidEmail:
        return InvalidEmail("lane", f"is not a lane of this API, which has: {', '.join(self.lanes)}")


def refusal(found: Iterable[InvalidEmail], prefix: str, code: str = "invalid-email") -> Problem:
    return Problem(code, errors=[FieldError("pointer", pointer_of(each.field, prefix), each.reason) for each in found])


def quota_exceeded(found: QuotaExhausted) -> Problem:
    detail = (
        "The request has more recipients than the API key may still use today (UTC). The next day begins "
        f"in {found.retry_after:,} s."
    )
    return Problem("quota-exceeded", detail, retry_after=found.retry_after)


def require_enqueued(answer: InsertResult, prefix: str = "") -> Enqueued:
    """Returns the email that this request, or an earlier request with the same key and content, has enqueued.

    Raises a problem if there is none. `prefix`: the JSON pointer to the email in the body.
    """
    match answer:
        case Enqueued(acceptance=Acceptance.ACCEPTED | Acceptance.KNOWN):
            return answer
        case Enqueued(acceptance=Acceptance.EXPIRED):
            raise refusal([InvalidEmail("expires_at", ALREADY_EXPIRED)], prefix)
        case Enqueued():
            detail = f"Use a new {_KEY_NAMES} for a new email, or repeat the original request."
            raise Problem("idempotency-key-reused", detail)
        case StoreBusy():
            raise Problem("idempotency-key-in-use", f"Retry the request with the same {_KEY_NAMES}.", retry_after=1)
        case StoreUnavailable():
            detail = (
                f"The email may have been stored. Retry with the same {_KEY_NAMES}: this never creates a second email."
            )
            raise Problem("database-unavailable", detail, retry_after=1)
        case DispatcherError():
            raise DispatcherError(answer.message)  # a new exception: other requests of the batch may have the same
        case _:
            assert_never(answer)
