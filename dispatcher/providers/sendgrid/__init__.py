"""The provider `sendgrid`: SendGrid's v3 API over our own HTTP transport.

request    the headers and the body of a request, as python-sendgrid's client and helpers would build them
responses  the outcome for each response, with python-sendgrid's error names

python-sendgrid's own transport is not used. It opens a connection per email, follows redirects with the API key in the
headers, and logs the key and the email at DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities, Requirement
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry
from dispatcher.providers.http_provider import HttpProvider
from dispatcher.providers.sendgrid.request import LIMITS, body_of, bulk_body_of, bulk_entry_of, http_headers_of
from dispatcher.providers.sendgrid.responses import NAME, bulk_outcomes_of, fault_of, outcome_of
from dispatcher.transport.body import Body
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse

SEND_SCOPE: Final = "mail.send"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGridSettings(ProviderSettings):
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

    def max_connections(self, settings: Settings, /) -> int:
        return settings.http_connections


class SendGridProvider(HttpProvider):
    name = NAME
    title = "SendGrid"
    url_variable = "DISPATCHER_SENDGRID_HOST"
    # https://www.twilio.com/docs/sendgrid/api-reference/mail-send/limitations. SendGrid's limit of 1,000 recipients is
    # also the limit of every Email, so this adapter does not check the number of recipients.
    capabilities = Capabilities(
        copies=2,
        templates=True,
        inline_parts=True,
        calendar=True,
        max_octets=30 * 1024 * 1024,
        refuses=(Requirement.EMPTY_SUBJECT, Requirement.EMPTY_FILES),
    )
    settings = SendGridSettings
    limits = LIMITS

    def __init__(self, own: SendGridSettings, *, connections: int = 256, ca_file: Path | None = None) -> None:
        """`ca_file`: certificates to trust in addition to the system's."""
        # At DEBUG, the logger of python-sendgrid's HTTP client writes the API key and whole emails. We do not use this
        # client, but other code in this process may.
        logging.getLogger("python_http_client").setLevel(logging.WARNING)
        self._sandbox = own.sandbox
        super().__init__(HttpTransport(connections=connections, ca_file=ca_file), f"{own.host}/v3/mail/send")
        self._scopes_url = f"{own.host}/v3/scopes"
        self._headers = http_headers_of(own.api_key)

    @classmethod
    def open(cls, settings: Settings) -> SendGridProvider:
        own = settings.of(SendGridSettings)
        return cls(own, connections=settings.http_connections, ca_file=settings.ca_file)

    def _request(self, email: OutgoingEmail, attempt: Attempt) -> tuple[Mapping[str, str], bytes | Body]:
        with attempt.rendering:
            return self._headers, body_of(email, sandbox=self._sandbox)

    def _outcome(self, _: OutgoingEmail, response: HttpResponse) -> Outcome:
        return outcome_of(response, sandbox=self._sandbox)

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        return bulk_entry_of(email, sandbox=self._sandbox)

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        result = await self._post(self._headers, bulk_body_of(parts), attempt)
        if isinstance(result, HttpResponse):
            return bulk_outcomes_of(result, parts, sandbox=self._sandbox)
        return [result] * len(parts)

    async def check(self) -> str:
        response = await self._checked(self._scopes_url, self._headers)
        if response.status != 200:
            raise fault_of(response)
        scopes = response.document.get("scopes")
        if not isinstance(scopes, list) or SEND_SCOPE not in scopes:
            raise ProviderFault(
                NAME,
                "SendGrid accepts the API key, but the key may not send.",
                remedy=f"Give the key the scope {SEND_SCOPE}.",
            )
        mode = "sandbox mode: nothing is delivered" if self._sandbox else "emails are delivered"
        return f"SendGrid accepts the API key, and the key may send; {mode}."


PROVIDER: Final = SendGridProvider
