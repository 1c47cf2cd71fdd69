"""Validates requests and emails, and maps insert results to responses or problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, assert_never

from starlette.requests import Request

from dispatcher.api.access import AccessControl, Caller
from dispatcher.api.insert_batcher import InsertResult
from dispatcher.api.policy import Policy
from dispatcher.api.problems import FieldError, Problem, pointer_of
from dispatcher.api.quotas import QuotaExhausted
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope
from dispatcher.domain.capabilities import Capabilities, recipients_of
from dispatcher.domain.email import Email
from dispatcher.domain.lanes import DEFAULT_LANES
from dispatcher.domain.message import Message
from dispatcher.domain.mistakes import MAX_MISTAKES, all_mistakes
from dispatcher.domain.sms import Sms, message_from_json
from dispatcher.domain.text import MAX_KEY_CHARACTERS, shown, unknown_fault
from dispatcher.errors import DispatcherError, InvalidEmail, StoreBusy, StoreUnavailable
from dispatcher.producers import ALREADY_EXPIRED, Acceptance, Enqueued
from dispatcher.providers.capabilities import capability_gap

KEY_HEADER: Final = "Idempotency-Key"
_KEY_NAMES: Final = f"{KEY_HEADER} or message_key"
MAX_BATCH_EMAILS: Final = 1000
# The draft of the Idempotency-Key header requires a quoted string (RFC 8941, section 3.3.3). The pattern also allows a
# key without quotes, because many clients send such keys.
_CHARACTER: Final = r'(?:[!#-\[\]-~]|\\["\\])'
_BETWEEN: Final = f"{{0,{MAX_KEY_CHARACTERS - 2}}}"
KEY_PATTERN: Final = (
    rf'^(?:"{_CHARACTER}(?:(?: |{_CHARACTER}){_BETWEEN}{_CHARACTER})?"|[!#-~](?:[ -~]{_BETWEEN}[!-~])?)$'
)
_KEY: Final = re.compile(KEY_PATTERN)


def idempotency_key(request: Request) -> str | None:
    """The email's key from the Idempotency-Key header; None without the header. A repeated header is invalid."""
    given = request.headers.getlist(KEY_HEADER)
    if not given or given == [""]:
        return None
    key = given[0] if len(given) == 1 else ""
    if not _KEY.fullmatch(key):
        reason = (
            f"must be one key of 1 to {MAX_KEY_CHARACTERS} printable ASCII characters, with or without double quotes; "
            "put a key with other characters into the body, as message_key"
        )
        raise Problem("idempotency-key-invalid", errors=[FieldError("header", KEY_HEADER, reason)])
    return re.sub(r"\\(.)", r"\1", key[1:-1]) if key.startswith('"') else key


def require_key(document: object, key: str | None) -> None:
    if key is None and isinstance(document, dict) and document.get("message_key") is None:
        detail = (
            f"Set the header {KEY_HEADER}, or message_key in the body, to your unique name for the email, "
            "such as order-17-receipt."
        )
        raise Problem("idempotency-key-missing", detail)


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
                raise _refusal([InvalidEmail("tenant_id", "must be a string")], prefix)
            document = dict(document, tenant_id=caller.tenant(tenant))
            if key is not None:
                if own_key not in (None, key):
                    reason = f"must equal the header {KEY_HEADER}, or be left out"
                    raise _refusal([InvalidEmail("message_key", reason)], prefix)
                document["message_key"] = key
        try:
            email = message_from_json(document, allowed_headers=self.policy.settings.allowed_provider_headers)
        except InvalidEmail as error:
            # Without a variable: a list with the error would refer to this frame, and so to itself.
            raise _refusal(self._mistakes(document, error) if finds_all else [error], prefix) from None
        caller.check_senders(email.senders, prefix)
        if email.lane is not None and email.lane not in self.lanes:
            raise _refusal([self._no_lane()], prefix)
        caller.check_lane(email.lane, prefix)
        if email.ignore_suppression:
            caller.check_scope(Scope.IGNORE_SUPPRESSION, "ignore_suppression", prefix)
        if faults := list(islice(self.policy.faults(email), MAX_MISTAKES)):
            raise _refusal(faults, prefix, "email-not-allowed")
        if why := capability_gap(email, self.configured, self.policy.settings.account_rules):
            field_error = FieldError("pointer", pointer_of(why.field, prefix), why.message)
            raise Problem("no-capable-provider", str(why), errors=[field_error])
        return email

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


def _refusal(found: Iterable[InvalidEmail], prefix: str, code: str = "invalid-email") -> Problem:
    return Problem(code, errors=[FieldError("pointer", pointer_of(each.field, prefix), each.reason) for each in found])


async def admit(access: AccessControl, settings: Settings, caller: Caller, email: Message) -> None:
    """Checks what a caller may enqueue, for an email that an action makes, and takes its recipients from the quota of
    the caller's key. Raises the problem."""
    if caller.key is not None and Scope.SEND not in caller.key.scopes:
        raise Problem("insufficient-scope", f"Use a key that also has the scope {Scope.SEND}.")
    caller.check_senders(email.senders)
    if email.ignore_suppression:
        caller.check_scope(Scope.IGNORE_SUPPRESSION, "ignore_suppression")
    if faults := list(islice(Policy(settings).faults(email), MAX_MISTAKES)):
        raise _refusal(faults, "", "email-not-allowed")
    reservation = await access.quotas.reserve(caller.key, recipients_of(email))
    if isinstance(reservation, QuotaExhausted):
        raise quota_exceeded(reservation)


def quota_exceeded(found: QuotaExhausted) -> Problem:
    detail = (
        "The request has more recipients than the API key may still use today (UTC). The next day begins "
        f"in {found.retry_after:,} s."
    )
    return Problem("quota-exceeded", detail, retry_after=found.retry_after)


def batch_items(document: object) -> Sequence[object]:
    """The entries of a batch's `emails`, not yet validated."""
    emails = document.get("emails") if isinstance(document, dict) else None
    if not isinstance(document, dict):
        where, wrong = "#", "must be an object"
    elif unknown := next((name for name in document if name != "emails"), None):
        where, wrong = pointer_of(shown(unknown)), unknown_fault(unknown, ["emails"])
    elif not isinstance(emails, list):
        where, wrong = "#/emails", "must be a list"
    elif not 1 <= len(emails) <= MAX_BATCH_EMAILS:
        where = "#/emails"
        wrong = f"must have 1 to {MAX_BATCH_EMAILS:,} entries; this request has {len(emails):,}"
    else:
        return emails
    raise Problem("invalid-body", errors=[FieldError("pointer", where, wrong)])


def require_enqueued(answer: InsertResult, prefix: str = "") -> Enqueued:
    """Returns the email that this request, or an earlier request with the same key and content, has enqueued.

    Raises a problem if there is none. `prefix`: the JSON pointer to the email in the body.
    """
    match answer:
        case Enqueued(acceptance=Acceptance.ACCEPTED | Acceptance.KNOWN):
            return answer
        case Enqueued(acceptance=Acceptance.EXPIRED):
            raise _refusal([InvalidEmail("expires_at", ALREADY_EXPIRED)], prefix)
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
