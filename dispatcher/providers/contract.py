"""The contract between the worker and a provider adapter.

An adapter sends an email and reports its true outcome: accepted, deferred, rejected, or uncertain. `docs/providers.md`
explains how to write an adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from dispatcher.config import ProviderSettings, Settings
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.event import OpenMessage, ProviderEvent
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import ProviderFault, ServerUnavailable
from dispatcher.transport import call

NoFreeConnection = call.NoFreeConnection
SendAgain = call.SendAgain


class Attempt:
    """One provider call for one email. The adapter reads its inputs here, and reports its progress by calling methods.

    In this class, the methods do nothing. The worker's subclass overrides them.

    Attributes:
        number: The number of the attempt among all attempts of the email, from 1.
        deadline: When the attempt must have ended, including the time to connect, in the running loop's `time()`.
        is_already_counted: Whether the circuit breaker has already counted the provider's failure for another email of
            the same bulk call.
    """

    __slots__ = ("deadline", "is_already_counted", "number")

    def __init__(self, number: int, deadline: float) -> None:
        self.number = number
        self.deadline = deadline
        self.is_already_counted = False

    def mark_on_wire(self) -> None:
        """Call this just before the first byte that could cause acceptance is sent. Idempotent.

        Afterwards, a missing answer means `Uncertain`. If this raises an exception, send nothing and do not catch the
        exception.
        """

    def mark_not_sent(self) -> None:
        """Call this if the provider surely accepted nothing, and this attempt may send the request again.

        Afterwards, the email is no longer on the wire. Call `mark_on_wire` again before you send the email again.
        """

    def connection_acquired(self) -> None:
        """Call this as soon as a connection is free, if the email waited while other emails used all connections.

        Sets a new deadline, because this wait does not count. Raises an exception if the provider was paused or failed
        in the meantime: then send nothing, and do not catch the exception.
        """

    @property
    def expires_in(self) -> float | None:
        """The seconds until the email expires; None if it never expires.

        If a provider can discard an email that it has not delivered in time, the adapter passes this time to the
        provider.
        """
        return None

    @property
    def rendering(self) -> AbstractContextManager[None]:
        """Enter this context around the code that turns the email into octets.

        If the process dies inside this context (a native crash, out of memory), the email is recorded as the suspected
        cause. The code may run on any thread. One attempt can enter the context several times, but not nested.
        """
        return nullcontext()


class Provider(Protocol):
    """An adapter. Each worker process creates one after the fork, for many concurrent sends on one asyncio loop."""

    @property
    def name(self) -> str:
        """The provider's name in settings, logs, metrics and `email_log.provider`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the provider supports. Routing selects the provider only for emails that the provider can send.

        If an adapter learns a limit of the provider only in `send`, and the email exceeds the limit, `send` returns
        `Rejected` without a code. Routing then tries the next provider.
        """
        ...

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """Makes one attempt.

        First takes every step that can fail without side effects, such as rendering and connecting. Then calls
        `attempt.mark_on_wire()`, and then transmits the email. Returns by the deadline, even if the provider sends one
        byte at a time. Never sends the email twice within one call.

        The worker cancels the call only before `mark_on_wire`. If the worker does so, the adapter sends nothing.

        Raises:
            ProviderFault: The provider cannot be used at all (credentials, account, settings) and accepted no email.
            NoFreeConnection: No connection became free before the deadline. Nothing was sent.
        """
        ...

    async def close(self) -> None:
        """Closes idle connections. The caller makes sure that no send is in progress. Idempotent."""
        ...


@runtime_checkable
class PromptProvider(Provider, Protocol):
    """An adapter that can make an attempt without an asyncio task, which takes less CPU. `send` remains the general
    form, which can wait."""

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        """Begins an attempt, and returns a future of its outcome. Does not wait. Returns None if the attempt cannot
        begin now, or must be made by `send`: then nothing was sent.

        The rules of `send` apply. If the future raises SendAgain, the provider accepted nothing, and the worker calls
        `send`. The worker cancels the future only before `mark_on_wire`.
        """
        ...


class CheckableProvider(Provider, Protocol):
    """An adapter that can check its settings and its connection without sending."""

    async def check(self) -> str:
        """Returns a report for `dispatcher doctor`; raises ProviderFault if the provider cannot be used."""
        ...


class ProviderClass(Protocol):
    """An adapter's class: `PROVIDER` in a module of this package, or the target of an installed package's entry point.

    Every command imports the adapter's module. If the adapter needs a library that loads slowly, import the library
    inside the functions that use it.
    """

    @property
    def name(self) -> str:
        """See `Provider`. The environment variables of the provider's settings begin with this name."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """See `Provider`."""
        ...

    @property
    def settings(self) -> type[ProviderSettings]:
        """The class of the provider's settings, with one field for each setting."""
        ...

    def open(self, settings: Settings) -> CheckableProvider:
        """Creates an adapter without connecting; `settings.of(…)` returns the adapter's own settings.

        Raises:
            ConfigurationError: A setting is missing or invalid.
        """
        ...


