"""The exceptions of this package. A provider's answer about an email is not an exception (see `domain.outcome`).

    DispatcherError               any error that we raise on purpose; the command line prints it without a traceback
    ├── ConfigurationError        settings are missing or malformed; lists every mistake; exit code 78
    ├── InvalidEmail              enqueue refused an email because of one field
    ├── MessageKeyConflict        the message key was enqueued before with a different payload
    ├── UnusableConnection        enqueue cannot use the connection that the application passed
    ├── InvalidPointer            a message does not point to an email
    ├── ServerUnavailable         PostgreSQL, RabbitMQ or a private server is unreachable or cannot be started
    │   ├── StoreUnavailable
    │   │   ├── StoreBusy         another transaction holds a lock that a statement needs
    │   │   ├── StoreTooSlow      a statement exceeded the statement timeout
    │   │   ├── StoreRefused      PostgreSQL refuses the user, the password or the database
    │   │   └── AnswerTooLarge    the process has too little memory for PostgreSQL's response
    │   └── BrokerUnavailable
    │       └── BrokerRefused     RabbitMQ refuses the user, the password or the virtual host
    ├── StatementRefused          PostgreSQL cannot execute a statement, perhaps because of one of its rows
    │   └── ValueRefused          PostgreSQL cannot store a value
    ├── SchemaError               the database's tables are missing, older, newer or edited
    ├── TopologyError             RabbitMQ's queues or exchanges are missing or differ from what we need
    └── ProviderFault             the provider cannot be used for any email: account, credentials, set-up

The module that calls a library translates the library's exceptions into these, with `raise … from`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DispatcherError(Exception):
    """An error that an operator or a developer can act on.

    Attributes:
        message: One sentence that says what is wrong, without private data.
        remedy: What to do about the error; None if the message already says so.
        public: The text that callers of the HTTP API and /readyz get instead of `message`, because `message` may name
            hosts or users. None if they may get `message`.
    """

    public: str | None = None

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" if self.remedy else self.message


class ConfigurationError(DispatcherError):
    """Settings are missing or malformed.

    Attributes:
        mistakes: One sentence per mistake, with the setting and the remedy.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = tuple(mistakes)


class InvalidEmail(DispatcherError):
    """An email is not valid. Nothing was stored.

    Attributes:
        field: The argument's name, such as `sender`, `to[1]` or `attachments[0].content`; for an email from JSON, the
            field's name, such as `from`.
        reason: Why the field is not valid. Never contains the field's value, because the value may be private.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class MessageKeyConflict(DispatcherError):
    """The message key was enqueued before with a different payload, or the email was erased (`dispatcher forget`).
    Nothing was stored.

    Attributes:
        email_id: The id of the email that was first enqueued with this key.
    """

    def __init__(self, tenant_id: str, message_key: str, email_id: str) -> None:
        super().__init__(
            f"message_key: {message_key!r} already belongs to email {email_id}, which has a different payload or was "
            "erased (`dispatcher forget`).",
            remedy="Use a new key for a new email, or send the same payload again.",
        )
        self.tenant_id = tenant_id
        self.message_key = message_key
        self.email_id = email_id


class UnusableConnection(DispatcherError):
    """The connection that the application passed is not a psycopg connection, or cannot execute a statement now."""


class InvalidPointer(DispatcherError):
    """The body of a RabbitMQ message is not valid: it is neither a pointer to emails nor a dead letter."""


class ServerUnavailable(DispatcherError):
    """A server is unreachable or cannot be started. A later retry may succeed."""


class StoreUnavailable(ServerUnavailable):
    """PostgreSQL is unreachable, or has ended our session."""

    public = "PostgreSQL is not available. The log has details."


class StoreBusy(StoreUnavailable):
    """A statement waited too long for a lock on a row or table that another transaction holds."""


class StoreTooSlow(StoreUnavailable):
    """PostgreSQL cancelled a statement, because it exceeded the statement timeout."""


class StoreRefused(StoreUnavailable):
    """PostgreSQL refuses the connection until an operator corrects a setting of the dispatcher or of PostgreSQL."""

    public = (
        "PostgreSQL refuses the user, the password or the database in DISPATCHER_DATABASE_URL. The log has details."
    )


class AnswerTooLarge(StoreUnavailable):
    """The process has too little memory for PostgreSQL's response. PostgreSQL may have executed the statement."""


class BrokerUnavailable(ServerUnavailable):
    """RabbitMQ is unreachable, or closed our connection or channel."""

    public = "RabbitMQ is not available. The log has details."


class BrokerRefused(BrokerUnavailable):
    """RabbitMQ refuses the connection until an operator corrects a setting of the dispatcher or of RabbitMQ."""

    public = "RabbitMQ refuses the user, the password or the virtual host in DISPATCHER_AMQP_URL. The log has details."


class StatementRefused(DispatcherError):
    """PostgreSQL cannot execute this statement because of a damaged row, a trigger, a value, or a bug of ours.

    If a single row is the cause, the same statement succeeds without that row (see `store.locked`).
    """


class ValueRefused(StatementRefused):
    """PostgreSQL cannot store a value of the statement. A second call with the same value fails, too."""


class SchemaError(DispatcherError):
    """The database's tables are missing, or do not match this release of the dispatcher."""


class TopologyError(DispatcherError):
    """RabbitMQ's exchange, queues or bindings are missing or differ from what we need."""


class ProviderFault(DispatcherError):
    """The provider cannot be used for any email, for example because of its credentials. The attempt does not count.

    Attributes:
        provider: The provider's name.
        seconds: How long the provider should not be tried; None if this is unknown.
    """

    def __init__(self, provider: str, message: str, *, remedy: str | None = None, seconds: float | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.provider = provider
        self.seconds = seconds

    def with_message(self, message: str) -> ProviderFault:
        return ProviderFault(self.provider, message, remedy=self.remedy, seconds=self.seconds)
