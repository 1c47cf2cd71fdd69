"""The provider smtp: any SMTP server, over kept connections; transport/ has how each of its replies is judged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.contract import Attempt, NoPlace
from dispatcher.transport.mime import RenderedEmail, rendered
from dispatcher.transport.mime_headers import UnrenderableEmail
from dispatcher.transport.smtp_connection import NAME, NotConnected, SmtpConnection, open_connection
from dispatcher.transport.smtp_conversation import ConnectionBroke
from dispatcher.transport.smtp_pool import TRUSTED_IDLE_SECONDS, ConnectionPool
from dispatcher.transport.smtp_replies import SmtpPhase
from dispatcher.transport.smtp_transaction import Transaction
from dispatcher.transport.tls import client_context

CHECK_SECONDS: Final = 15.0
"""How long `check` gives a server from the first packet to the goodbye."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpSettings(ProviderSettings):
    """What an operator can set."""

    url: values.SmtpServer | None = setting(
        values.smtp_url,
        None,
        "SMTP server: smtp:// requires STARTTLS, smtps:// is TLS, smtp://…?tls=none is plain.",
        secret=True,
        needed="like smtp://host:587",
    )
    connections: int = setting(values.whole(1, 1000), "8", "Connections that a worker keeps to the SMTP server.")
    emails_per_connection: int = setting(values.whole(1, 1_000_000), "100", "Emails before a connection is renewed.")

    def most_connections(self, _settings: Settings, /) -> int:
        """See `ProviderSettings`."""
        return self.connections


class SmtpProvider:
    """Sends over SMTP; see `contract.Provider`."""

    name = NAME
    # A server names its size limit and SMTPUTF8 after EHLO.
    capabilities = Capabilities(copies=2)
    settings = SmtpSettings

    def __init__(
        self, own: SmtpSettings, *, ca_file: Path | None = None, trusted_idle_seconds: float = TRUSTED_IDLE_SECONDS
    ) -> None:
        """An adapter without connections; they are opened as emails come.

        Args:
            ca_file: Certificates to trust instead of the system's.

        Raises:
            ConfigurationError: no server is named.
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        if own.url is None:
            raise ConfigurationError(["DISPATCHER_SMTP_URL is not set: set it, like smtp://host:587."])
        self._server = own.url
        self._context = None if own.url.security == "none" else client_context(ca_file)
        self._pool = ConnectionPool(
            self._open,
            connections=own.connections,
            emails_per_connection=own.emails_per_connection,
            trusted_idle_seconds=trusted_idle_seconds,
        )

    @classmethod
    def open(cls, settings: Settings) -> SmtpProvider:
        """See `contract.ProviderClass`."""
        return cls(settings.of(SmtpSettings), ca_file=settings.ca_file)

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
        return f"{self._server.host}:{self._server.port}"

    async def _open(self) -> SmtpConnection:
        return await open_connection(self._server, self._context)

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
        transaction.phase = SmtpPhase.WAITING
        return await self._deliver(email, attempt, transaction)

    async def _transact(self, content: RenderedEmail, transaction: Transaction) -> Outcome:
        """The transaction's outcome, over a kept connection, and over a new one if that turns out dead."""
        if connection := self._pool.idle():
            try:
                return await self._run(content, transaction, connection, kept=True)
            except ConnectionBroke:
                if transaction.phase in (SmtpPhase.BODY, SmtpPhase.FINAL):
                    raise
        transaction.phase = SmtpPhase.CONNECTING
        return await self._run(content, transaction, await self._pool.open(), kept=False)

    async def _run(
        self, content: RenderedEmail, transaction: Transaction, connection: SmtpConnection, *, kept: bool
    ) -> Outcome:
        try:
            outcome = await transaction.run(content, connection, kept=kept)
        except BaseException:
            connection.conversation.abort()
            raise
        self._pool.give_back(connection)
        return outcome

    def _praise(self, connection: SmtpConnection) -> str:
        server = self._server
        security = {"none": "without TLS", "starttls": "STARTTLS, verified", "tls": "TLS, verified"}[server.security]
        login = "signed in" if server.username else "no sign-in"
        size = f"takes up to {connection.size_limit} octets" if connection.size_limit else "names no size limit"
        return f"{self._address} answers: {security}; {login}; {size}."


PROVIDER: Final = SmtpProvider
