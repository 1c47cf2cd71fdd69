"""Translates each exception of pika into one clear sentence that never contains the password.

pika nests its exceptions, and most of their messages are empty.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from pika import exceptions
from pika.adapters.utils import connection_workflow

from dispatcher.errors import BrokerUnavailable
from dispatcher.transport.tls_faults import cause_of_tls

NOT_FOUND: Final = 404
ACCESS_REFUSED: Final = 403
PRECONDITION_FAILED: Final = 406


class ChannelClosed(BrokerUnavailable):
    """RabbitMQ closed a channel because of a call on it. `code`: AMQP's reply code, such as NOT_FOUND."""

    def __init__(self, code: int, text: str) -> None:
        remedy = "Run `dispatcher init`." if code == NOT_FOUND else None
        super().__init__(f"RabbitMQ closed the channel: {code} {text}.", remedy=remedy)
        self.code = code
        self.text = text


def channel_fault(error: BaseException) -> BrokerUnavailable:
    if isinstance(error, exceptions.ChannelClosed):
        return ChannelClosed(error.reply_code, error.reply_text)
    return BrokerUnavailable(f"The connection to RabbitMQ is lost: {reason(error)}.")


def reason(error: BaseException) -> str:
    """Why a connection is closed or could not be opened, as a phrase."""
    cause = _innermost(error)
    for kinds, words in _REASONS:
        if isinstance(cause, kinds):
            return words
    if isinstance(cause, exceptions.ConnectionClosed):
        return f"{cause.reply_code} {cause.reply_text}".strip()
    if isinstance(cause, exceptions.StreamLostError):
        words = str(cause).removeprefix("Stream connection lost: ")
        return f"the connection was interrupted ({words})" if words else "the connection was interrupted"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause_of_tls(cause)})"
    if isinstance(cause, OSError):
        return (cause.strerror or type(cause).__name__).lower()
    return f"the connection failed ({type(cause).__name__})"


_REFUSED_LOGIN: Final = "wrong user name or password"
_REFUSED_VHOST: Final = "the virtual host does not exist, or the user may not access it"
REMEDIES: Final = {
    _REFUSED_LOGIN: "Correct user and password in DISPATCHER_AMQP_URL (write @ as %40 and / as %2F), or change the "
    "password: rabbitmqctl change_password USER.",
    _REFUSED_VHOST: "Correct the virtual host at the end of DISPATCHER_AMQP_URL (write / as %2F), or grant access: "
    "`dispatcher topology users` prints the commands.",
}
"""How to fix a refused login, by reason. Neither waiting nor a restart of RabbitMQ helps in these cases."""

_REASONS: Final[tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...]] = (
    ((exceptions.ProbableAuthenticationError, exceptions.AuthenticationError), _REFUSED_LOGIN),
    (exceptions.ProbableAccessDeniedError, _REFUSED_VHOST),
    (exceptions.IncompatibleProtocolError, "the server does not speak AMQP 0-9-1"),
    (exceptions.AMQPHeartbeatTimeout, "the server stopped sending heartbeats"),
    (exceptions.ConnectionBlockedTimeout, "the server blocked publishers for too long (memory or disk alarm)"),
    (exceptions.ConnectionClosedByClient, "we closed the connection"),
    (exceptions.ConnectionOpenAborted, "it did not answer in time"),
    (connection_workflow.AMQPConnectorStackTimeout, "it did not answer in time"),
    (TimeoutError, "it did not answer in time"),
    (socket.gaierror, "the host name cannot be resolved"),
)


def _innermost(error: BaseException) -> BaseException:
    """The cause of an exception: pika wraps exceptions in several layers of its own exceptions."""
    while True:
        held = error
        if isinstance(error, connection_workflow.AMQPConnectionWorkflowFailed) and error.exceptions:
            held = error.exceptions[-1]
        elif isinstance(error, connection_workflow.AMQPConnectorPhaseErrorBase):
            held = error.exception
        elif type(error) is exceptions.AMQPConnectionError and error.args and isinstance(error.args[0], BaseException):
            held = error.args[0]
        if held is error:
            return error
        error = held
