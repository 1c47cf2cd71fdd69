"""Calls a provider's HTTP API. Converts failures of the connection to outcomes, or to faults that name the provider."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from dispatcher.domain.outcome import Deferred, Uncertain
from dispatcher.domain.values import dataclass
from dispatcher.errors import ProviderFault
from dispatcher.transport.body import Body
from dispatcher.transport.call import Call
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.tls_faults import tls_fault

CHECK_SECONDS: Final = 15.0
"""The time limit of `ProviderApi.check`."""


@dataclass(frozen=True, slots=True)
class ProviderApi:
    """Calls one provider's API.

    Attributes:
        provider: The provider's name in settings, such as `sendgrid`.
        title: The provider's name in sentences, such as `SendGrid`.
        url_variable: The environment variable that sets the API's URL.
    """

    transport: HttpTransport
    provider: str
    title: str
    url_variable: str

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes | Body, call: Call
    ) -> HttpResponse | Deferred | Uncertain:
        """Sends one POST with `HttpTransport.post`. Returns the response; without a response, the email's outcome.

        Raises:
            NoFreeConnection: No pool connection became free in time. Nothing was sent.
            ProviderFault: TLS with the provider cannot succeed (see `tls_fault`). Nothing was sent.
        """
        try:
            return await self.transport.post(url, headers, body, call)
        except RequestNotSent as error:
            if fault := self._tls_fault(error):
                raise fault from error
            return error.outcome
        except NoResponse as error:
            return error.outcome

    async def check(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Sends a GET for `dispatcher doctor`, and returns the response. Raises ProviderFault if there is none."""
        deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
        try:
            return await self.transport.get(url, headers, deadline)
        except (RequestNotSent, NoResponse) as error:
            unreached = ProviderFault(
                self.provider,
                f"{self.title} cannot be reached: {error.detail}.",
                remedy="Check that no firewall blocks the connection.",
            )
            raise self._tls_fault(error) or unreached from error

    def _tls_fault(self, error: Exception) -> ProviderFault | None:
        return tls_fault(self.provider, self.title, error.__cause__, url=self.url_variable)
