"""The provider `smtp`: sends through an SMTP server, over a pool of connections.

`transport/smtp_replies.py` derives the outcomes from the server's replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, event_values, setting, values
from dispatcher.domain.bounce_address import BounceAddress
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Outcome, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.providers.http_provider import CHECK_SECONDS, FIREWALL
from dispatcher.transport.mime import RenderedEmail, is_sendable_in_ascii, rendered, rendered_in_ascii
from dispatcher.transport.mime_headers import UnrenderableEmail
from dispatcher.transport.smtp_connection import NotConnected, SmtpConnection, open_connection
from dispatcher.transport.smtp_faults import NAME
from dispatcher.transport.smtp_pool import TRUSTED_IDLE_SECONDS, ConnectionPool
from dispatcher.transport.smtp_protocol import SmtpConnectionLost
from dispatcher.transport.smtp_replies import SmtpPhase, asks_for_fewer_connections
from dispatcher.transport.smtp_transaction import PipeliningBroken, SmtpTransaction
from dispatcher.transport.tls import client_context

Render = Callable[[OutgoingEmail], Awaitable[RenderedEmail]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpSettings(ProviderSettings):
    url: values.SmtpServer | None = setting(
        values.smtp_url,
        None,
        "SMTP server: smtp:// requires STARTTLS, smtps:// uses TLS, smtp://…?tls=none is unencrypted.",
        secret=True,
        needed="like smtp://host:587",
    )
    connections: int = setting(
        values.whole(1, 1000), "32", "SMTP connections of one worker, at most; fewer while the server takes fewer."
    )
    emails_per_connection: int = setting(
        values.whole(1, 1_000_000), "100", "Emails after which an SMTP connection is replaced."
    )

    ehlo_name: str = setting(
        values.ehlo_name,
        None,
        "This host's full name in DNS, such as mail.example.com, which EHLO contains. Unset: the host name if it has a "
        "domain, otherwise the IP address, which many servers refuse.",
        empty="",
    )

    bounce_address: str = setting(
        event_values.bounce_mailbox,
        None,
        "Address for bounces, such as bounces@example.com. The envelope sender of each email is this address with a "
        "token: bounces+token@example.com. Unset: the envelope sender is the sender.",
        empty="",
    )
    bounce_keys: tuple[bytes, ...] = setting(
        event_values.signing_keys,
        None,
        "Keys that sign the tokens in envelope senders, comma-separated, of at least 32 characters each. The first key "
        "signs new tokens; tokens of all keys are valid. Use the same value on all hosts.",
        secret=True,
        empty=(),
    )

    def max_connections(self, _settings: Settings, /) -> int:
        return self.connections

    def mistakes(self, settings: Settings, /) -> list[str]:
        found = []
        if self.bounce_address and not self.bounce_keys:
            found.append(
                "DISPATCHER_SMTP_BOUNCE_KEYS is not set, but DISPATCHER_SMTP_BOUNCE_ADDRESS is. Create a key with: "
                "openssl rand -base64 32, and set it on all hosts."
            )
        if settings.bounce_maildir and not self.bounce_address:
            found.append(
                "DISPATCHER_SMTP_BOUNCE_ADDRESS is not set, but DISPATCHER_BOUNCE_MAILDIR is. Without the "
                "bounce address, no bounce can be verified. Set it, and DISPATCHER_SMTP_BOUNCE_KEYS."
            )
        return found

    def doubts(self) -> list[str]:
        if self.ehlo_name or self.url is None or self.url.host in values.LOOPBACKS or values.full_name_of_this_host():
            return []
        words = "this host's name has no domain, so EHLO contains the IP address, which many servers refuse"
        return [f"DISPATCHER_SMTP_EHLO_NAME is not set: {words}. Set it to this host's full name in DNS."]

    def bounces(self) -> BounceAddress | None:
        """Creates the envelope sender of each email; None if it is the email's sender."""
        return BounceAddress(self.bounce_address, self.bounce_keys) if self.bounce_address else None


