"""What a transport asks of the attempt that it carries out; `providers.contract.Attempt` is one."""

from __future__ import annotations

from typing import Protocol


class NoPlace(Exception):
    """No connection of ours became free for the email by its deadline: nothing has begun, and the provider is well."""


class Call(Protocol):
    """One call to a server.

    Attributes:
        deadline: When it must have ended, connecting included, in the running loop's `time()`.
    """

    deadline: float

    def leaving(self) -> None:
        """To be called once, just before the first byte that could cause acceptance leaves this process."""
        ...

    def admitted(self) -> None:
        """To be called once a connection is free for it; sets the deadline anew, or raises, and nothing has begun."""
        ...
