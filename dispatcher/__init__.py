"""Email Dispatcher: enqueue transactional email in your own PostgreSQL transaction; a service sends it as promised.

An application needs no more than what stands here; everything else is the service.
"""

from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError, InvalidEmail, MessageKeyConflict
from dispatcher.producers import (
    Acceptance,
    Enqueued,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
)
from dispatcher.version import VERSION

__version__ = VERSION

__all__ = [
    "Acceptance",
    "Attachment",
    "DispatcherError",
    "Email",
    "Enqueued",
    "InvalidEmail",
    "MessageKeyConflict",
    "OnUncertain",
    "__version__",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
]
