"""What every alert channel does."""

from __future__ import annotations

import socket
import ssl
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


def cause_of(error: BaseException) -> str:
    """Why a connection failed, without the other side's words: they may quote addresses or secrets."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror.lower()
    return f"it was not reached ({type(error).__name__})"
