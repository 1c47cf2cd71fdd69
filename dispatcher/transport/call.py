"""The interface between a transport and the attempt that it serves; `providers.contract.Attempt` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class NoFreeConnection(Exception):
    """No pool connection became free before the deadline. Nothing was sent, and the provider is not at fault."""


class SendAgain(Exception):
    """The server surely accepted nothing, and the same request may be sent again."""


class Call(Protocol):
    """One call to a server, which must have ended at `deadline`, in the running loop's `time()`."""

    deadline: float

    def mark_on_wire(self) -> None:
        """The transport calls this once, just before it sends the first byte that could cause acceptance."""
        ...

    def connection_acquired(self) -> None:
        """The transport calls this when a connection is free. Sets a new deadline, because the wait for a connection
        does not count. If this method raises an exception, the transport sends nothing."""
        ...


@dataclass(slots=True)
class Deadline:
    """A `Call` that has only a deadline."""

    deadline: float

    def mark_on_wire(self) -> None: ...

    def connection_acquired(self) -> None: ...
