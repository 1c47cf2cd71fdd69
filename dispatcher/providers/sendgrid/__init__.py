"""The provider sendgrid: SendGrid's v3 API over kept connections.

request   the body for one email or several   as python-sendgrid's helpers would build it
answers   what each answer means              python-sendgrid's error names

The way there is our own transport: python-sendgrid's opens a connection per email, follows redirects with the key in
hand, and logs the key and the email at DEBUG.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Deferred, Outcome, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, Part, RefusedTogether
from dispatcher.providers.sendgrid.answers import NAME, fault_of, outcome_of, outcomes_of_call
from dispatcher.providers.sendgrid.request import LIMITS, body_of, body_of_call, part_of
from dispatcher.transport.body import Body
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_answer import Answer, NoAnswer, NothingLeft
from dispatcher.transport.mime_headers import UnrenderableEmail

CHECK_SECONDS: Final = 15.0
"""How long `check` gives SendGrid."""
SEND_SCOPE: Final = "mail.send"

_BAD_TLS: Final = "Check DISPATCHER_SENDGRID_HOST, or name the certificate's authority in DISPATCHER_CA_FILE."


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGridSettings(ProviderSettings):
    """What an operator can set."""

    api_key: str = setting(
        values.api_key,
        None,
        "SendGrid's API key, with the scope mail.send.",
        variable="SENDGRID_API_KEY",
        secret=True,
        empty="",
        needed="set it to a key",
    )
    host: str = setting(
        values.https_host,
        "https://api.sendgrid.com",
        "SendGrid's region: https://api.sendgrid.com, or https://api.eu.sendgrid.com for subusers in the EU.",
    )
    sandbox: bool = setting(values.switch, "off", "SendGrid's sandbox mode: it validates emails, and delivers none.")

    def most_connections(self, settings: Settings, /) -> int:
        """See `ProviderSettings`."""
        return settings.http_connections


class SendGridProvider:
    """Sends over SendGrid's API; see `contract.Provider`."""

    name = NAME
    # https://www.twilio.com/docs/sendgrid/api-reference/mail-send/limitations; its 1,000 recipients are ours, too.
    capabilities = Capabilities(copies=2, templates=True, max_octets=30 * 1024 * 1024)
    settings = SendGridSettings
    limits = LIMITS

    def __init__(self, own: SendGridSettings, *, connections: int = 256, ca_file: Path | None = None) -> None:
        """An adapter without connections; they are opened as emails come.

        Args:
            connections: Requests on the wire at once.
            ca_file: Certificates to trust besides the system's.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        from sendgrid import SendGridAPIClient  # 120 ms: only who sends with it

        # At DEBUG it logs the key and whole emails. We never call it, but somebody in this process might.
        logging.getLogger("python_http_client").setLevel(logging.WARNING)
        self._sandbox = own.sandbox
        self._transport = HttpTransport(connections=connections, ca_file=ca_file)
        self._send_url = f"{own.host}/v3/mail/send"
        self._scopes_url = f"{own.host}/v3/scopes"
        client = SendGridAPIClient(own.api_key, own.host).client
        self._headers = {**client.request_headers, "Content-Type": "application/json"}

    @classmethod
    def open(cls, settings: Settings) -> SendGridProvider:
        """See `contract.ProviderClass`."""
        own = settings.of(SendGridSettings)
        return cls(own, connections=settings.http_connections, ca_file=settings.ca_file)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`. A fault may come after `leaving`: SendGrid took nothing."""
        try:
            with attempt.rendering:
                body = body_of(email, sandbox=self._sandbox)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        told = await self._posted(body, attempt)
        return outcome_of(told, sandbox=self._sandbox) if isinstance(told, Answer) else told

    def part_of(self, email: OutgoingEmail) -> Part | None:
        """See `contract.BulkProvider.part_of`."""
        return part_of(email, sandbox=self._sandbox)

    async def send_many(self, parts: Sequence[Part], attempt: Attempt) -> Sequence[Outcome] | RefusedTogether:
        """One call; see `contract.BulkProvider.send_many`. A fault may come after `leaving`: SendGrid took nothing."""
        told = await self._posted(body_of_call(parts), attempt)
        if isinstance(told, Answer):
            return outcomes_of_call(told, parts, sandbox=self._sandbox)
        return [told] * len(parts)

    async def _posted(self, body: bytes | Body, attempt: Attempt) -> Answer | Deferred | Uncertain:
        """SendGrid's answer, or what it means that there is none."""
        try:
            return await self._transport.post(self._send_url, self._headers, body, attempt)
        except NothingLeft as error:
            if error.is_untrusted:
                raise _untrusted(error) from error
            return error.outcome
        except NoAnswer as error:
            return error.outcome

    async def check(self) -> str:
        """What can be said of the key, for `dispatcher doctor`; sends nothing.

        Raises:
            ProviderFault: SendGrid cannot be reached, or does not let this key send.
        """
        deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
        try:
            answer = await self._transport.get(self._scopes_url, self._headers, deadline)
        except (NothingLeft, NoAnswer) as error:
            if isinstance(error, NothingLeft) and error.is_untrusted:
                raise _untrusted(error) from error
            raise ProviderFault(
                NAME, f"SendGrid cannot be reached: {error.detail}.", remedy="Is a firewall in between?"
            ) from error
        if answer.status != 200:
            raise fault_of(answer)
        scopes = answer.document.get("scopes")
        if not isinstance(scopes, list) or SEND_SCOPE not in scopes:
            raise ProviderFault(
                NAME, "SendGrid knows the key, but it may not send.", remedy=f"Give it the scope {SEND_SCOPE}."
            )
        mode = "sandbox mode: nothing is delivered" if self._sandbox else "emails are delivered"
        return f"SendGrid takes the key, which may send; {mode}."

    async def close(self) -> None:
        """Ends the connections."""
        await self._transport.close()


def _untrusted(error: NothingLeft) -> ProviderFault:
    return ProviderFault(NAME, f"SendGrid's certificate cannot be trusted: {error.detail}.", remedy=_BAD_TLS)


PROVIDER: Final = SendGridProvider
