"""The protocol of an alert channel."""

from __future__ import annotations

from typing import Protocol

from dispatcher.domain.alert import Notice


class NotDelivered(Exception):
    """An alert channel did not deliver a notice, or does not know whether it did. A second try may succeed.

    Attributes:
        reason: Why the notice was not delivered, without addresses or secrets.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Channel(Protocol):
    """A way to notify operators."""

    @property
    def name(self) -> str:
        """The channel's name in the log, in the database and in settings."""
        ...

    async def send(self, notice: Notice) -> str:
        """Sends a notice, or fails within seconds. Returns the result, such as `the receiver answered 204`.

        Raises:
            NotDelivered: The notice was not accepted, or the result is unknown.
        """
        ...