@dataclass(slots=True)
class BulkEntry:
    """An email that is rendered as one entry of a bulk call.

    Attributes:
        key: Entries can be sent in the same call only if their keys are equal.
        recipients: The number of recipients.
        addresses: Addresses that may occur only once per call; empty if the provider allows repeated addresses.
        octets: The approximate number of octets that the entry adds to the call.
        content: The adapter's own representation of the entry.
    """

    key: Hashable
    recipients: int
    octets: int
    content: Any = field(repr=False)
    addresses: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """The limits of one bulk call."""

    emails: int
    recipients: int
    octets: int


@dataclass(frozen=True, slots=True)
class BulkCallRefused:
    """The provider refused a bulk call because of some emails. Smaller calls will show which emails.

    Attributes:
        suspects: The positions, from 0, of the emails that the provider's answer blames; empty if it blames none.
    """

    suspects: frozenset[int] = frozenset()


@runtime_checkable
class BulkProvider(Provider, Protocol):
    """An adapter that can also send several emails in one call."""

    @property
    def limits(self) -> BulkLimits:
        """The limits of one call."""
        ...

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        """The email as an entry of a bulk call; None if the email must be sent alone by `send`, which may reject it."""
        ...

    async def send_bulk(
        self, parts: Sequence[BulkEntry], attempt: Attempt
    ) -> Sequence[Outcome | ProviderFault] | BulkCallRefused:
        """Makes one call for at least two entries with the same key. Returns the outcome of each entry, in order.

        Returns BulkCallRefused if the provider refused the whole call because of some of the emails. If the provider
        gives one answer for the whole call, all outcomes are the same object. The rules of `send` apply.

        Args:
            attempt: The call's attempt. Its `mark_on_wire` marks all emails of the call.

        Raises:
            ProviderFault: The provider cannot be used, and accepted none of the emails.
        """
        ...


class PollRefused(ServerUnavailable):
    """The provider cannot be asked now: it does not answer, throttles the requests, or refuses the credentials.

    Attributes:
        retry_after: The seconds that the provider asks us to wait; None if it gives no time.
        is_about_all: Whether a question about another message would fail, too.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, is_about_all: bool = True) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_about_all = is_about_all


@runtime_checkable
class PollableProvider(Provider, Protocol):
    """An adapter that can ask its provider what became of an SMS, because the provider's events are easily lost."""

    async def find_event(self, message: OpenMessage) -> ProviderEvent | None:
        """The event that the provider would report about the given message now; None if there is none.

        Here, a message is a row of a channel other than email, such as an SMS, and not a message of RabbitMQ. The event
        must have the same `ProviderEvent.key` as the provider's own report of the same event, so that the event counts
        only once. Returns within some seconds.

        If `message.message_id` is None, searches the provider's list of messages. Returns an event only if exactly one
        entry of the list can be the given message, because the event settles the message.

        Raises:
            PollRefused: The provider gave no answer.
        """
        ...