class SmtpProvider:
    name = NAME
    # The size limit and the support for SMTPUTF8 cannot be declared here: a server announces them only in its reply to
    # EHLO.
    capabilities = Capabilities(copies=2, inline_parts=True, calendar=True, raw_mime=True)
    settings = SmtpSettings

    def __init__(
        self, own: SmtpSettings, *, ca_file: Path | None = None, trusted_idle_seconds: float = TRUSTED_IDLE_SECONDS
    ) -> None:
        """`trusted_idle_seconds`: a connection that was idle for longer is tested before the next email."""
        if own.url is None:
            raise ConfigurationError(["DISPATCHER_SMTP_URL is not set: set it to a URL such as smtp://host:587."])
        self._server = own.url
        self._ehlo_name = own.ehlo_name
        self._bounces = own.bounces()
        self._context = None if own.url.security == "none" else client_context(ca_file)
        self._pipelines = True
        self._pool = ConnectionPool(
            self._open,
            connections=own.connections,
            emails_per_connection=own.emails_per_connection,
            trusted_idle_seconds=trusted_idle_seconds,
        )

    @classmethod
    def open(cls, settings: Settings) -> SmtpProvider:
        return cls(settings.of(SmtpSettings), ca_file=settings.ca_file)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """The email is sent to the recipients that the server takes. The detail lists the others, by position in To,
        Cc, Bcc. The outcome is `Accepted` if they are refused for good, and a partial delivery if they are refused for
        now."""
        transaction = SmtpTransaction(attempt, self._bounces.of(email.email_id) if self._bounces else None)
        try:
            outcome = await self._deliver(email, attempt, transaction, rendered)
            if not (transaction.lacks_smtputf8 and is_sendable_in_ascii(email)):
                return outcome
            return await self._deliver(email, attempt, transaction, rendered_in_ascii)
        except TimeoutError:
            return transaction.outcome_without_reply(None)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)

    async def check(self) -> str:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                connection = await self._open()
                connection.protocol.quit()
                await connection.protocol.closed
        except NotConnected as error:
            words = f"{error.outcome.detail} ({error.outcome.code})" if error.outcome.code else error.outcome.detail
            raise ProviderFault(NAME, f"{self._address}: {words}.", remedy=error.remedy) from error
        except TimeoutError as error:
            words = f"{self._address} did not answer within {CHECK_SECONDS:g} s."
            raise ProviderFault(NAME, words, remedy=FIREWALL) from error
        security = {"none": "without TLS", "starttls": "STARTTLS, verified", "tls": "TLS, verified"}
        login = "logged in" if self._server.username else "no login"
        size = f"accepts up to {connection.size_limit} octets" if connection.size_limit else "announces no size limit"
        return f"{self._address} answers: {security[self._server.security]}; {login}; {size}."

    async def close(self) -> None:
        await self._pool.close()

    @property
    def _address(self) -> str:
        return f"{self._server.host}:{self._server.port}"

    async def _open(self) -> SmtpConnection:
        return await open_connection(self._server, self._context, ehlo_name=self._ehlo_name)

    async def _deliver(
        self, email: OutgoingEmail, attempt: Attempt, transaction: SmtpTransaction, render: Render
    ) -> Outcome:
        """If the server refuses a further connection, waits until one of the open connections is free."""
        release = self._pool.release_slot
        await self._pool.acquire_slot(attempt.deadline)
        try:
            attempt.connection_acquired()
            async with asyncio.timeout_at(attempt.deadline):
                # Render only now that a slot is free. Otherwise, the attachments of all waiting emails would be in
                # memory.
                with attempt.rendering:
                    content = await render(email)
                outcome = await self._transact(content, transaction)
                if asks_for_fewer_connections(outcome) and self._pool.can_wait_for_another():
                    release = self._pool.withhold_slot
                return outcome
        except NotConnected as error:
            if not error.is_full or not self._pool.can_wait_for_another():
                return error.outcome
            release = self._pool.withhold_slot
        except SmtpConnectionLost as broke:
            return transaction.outcome_without_reply(broke)
        finally:
            release()
        transaction.phase = SmtpPhase.WAITING
        return await self._deliver(email, attempt, transaction, render)

    async def _transact(self, content: RenderedEmail, transaction: SmtpTransaction) -> Outcome:
        """If the server does not handle a group of commands, sends one at a time, now and in later transactions."""
        try:
            return await self._transact_once(content, transaction)
        except PipeliningBroken:
            self._pipelines = False
        transaction.phase = SmtpPhase.CONNECTING
        outcome = await self._run(content, transaction, await self._pool.open(), reused=False)
        self._pipelines = transaction.has_protocol_error
        return outcome

    async def _transact_once(self, content: RenderedEmail, transaction: SmtpTransaction) -> Outcome:
        """Uses an idle connection, or a new connection if no connection is idle, or if the idle connection is dead."""
        if connection := self._pool.idle():
            try:
                return await self._run(content, transaction, connection, reused=True)
            except SmtpConnectionLost as broke:
                if isinstance(broke, PipeliningBroken) or transaction.phase in (SmtpPhase.BODY, SmtpPhase.FINAL):
                    raise
        transaction.phase = SmtpPhase.CONNECTING
        return await self._run(content, transaction, await self._pool.open(), reused=False)

    async def _run(
        self, content: RenderedEmail, transaction: SmtpTransaction, connection: SmtpConnection, *, reused: bool
    ) -> Outcome:
        try:
            outcome = await transaction.run(content, connection, reused=reused, pipelines=self._pipelines)
        except BaseException:
            connection.protocol.abort()
            raise
        if asks_for_fewer_connections(outcome):
            connection.protocol.abort()
        self._pool.put_back(connection)
        return outcome


PROVIDER: Final = SmtpProvider
