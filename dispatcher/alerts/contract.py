"""What every alert channel does."""

from __future__ import annotations

from typing import Protocol

from dispatcher.domain.alert import Notice


class NotDelivered(Exception):
    """A channel did not take a notice; trying again later may help.

    Attributes:
        reason: Why, in words without addresses or secrets.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Channel(Protocol):
    """One way to reach a person."""

    @property
    def name(self) -> str:
        """Its name in the log, in the database and in settings."""
        ...

    async def send(self, notice: Notice) -> str:
        """Hands a notice over, within seconds; returns how, in words.

        Raises:
            NotDelivered: it was not taken, or nobody knows.
        """
        ...
