"""Intake: from a request's JSON to emails that may be enqueued, and from what became of them to an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

from starlette.requests import Request

from dispatcher.api.access import Caller
from dispatcher.api.gathering import Answer
from dispatcher.api.policy import Policy
from dispatcher.api.problems import Flaw, Problem, pointer_of
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.email import Email
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.errors import DispatcherError, InvalidEmail, StoreBusy, StoreUnavailable
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.providers.capabilities import uncarried

KEY_HEADER: Final = "Idempotency-Key"
MOST_IN_BATCH: Final = 1000
# RFC 8941, section 3.3.3: a string in quotes; the draft of the header wants one, and many clients send the bare key.
_CHARACTER: Final = r'(?:[!#-\[\]-~]|\\["\\])'
_BETWEEN: Final = f"{{0,{MAX_KEY_CHARACTERS - 2}}}"
KEY_PATTERN: Final = (
    rf'^(?:"{_CHARACTER}(?:(?: |{_CHARACTER}){_BETWEEN}{_CHARACTER})?"|[!#-~](?:[ -~]{_BETWEEN}[!-~])?)$'
)
_KEY: Final = re.compile(KEY_PATTERN)


def idempotency_key(request: Request) -> str | None:
    """The email's key from the request's header; None if the request has no such header.

    Raises:
        Problem: the header is there twice, or is not a valid key.
    """
    given = request.headers.getlist(KEY_HEADER)
    if not given or given == [""]:
        return None
    key = given[0] if len(given) == 1 else ""
    if not _KEY.fullmatch(key):
        reason = (
            f"must be one key of 1 to {MAX_KEY_CHARACTERS} printable ASCII characters, in double quotes or bare; "
            "put any other key into the body, as message_key"
        )
        raise Problem("idempotency-key-invalid", flaws=[Flaw("header", KEY_HEADER, reason)])
    return re.sub(r"\\(.)", r"\1", key[1:-1]) if key.startswith('"') else key


def check_named(document: object, key: str | None) -> None:
    """Checks that the header or the body has the email's key.

    Raises:
        Problem: neither has it.
    """
    if key is None and isinstance(document, dict) and document.get("message_key") is None:
        raise Problem("idempotency-key-missing", "It is your own name for the email, such as order-17-receipt.")


@dataclass(frozen=True, slots=True)
class Intake:
    """What an email must be to get in.

    Attributes:
        configured: What the configured providers can carry; empty where this process does not know who they are.
    """

    policy: Policy
    configured: Mapping[str, Capabilities]

    def email(self, document: object, caller: Caller, *, key: str | None = None, below: str = "") -> Email:
        """The email that a JSON value describes, allowed for this caller.

        Args:
            key: The message key where a header gives it; the value may repeat it.
            below: Where it stands in the body, as a JSON pointer.

        Raises:
            Problem: it is none, or is not allowed.
        """
        if isinstance(document, dict):
            document = dict(document, tenant_id=_tenant(document, caller, below))
            if key is not None:
                _check_key(document.get("message_key"), key, below)
                document["message_key"] = key
        email = self._valid(document, below)
        caller.check_sender(email.sender, below)
        try:
            self.policy.check(email)
        except InvalidEmail as error:
            raise Problem("email-not-allowed", flaws=[_flaw(error, below)]) from None
        if why := uncarried(email, self.configured):
            flaw = Flaw("pointer", pointer_of(why.field, below), why.message)
            raise Problem("no-capable-provider", str(why), flaws=[flaw])
        return email

    def _valid(self, document: object, below: str) -> Email:
        try:
            return Email.from_json(document, allowed_headers=self.policy.allowed_headers)
        except InvalidEmail as error:
            raise Problem("invalid-email", flaws=[_flaw(error, below)]) from None


def _tenant(document: dict[str, Any], caller: Caller, below: str) -> object:
    asked = document.get("tenant_id")
    if asked is not None and not isinstance(asked, str):
        raise Problem("invalid-email", flaws=[Flaw("pointer", pointer_of("tenant_id", below), "must be a text")])
    return caller.tenant(asked)


def _check_key(given: object, key: str, below: str) -> None:
    if given is not None and given != key:
        flaw = Flaw("pointer", pointer_of("message_key", below), f"differs from the header {KEY_HEADER}")
        raise Problem("invalid-email", flaws=[flaw])


def _flaw(error: InvalidEmail, below: str) -> Flaw:
    return Flaw("pointer", pointer_of(error.field, below), error.reason)


def listed(document: object) -> Sequence[object]:
    """The emails that a batch's body lists, whatever each of them is.

    Raises:
        Problem: it lists none, or too many.
    """
    if not isinstance(document, dict):
        raise _invalid_body("#", "must be an object")
    if unknown := document.keys() - {"emails"}:
        raise _invalid_body("#", f"has {len(unknown)} fields beside `emails`")
    emails = document.get("emails")
    if not isinstance(emails, list):
        raise _invalid_body("#/emails", "must be a list")
    if not 1 <= len(emails) <= MOST_IN_BATCH:
        raise _invalid_body("#/emails", f"must have 1 to {MOST_IN_BATCH} entries")
    return emails


def _invalid_body(pointer: str, detail: str) -> Problem:
    return Problem("invalid-body", flaws=[Flaw("pointer", pointer, detail)])


def stored(answer: Answer) -> Enqueued:
    """The email that holds the key, with the same content.

    Raises:
        Problem: for every other answer.
    """
    match answer:
        case Enqueued(acceptance=Acceptance.ACCEPTED | Acceptance.KNOWN):
            return answer
        case Enqueued():
            raise Problem("idempotency-key-reused", "Use a new key for a new email, or send the same content again.")
        case StoreBusy():
            raise Problem("idempotency-key-in-use", retry_after=1)
        case StoreUnavailable():
            raise Problem(
                "database-unavailable", "The same request again finds out whether it was kept.", retry_after=1
            )
        case DispatcherError():
            raise Problem("internal-error", answer.message)
        case _:
            assert_never(answer)
