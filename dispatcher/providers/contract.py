"""What every provider adapter promises, and all that the worker knows of one.

An adapter's job is not only to send: it says afterwards, without lying, whether the email was accepted, refused for
now, refused for good, or whether nobody can know. `docs/providers.md` tells how to write one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call to the provider for one email.

    Attributes:
        number: From 1; counts every attempt that the email ever had.
        deadline: When the attempt must have ended, connecting included, in the running loop's `time()`.
        leaving: To be called once, just before the first byte that could cause acceptance leaves this process.
            From then on, silence means `Uncertain`.
        rendering: To be entered around what turns the email into octets, on any thread: should the process die in
            it, natively or for want of memory, the email is the suspect. Cheap, and may be entered again.
    """

    number: int
    deadline: float
    leaving: Callable[[], None]
    rendering: AbstractContextManager[None] = field(default_factory=nullcontext)


class Provider(Protocol):
    """An adapter; one per worker process, made after the fork, used by many sends at once on one asyncio loop."""

    @property
    def name(self) -> str:
        """The provider's word in settings, logs, metrics and `email_log.provider`."""
        ...

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt.

        Does everything that can fail harmlessly first, calls `attempt.leaving()`, then hands the email over. Returns by
        the deadline, whatever the provider drips. Never sends twice within a call. When cancelled before `leaving`,
        nothing was sent; the worker does not cancel afterwards.

        Raises:
            ProviderFault: the provider as a whole cannot be used (credentials, account, set-up); nothing was sent.
        """
        ...

    async def close(self) -> None:
        """Ends idle connections; no send is under way. A second call is harmless."""
        ...
