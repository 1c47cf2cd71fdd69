"""What the API says, as values; and its problems, as exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError


class ApiProblem(DispatcherError):
    """The API refused a request.

    Attributes:
        status: The HTTP status.
        code: The problem's kind, such as `invalid-email`; `unknown` if what answered is not the API.
        errors: What in the request is wrong, as the API says it.
        retry_after: Seconds after which the same request may succeed; None if it never will.
    """

    def __init__(self, status: int, document: Mapping[str, Any], retry_after: float | None = None) -> None:
        self.status = status
        self.code = str(document.get("code", "unknown"))
        self.errors: Sequence[Mapping[str, str]] = document.get("errors", ())
        self.retry_after = retry_after
        where = "; ".join(": ".join(map(str, error.values())) for error in self.errors)
        words = [str(document.get("title", f"The answer was {status}.")), str(document.get("detail", "")), where]
        super().__init__(" ".join(word for word in words if word))


class NoAnswer(DispatcherError):
    """Nobody answered, however often it was tried. The same email again is harmless, and may have been accepted."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """An email that is accepted.

    Attributes:
        is_known: An earlier request had brought it.
    """

    id: UUID
    message_key: str
    is_known: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """An email of a batch that is not accepted."""

    problem: ApiProblem


@dataclass(frozen=True, slots=True)
class Attempt:
    """One provider call that ended."""

    attempt: int
    provider: str
    started_at: datetime
    finished_at: datetime
    outcome: str
    error_type: str | None
    error: str | None
    provider_code: str | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why an email is not sent yet.

    Attributes:
        reason: A reason from docs/api.md, such as `provider_paused`.
        until: When the wait ends at the latest, or when the next try is; None if unknown.
    """

    reason: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class EmailStatus:
    """What became of an email.

    Attributes:
        waiting: Why it is not sent yet; None unless it is pending or sending.
        refused_recipients: Whom the provider left out as it accepted the email, by position and code, such as
            `2 (550 5.1.1), 3 (451)`; None if nobody.
    """

    id: UUID
    message_key: str
    status: Status
    attempt_count: int
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    provider_message_id: str | None
    created_at: datetime
    sent_at: datetime | None
    refused_recipients: str | None
    waiting: Waiting | None
    attempts: tuple[Attempt, ...]


def receipt_of(document: Mapping[str, Any], *, is_known: bool) -> Receipt:
    """The receipt that an answer is."""
    return Receipt(UUID(document["id"]), document["message_key"], is_known)


def results_of(document: Mapping[str, Any]) -> list[Receipt | Refused]:
    """What became of each email of a batch."""
    return [
        Refused(ApiProblem(result["problem"]["status"], result["problem"]))
        if result["outcome"] == "refused"
        else receipt_of(result["email"], is_known=result["outcome"] == "known")
        for result in document["results"]
    ]


def status_of(document: Mapping[str, Any]) -> EmailStatus:
    """What became of an email, as an answer tells it; fields that this client does not know are left out."""
    told: dict[str, Any] = {name: document.get(name) for name in EmailStatus.__dataclass_fields__}
    told["id"] = UUID(document["id"])
    told["status"] = Status(document["status"])
    told["created_at"] = datetime.fromisoformat(document["created_at"])
    told["sent_at"] = datetime.fromisoformat(document["sent_at"]) if document["sent_at"] else None
    told["waiting"] = _waiting(document["waiting"]) if document.get("waiting") else None
    told["attempts"] = tuple(_attempt(attempt) for attempt in document["attempts"])
    return EmailStatus(**told)


def _waiting(document: Mapping[str, Any]) -> Waiting:
    until = document.get("until")
    return Waiting(document["reason"], datetime.fromisoformat(until) if until else None)


def _attempt(document: Mapping[str, Any]) -> Attempt:
    told: dict[str, Any] = {name: document.get(name) for name in Attempt.__dataclass_fields__}
    for name in ("started_at", "finished_at"):
        told[name] = datetime.fromisoformat(document[name])
    return Attempt(**told)
