"""Errors as pages: what happened, why, and what to do."""

from __future__ import annotations

from typing import Final

from dispatcher.admission.problems import PROBLEM_TYPES, Problem
from dispatcher.errors import (
    BrokerUnavailable,
    DispatcherError,
    InvalidEmail,
    SchemaError,
    StoreBusy,
    StoreTooSlow,
    StoreUnavailable,
    ValueRefused,
)
from dispatcher.telemetry.log import get_log

TITLES: Final = {
    400: "This could not be understood",
    401: "Sign in",
    403: "This is not allowed",
    404: "Nothing is here",
    405: "This is not possible here",
    409: "This could not be done",
    413: "This is too large",
    429: "Too many attempts",
    500: "Something went wrong",
    503: "Not available at the moment",
    504: "This took too long",
}
_FIND_CAUSE: Final = "Try again. To find the cause, run `dispatcher doctor`."


class PageError(Exception):
    """An error that the visitor gets as a page. `message`: what happened, in one sentence. `remedy`: what to do."""

    def __init__(self, status: int, message: str, remedy: str = "", *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.remedy = remedy
        self.retry_after = retry_after

    @property
    def title(self) -> str:
        return TITLES.get(self.status, TITLES[500])


def not_found(what: str) -> PageError:
    """The error for an id that does not exist, or that belongs to a tenant that the visitor may not see."""
    remedy = "Check the id, or search for it under Emails." if what == "email" else "Check the id."
    return PageError(404, f"There is no {what} with this id.", remedy)


def page_error_of(error: Exception) -> PageError:
    """The page for an exception. Unexpected exceptions are logged."""
    match error:
        case PageError():
            return error
        case Problem():
            title = PROBLEM_TYPES[error.code].title
            return PageError(error.status, title, error.detail or "", retry_after=error.retry_after)
        case StoreTooSlow():
            return PageError(
                504, "PostgreSQL needed too long for this page.", "Use a narrower filter, such as a shorter period."
            )
        case StoreBusy():
            remedy = "Try again in a few seconds. If you sent a form, check first whether its action was carried out."
            return PageError(503, "Another transaction has locked a row that this page needs.", remedy, retry_after=2)
        case StoreUnavailable():
            get_log().warning("store.connection_lost", reason=str(error), retry_in_seconds=2)
            return PageError(503, "PostgreSQL is not available.", _FIND_CAUSE)
        case BrokerUnavailable():
            return PageError(503, "RabbitMQ is not available.", _FIND_CAUSE)
        case InvalidEmail() | ValueRefused():
            return PageError(400, str(error), "Go back, and correct the form.")
        case SchemaError():
            get_log().error("error.unexpected", where="ops page", error=error.message)
            return PageError(500, error.message, error.remedy or "")
        case DispatcherError():
            return PageError(409, error.message, error.remedy or "")
        case _:
            get_log().error("error.unexpected", where="ops page", error=type(error).__name__)
            return PageError(500, "An internal error occurred.", "The API's log has details (error.unexpected).")
