"""The sendgrid adapter: SendGrid's v3 API over kept connections.

sendgrid_mail      the request's body        python-sendgrid's helpers
sendgrid_bulk      that of several emails    what they have in common by the same helpers
sendgrid_answers   what each answer means    python-sendgrid's error names
http               the way there             ours: python-sendgrid's own opens a connection per email, follows redirects
                                             with the key in hand, and logs the key and the email at DEBUG
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import orjson
from sendgrid import SendGridAPIClient

from dispatcher.config import Settings
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Deferred, Outcome, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.capabilities import SENDGRID
from dispatcher.providers.contract import Attempt, CallLimits, Part, RefusedTogether
from dispatcher.providers.sendgrid_answers import NAME, fault_of, outcome_of
from dispatcher.providers.sendgrid_bulk import LIMITS, body_of_call, outcomes_of_call, part_of
from dispatcher.providers.sendgrid_mail import body_of
from dispatcher.transport.body import Body
from dispatcher.transport.http import Answer, HttpTransport, NoAnswer, NothingLeft
from dispatcher.transport.mime_headers import UnrenderableEmail

CHECK_SECONDS: Final = 15.0
"""How long `check` gives SendGrid."""
SEND_SCOPE: Final = "mail.send"

_BAD_TLS: Final = "Check DISPATCHER_SENDGRID_HOST, or name the certificate's authority in DISPATCHER_CA_FILE."


@dataclass(frozen=True, slots=True)
class SendGridOptions:
    """What the adapter needs to know.

    Attributes:
        host: Scheme and name, such as `https://api.sendgrid.com`.
        sandbox: Emails are validated and delivered to nobody.
        connections: Requests on the wire at once.
        ca_file: Certificates to trust besides the system's.
    """

    api_key: str = field(repr=False)
    host: str = "https://api.sendgrid.com"
    sandbox: bool = False
    connections: int = 256
    ca_file: Path | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> SendGridOptions:
        """The options that the settings give.

        Raises:
            ConfigurationError: there is no key.
        """
        if not settings.sendgrid_api_key:
            raise ConfigurationError(["SENDGRID_API_KEY is not set: set it to a key with the scope mail.send."])
        return cls(
            settings.sendgrid_api_key,
            settings.sendgrid_host,
            settings.sendgrid_sandbox,
            settings.http_connections,
            settings.ca_file,
        )


class SendGridProvider:
    """Sends over SendGrid's API; see `contract.Provider`."""

    def __init__(self, options: SendGridOptions) -> None:
        """An adapter without connections; they are opened as emails come.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        # At DEBUG it logs the key and whole emails. We never call it, but somebody in this process might.
        logging.getLogger("python_http_client").setLevel(logging.WARNING)
        self._sandbox = options.sandbox
        self._transport = HttpTransport(connections=options.connections, ca_file=options.ca_file)
        client = SendGridAPIClient(options.api_key, options.host).client
        self._send_url = f"{options.host}/v3/mail/send"
        self._scopes_url = f"{options.host}/v3/scopes"
        self._headers = {**client.request_headers, "Content-Type": "application/json"}

    @property
    def name(self) -> str:
        """`sendgrid`."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """See `contract.Provider.capabilities`."""
        return SENDGRID

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`. A fault may come after `leaving`: SendGrid took nothing."""
        try:
            with attempt.rendering:
                body = body_of(email, sandbox=self._sandbox)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        told = await self._posted(body, attempt)
        return outcome_of(told, sandbox=self._sandbox) if isinstance(told, Answer) else told

    @property
    def limits(self) -> CallLimits:
        """Those of a request."""
        return LIMITS

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
        if SEND_SCOPE not in _scopes(answer.body):
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


def _scopes(body: bytes) -> list[object]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    scopes = document.get("scopes") if isinstance(document, dict) else None
    return scopes if isinstance(scopes, list) else []
