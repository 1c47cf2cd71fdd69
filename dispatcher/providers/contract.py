"""What every provider adapter promises, and all that the worker knows of one.

An adapter's job is not only to send: it says afterwards, without lying, whether the email was accepted, refused for
now, refused for good, or whether nobody can know. `docs/providers.md` tells how to write one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from dispatcher.config import ProviderSettings, Settings
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.transport import call

NoPlace = call.NoPlace


class Attempt:
    """One call to the provider for one email: what an adapter reads, and what it reports on the way.

    This class acts on no report; the worker's subclass does.

    Attributes:
        number: From 1; counts every attempt that the email ever had.
        deadline: When the attempt must have ended, connecting included, in the running loop's `time()`.
        is_told_already: Another email of the same call reports what the call says about the provider as a whole.
    """

    __slots__ = ("deadline", "is_told_already", "number")

    def __init__(self, number: int, deadline: float) -> None:
        self.number = number
        self.deadline = deadline
        self.is_told_already = False

    def leaving(self) -> None:
        """Call this just before the first byte that could cause acceptance leaves this process. Idempotent.

        From then on, silence means `Uncertain`. If it raises, the email must not leave: let the exception pass.
        """

    def came_back(self) -> None:
        """Call this if the provider took nothing of a call that the email shared, and the email will be sent again.

        The email is no longer on the wire. Call `leaving` again before it leaves within this attempt.
        """

    def admitted(self) -> None:
        """Call this once a connection is free, if the email had to wait for other emails of this worker.

        Moves the deadline, which counts from now. Raises if the provider may not be tried any more; nothing has begun.
        """

    @property
    def rendering(self) -> AbstractContextManager[None]:
        """Enter this around the code that turns the email into octets, on any thread. Cheap; may be entered again.

        If the process dies inside it, by a native crash or for want of memory, the email is the suspect.
        """
        return nullcontext()


class Provider(Protocol):
    """An adapter; one per worker process, made after the fork, used by many sends at once on one asyncio loop."""

    @property
    def name(self) -> str:
        """The provider's word in settings, logs, metrics and `email_log.provider`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can carry: routing offers it nothing else.

        What shows only later is for `send` to say: `Rejected` without a code, and the next provider is tried.
        """
        ...

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt.

        Does everything that can fail harmlessly first, calls `attempt.leaving()`, then hands the email over. Returns by
        the deadline, whatever the provider drips. Never sends twice within a call. When cancelled before `leaving`,
        nothing was sent; the worker does not cancel afterwards.

        Raises:
            ProviderFault: the provider as a whole cannot be used (credentials, account, set-up); nothing was sent.
            NoPlace: see there.
        """
        ...

    async def close(self) -> None:
        """Ends idle connections; no send is under way. A second call is harmless."""
        ...


class CheckableProvider(Provider, Protocol):
    """An adapter that can say whether it would work, without sending."""

    async def check(self) -> str:
        """Words for `dispatcher doctor`; raises ProviderFault where it would not work."""
        ...


class ProviderClass(Protocol):
    """An adapter's class: `PROVIDER` in its module of this package, or what a package's entry point names.

    Its module is imported by every command, so it imports what is slow to load only where it sends.
    """

    @property
    def name(self) -> str:
        """See `Provider`; also what the variables of its settings begin with."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """See `Provider`."""
        ...

    @property
    def settings(self) -> type[ProviderSettings]:
        """What an operator can set, a field each."""
        ...

    def open(self, settings: Settings) -> CheckableProvider:
        """An adapter, which connects to nobody yet; `settings.of(…)` gives its own settings.

        Raises:
            ConfigurationError: they do not suffice.
        """
        ...


@dataclass(slots=True)
class Part:
    """An email, rendered as a part of a call that it may share.

    Attributes:
        key: Emails share a call only if their keys are equal.
        recipients: How many it goes to.
        addresses: What no two emails of a call may have in common; empty where the provider does not mind.
        octets: About how many it adds to the call.
        content: The adapter's own.
    """

    key: Hashable
    recipients: int
    octets: int
    content: Any = field(repr=False)
    addresses: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How much one call takes."""

    emails: int
    recipients: int
    octets: int


@dataclass(frozen=True, slots=True)
class RefusedTogether:
    """The provider took nothing of a call, because of some of its emails: smaller calls will tell of which.

    Attributes:
        suspects: The positions of those that it named.
    """

    suspects: frozenset[int] = frozenset()


@runtime_checkable
class BulkProvider(Provider, Protocol):
    """An adapter that can also put several emails into one call."""

    @property
    def limits(self) -> CallLimits:
        """What the provider takes at most."""
        ...

    def part_of(self, email: OutgoingEmail) -> Part | None:
        """The email as part of a call; None if it has to travel alone, over `send`, which may find it unrenderable."""
        ...

    async def send_many(
        self, parts: Sequence[Part], attempt: Attempt
    ) -> Sequence[Outcome | ProviderFault] | RefusedTogether:
        """One call for at least two parts of one key; what became of each, in order. Otherwise as `send`.

        Where the provider answers for the call as a whole, all outcomes are the same object.

        Args:
            attempt: The call's: its `leaving` speaks for all of them.

        Raises:
            ProviderFault: nothing was sent of any of them.
        """
        ...
