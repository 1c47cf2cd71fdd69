"""Validates requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from starlette.requests import Request

from dispatcher.admission.access import Caller
from dispatcher.admission.policy import Policy
from dispatcher.admission.problems import FieldError, Problem, pointer_of
from dispatcher.admission.quotas import QuotaExhausted
from dispatcher.admission.validation import KEY_HEADER, KEY_RULE, key_from_header, quota_exceeded, refusal
from dispatcher.api.access import AccessControl
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.message import Message
from dispatcher.domain.mistakes import MAX_MISTAKES
from dispatcher.domain.text import shown, unknown_fault

MAX_BATCH_EMAILS: Final = 1000


def idempotency_key(request: Request) -> str | None:
    """The email's key from the Idempotency-Key header; None without the header. A repeated header is invalid."""
    given = request.headers.getlist(KEY_HEADER)
    if not given or given == [""]:
        return None
    key = key_from_header(given[0]) if len(given) == 1 else None
    if key is None:
        reason = f"must be one key of {KEY_RULE}; put a key with other characters into the body, as message_key"
        raise Problem("idempotency-key-invalid", errors=[FieldError("header", KEY_HEADER, reason)])
    return key


def require_key(document: object, key: str | None) -> None:
    if key is None and isinstance(document, dict) and document.get("message_key") is None:
        detail = (
            f"Set the header {KEY_HEADER}, or message_key in the body, to your unique name for the email, "
            "such as order-17-receipt."
        )
        raise Problem("idempotency-key-missing", detail)


async def admit(access: AccessControl, settings: Settings, caller: Caller, email: Message) -> None:
    """Checks what a caller may enqueue, for an email that an action makes, and takes its recipients from the quota of
    the caller's key. Raises the problem."""
    if caller.key is not None and Scope.SEND not in caller.key.scopes:
        raise Problem("insufficient-scope", f"Use a key that also has the scope {Scope.SEND}.")
    caller.check_senders(email.senders)
    if email.ignore_suppression:
        caller.check_scope(Scope.IGNORE_SUPPRESSION, "ignore_suppression")
    if faults := list(islice(Policy(settings).faults(email), MAX_MISTAKES)):
        raise refusal(faults, "", "email-not-allowed")
    reservation = await access.quotas.reserve(caller.key, recipients_of(email))
    if isinstance(reservation, QuotaExhausted):
        raise quota_exceeded(reservation)


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
