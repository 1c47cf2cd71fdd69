"""The smtp adapter: any SMTP server, over kept connections.

smtp_connection    TCP, TLS, EHLO, AUTH               every failure definite, or a ProviderFault
smtp_pool          the connections a worker keeps
smtp_transaction   MAIL … final dot on one of them    knows the phase
smtp_conversation  lines and replies                  knows what has left, and when a server is out of step
smtp_replies       what each reply means
"""

from __future__ import annotations

import asyncio

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import SMTP
from dispatcher.providers.contract import Attempt, NoPlace
from dispatcher.transport.mime import RenderedEmail, rendered
from dispatcher.transport.mime_headers import UnrenderableEmail
from dispatcher.transport.smtp_connection import (
    NAME,
    Connection,
    NotConnected,
    SmtpOptions,
    open_connection,
    tls_context,
)
from dispatcher.transport.smtp_conversation import ConnectionBroke
from dispatcher.transport.smtp_pool import ConnectionPool
from dispatcher.transport.smtp_replies import Phase
from dispatcher.transport.smtp_transaction import Transaction

CHECK_SECONDS = 15.0
"""How long `check` gives a server from the first packet to the goodbye."""


class SmtpProvider:
    """Sends over SMTP; see `contract.Provider`."""

    def __init__(self, options: SmtpOptions) -> None:
        """An adapter without connections; they are opened as emails come.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        self._options = options
        self._context = tls_context(options)
        self._pool = ConnectionPool(
            self._open,
            connections=options.connections,
            emails_per_connection=options.emails_per_connection,
            trusted_idle_seconds=options.trusted_idle_seconds,
        )

    @property
    def name(self) -> str:
        """`smtp`."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """See `contract.Provider.capabilities`."""
        return SMTP

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`.

        A recipient that the server refuses does not stop the others: the outcome is `Accepted` and its detail tells who
        was refused, by position in To, Cc, Bcc. With none left nothing is sent.
        """
        transaction = Transaction(attempt)
        try:
            return await self._deliver(email, attempt, transaction)
        except TimeoutError:
            return transaction.silence(None)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)

    async def check(self) -> str:
        """What can be said of the server after connecting and signing in, for `dispatcher doctor`; sends nothing.

        Raises:
            ProviderFault: it cannot be used, now or before somebody mends something.
        """
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                connection = await self._open()
                connection.conversation.quit()
                await connection.conversation.closed
        except NotConnected as error:
            words = f"{error.outcome.detail} ({error.outcome.code})" if error.outcome.code else error.outcome.detail
            raise ProviderFault(NAME, f"{self._address}: {words}.", remedy="Is it running and reachable?") from error
        except TimeoutError as error:
            raise ProviderFault(
                NAME, f"{self._address} did not answer within {CHECK_SECONDS:g} s.", remedy="Is a firewall in between?"
            ) from error
        return self._praise(connection)

    async def close(self) -> None:
        """Ends idle connections with QUIT."""
        await self._pool.close()

    @property
    def _address(self) -> str:
        return f"{self._options.server.host}:{self._options.server.port}"

    async def _open(self) -> Connection:
        return await open_connection(self._options, self._context)

    async def _deliver(self, email: OutgoingEmail, attempt: Attempt, transaction: Transaction) -> Outcome:
        """The transaction's outcome, once there is a place for it.

        Raises:
            NoPlace: there was none in time.
            TimeoutError: the deadline passed.
        """
        leave = self._pool.leave
        try:
            async with asyncio.timeout_at(attempt.deadline):
                await self._pool.enter()
        except TimeoutError:
            raise NoPlace from None
        try:
            attempt.admitted()
            async with asyncio.timeout_at(attempt.deadline):
                # Only who holds a place has its bytes in memory: large attachments times all who wait are too much.
                with attempt.rendering:
                    content = await rendered(email)
                return await self._transact(content, transaction)
        except NotConnected as error:
            if not error.is_full or not self._pool.can_do_with_less():
                return error.outcome
            leave = self._pool.leave_for_later
        except ConnectionBroke as broke:
            return transaction.silence(broke)
        finally:
            leave()
        transaction.phase = Phase.WAITING
        return await self._deliver(email, attempt, transaction)

    async def _transact(self, content: RenderedEmail, transaction: Transaction) -> Outcome:
        """The transaction's outcome, over a kept connection, and over a new one if that turns out dead."""
        if connection := self._pool.idle():
            try:
                return await self._run(content, transaction, connection, kept=True)
            except ConnectionBroke:
                if transaction.phase in (Phase.BODY, Phase.FINAL):
                    raise
        transaction.phase = Phase.CONNECTING
        return await self._run(content, transaction, await self._pool.open(), kept=False)

    async def _run(
        self, content: RenderedEmail, transaction: Transaction, connection: Connection, *, kept: bool
    ) -> Outcome:
        try:
            outcome = await transaction.run(content, connection, kept=kept)
        except BaseException:
            connection.conversation.abort()
            raise
        self._pool.give_back(connection)
        return outcome

    def _praise(self, connection: Connection) -> str:
        server = self._options.server
        security = {"none": "without TLS", "starttls": "STARTTLS, verified", "tls": "TLS, verified"}[server.security]
        login = "signed in" if server.username else "no sign-in"
        size = f"takes up to {connection.size_limit} octets" if connection.size_limit else "names no size limit"
        return f"{self._address} answers: {security}; {login}; {size}."
