"""The tree of faults: what broke, as opposed to what a provider says about an email (see `domain.outcome`).

    DispatcherError               anything that we raise on purpose; the command line prints it without a stack trace
    ├── ConfigurationError        settings are missing or malformed; holds every mistake, exit code 78
    ├── InvalidEmail              an email was refused at enqueue; names the field
    ├── MessageKeyConflict        the message key is known with another payload
    ├── UnusableConnection        enqueue cannot use the connection that it was given
    ├── InvalidPointer            bytes on the queue that point to no email
    ├── ServerUnavailable         PostgreSQL, RabbitMQ or a private server cannot be reached or started
    │   ├── StoreUnavailable
    │   │   ├── StoreBusy         another transaction holds what a statement needed
    │   │   ├── StoreRefused      it knows no such user, password or database
    │   │   └── AnswerTooLarge    the process has no memory for PostgreSQL's answer
    │   └── BrokerUnavailable
    │       └── BrokerRefused     it knows no such user, password or virtual host
    ├── StatementRefused          PostgreSQL cannot execute a statement, perhaps because of one row that it names
    │   └── ValueRefused          because of a value that it cannot hold
    ├── SchemaError               the database's tables are missing, older, newer or edited
    ├── TopologyError             RabbitMQ's queues or exchanges are missing or differ from what we need
    └── ProviderFault             the provider as a whole cannot be used: account, credentials, set-up

An adapter translates foreign exceptions into these where they enter, with `raise … from`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DispatcherError(Exception):
    """A fault that a person can act on.

    Attributes:
        message: What is wrong, one sentence, nothing private.
        remedy: What to do about it; None where the message says it all.
        public: The text for the public, if the message names hosts or users.
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
        mistakes: Every mistake found, each naming its setting and the remedy.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = tuple(mistakes)


class InvalidEmail(DispatcherError):
    """An email was refused before anything was stored.

    Attributes:
        field: The argument's name, such as `sender`, `to[1]` or `attachments[0].content`; for an email from JSON, the
            field's name, such as `from`.
        reason: Why, without the field's value (it may be private).
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class MessageKeyConflict(DispatcherError):
    """The message key was enqueued before with another payload; nothing was stored.

    Attributes:
        tenant_id: The tenant whose key it is.
        message_key: The key.
        email_id: The email that holds the key.
    """

    def __init__(self, tenant_id: str, message_key: str, email_id: str) -> None:
        super().__init__(
            f"message_key: {message_key!r} already names email {email_id} with another payload",
            remedy="Use a new key for a new email, or send the same payload again.",
        )
        self.tenant_id = tenant_id
        self.message_key = message_key
        self.email_id = email_id


class UnusableConnection(DispatcherError):
    """The connection that enqueue was given is not psycopg's, or cannot execute a statement now."""


class InvalidPointer(DispatcherError):
    """A message's bytes are not a pointer to an email; it belongs in the DLQ."""


class ServerUnavailable(DispatcherError):
    """A server that we need does not answer or cannot be started; trying again later may help."""


class StoreUnavailable(ServerUnavailable):
    """PostgreSQL does not answer, or ended our session."""

    public = "PostgreSQL is not available. The log has more."


class StoreBusy(StoreUnavailable):
    """Another transaction held a row or table that a statement needed for longer than it may wait."""


class StoreRefused(StoreUnavailable):
    """PostgreSQL answers, and does not let us in: a setting of ours, or of the server, has to be mended."""

    public = "PostgreSQL refuses the user, the password or the database in DISPATCHER_DATABASE_URL. The log has more."


class AnswerTooLarge(StoreUnavailable):
    """The process has no memory left for PostgreSQL's answer. PostgreSQL may have executed the statement."""


class BrokerUnavailable(ServerUnavailable):
    """RabbitMQ does not answer, or closed our connection or channel."""

    public = "RabbitMQ is not available. The log has more."


class BrokerRefused(BrokerUnavailable):
    """RabbitMQ answers, and does not let us in: a setting of ours, or of the server, has to be mended."""

    public = "RabbitMQ refuses the user, the password or the virtual host in DISPATCHER_AMQP_URL. The log has more."


class StatementRefused(DispatcherError):
    """PostgreSQL answers, and cannot execute this statement: a damaged row, a trigger, a value, or a mistake of ours.

    The same statement without the row at fault succeeds (see `store.apart`).
    """


class ValueRefused(StatementRefused):
    """PostgreSQL cannot hold a value of a statement; the same call with it never succeeds."""


class SchemaError(DispatcherError):
    """The tables are not those that this release needs."""


class TopologyError(DispatcherError):
    """RabbitMQ's exchange, queues or bindings are missing or differ from what we need."""


class ProviderFault(DispatcherError):
    """The provider cannot be used as a whole; no email is to blame and no attempt is burnt.

    Attributes:
        provider: The provider's name.
    """

    def __init__(self, provider: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.provider = provider
