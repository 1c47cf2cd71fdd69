"""The protocol of an alert channel."""

from __future__ import annotations

import socket
import ssl
from typing import Protocol

from dispatcher.domain.alert import Notice


class NotDelivered(Exception):
    """A channel did not accept a notice; a retry may succeed.

    Attributes:
        reason: The reason, without addresses or secrets.
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
        """Sends a notice within seconds. Returns a description of the result.

        Raises:
            NotDelivered: The notice was not accepted, or the result is unknown.
        """
        ...


def cause_of(error: BaseException) -> str:
    """Why a connection failed, without the server's own text, which may quote addresses or secrets."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror.lower()
    return f"it was not reached ({type(error).__name__})"
