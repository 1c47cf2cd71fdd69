"""The provider `resend`: Resend's HTTP API over our own HTTP transport.

request    the request body for one email
responses  the outcome for each response

Resend has idempotency keys. We set `Idempotency-Key` to the email's id, so Resend accepts the email only once, even if
we send it again. That is why an uncertain email is tried again at Resend; see `domain.capabilities.Capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.address import MAX_LOCAL_OCTETS
from dispatcher.domain.capabilities import Capabilities, Requirement
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.providers.http_provider import HttpProvider
from dispatcher.providers.resend.request import MAX_OCTETS, MAX_RECIPIENTS, body_of
from dispatcher.providers.resend.responses import NAME, RESTRICTED_KEY, fault_of, outcome_of
from dispatcher.transport.body import Body
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse

KEY_SECONDS: Final = 23 * 3600.0
"""Resend remembers a key for 24 hours. We do not use the last hour, because clocks differ, and the last request must
arrive before the key expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendSettings(ProviderSettings):
    api_key: str = setting(
        values.api_key,
        None,
        "Resend's API key; sending access is enough. Replace it only with a key of the same Resend team, because "
        "another team's account does not know the idempotency keys of uncertain emails.",
        variable="RESEND_API_KEY",
        secret=True,
        empty="",
        needed="set it to a key",
    )
    url: str = setting(values.https_host, "https://api.resend.com", "The URL of Resend's API.")

    def max_connections(self, settings: Settings, /) -> int:
        return settings.http_connections


class ResendProvider(HttpProvider):
    name = NAME
    title = "Resend"
    url_variable = "DISPATCHER_RESEND_URL"
    capabilities = Capabilities(
        copies=2,
        templates=True,
        inline_parts=True,
        max_recipients=MAX_RECIPIENTS,
        max_octets=MAX_OCTETS,
        max_local_octets=MAX_LOCAL_OCTETS,
        refuses=(Requirement.EMPTY_SUBJECT, Requirement.EMPTY_FILES, Requirement.ONLY_BCC),
        idempotency_key_seconds=KEY_SECONDS,
    )
    settings = ResendSettings

    def __init__(self, own: ResendSettings, *, connections: int = 256, ca_file: Path | None = None) -> None:
        """`ca_file`: certificates to trust in addition to the system's."""
        super().__init__(HttpTransport(connections=connections, ca_file=ca_file), f"{own.url}/emails")
        self._domains_url = f"{own.url}/domains"
        self._headers = {
            "Authorization": f"Bearer {own.api_key}",
            "User-Agent": "email-dispatcher",  # Resend refuses requests without the header User-Agent
            "Accept": "application/json",
            "Content-Type": "application/json",
        }

    @classmethod
    def open(cls, settings: Settings) -> ResendProvider:
        own = settings.of(ResendSettings)
        return cls(own, connections=settings.http_connections, ca_file=settings.ca_file)

    def _request(self, email: OutgoingEmail, attempt: Attempt) -> tuple[Mapping[str, str], bytes | Body]:
        with attempt.rendering:
            # The key is the email's id in every attempt, on every worker and host, also after a replay.
            return {**self._headers, "Idempotency-Key": str(email.email_id)}, body_of(email)

    def _outcome(self, _: OutgoingEmail, response: HttpResponse) -> Outcome:
        return outcome_of(response)

    async def check(self) -> str:
        response = await self._checked(self._domains_url, self._headers)
        if response.status == 401 and response.document.get("name") == RESTRICTED_KEY:
            return "Resend accepts the API key, which may only send; emails are delivered."
        if response.status != 200:
            raise fault_of(response)
        return "Resend accepts the API key; emails are delivered."


PROVIDER: Final = ResendProvider
