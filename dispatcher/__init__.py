"""Email Dispatcher: an application enqueues emails in its own PostgreSQL transaction, and a service sends them.

Applications need only the names in `__all__`. All other modules implement the service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from dispatcher.version import VERSION

if TYPE_CHECKING:
    from dispatcher.domain.calendar import Calendar
    from dispatcher.domain.email import Email
    from dispatcher.domain.outgoing import Attachment
    from dispatcher.domain.sms import Sms
    from dispatcher.domain.status import OnUncertain
    from dispatcher.errors import DispatcherError, InvalidEmail, MessageKeyConflict, SchemaError, UnusableConnection
    from dispatcher.producers import (
        Acceptance,
        Enqueued,
        enqueue,
        enqueue_async,
        enqueue_many,
        enqueue_many_async,
    )

__version__ = VERSION

__all__ = [
    "Acceptance",
    "Attachment",
    "Calendar",
    "DispatcherError",
    "Email",
    "Enqueued",
    "InvalidEmail",
    "MessageKeyConflict",
    "OnUncertain",
    "SchemaError",
    "Sms",
    "UnusableConnection",
    "__version__",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
]

_MODULES: Final = {
    "domain.calendar": ("Calendar",),
    "domain.email": ("Email",),
    "domain.outgoing": ("Attachment",),
    "domain.sms": ("Sms",),
    "domain.status": ("OnUncertain",),
    "errors": ("DispatcherError", "InvalidEmail", "MessageKeyConflict", "SchemaError", "UnusableConnection"),
    "producers": ("Acceptance", "Enqueued", "enqueue", "enqueue_async", "enqueue_many", "enqueue_many_async"),
}

if not TYPE_CHECKING:  # type checkers must not see this function: they would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use. Most processes use no public name, so importing them at the start would
        waste time."""
        for module, names in _MODULES.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(f"{__name__}.{module}"), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
