"""What the adapters have in common whose call is one POST to the provider's API."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Final

from dispatcher.domain.outcome import Deferred, Outcome, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.transport.body import Body
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.mime_headers import UnrenderableEmail
from dispatcher.transport.tls_faults import tls_fault

CHECK_SECONDS: Final = 15.0
"""The time limit of a check for `dispatcher doctor`."""
FIREWALL: Final = "Check that no firewall blocks the connection."


class HttpProvider(ABC):
    """Makes the attempts of an adapter whose subclass builds the request, and translates the response."""

    name: ClassVar[str]
    title: ClassVar[str]  # the provider's name in sentences, such as `SendGrid`
    url_variable: ClassVar[str]  # the environment variable that sets the API's URL

    def __init__(self, transport: HttpTransport, send_url: str) -> None:
        self._transport = transport
        self._send_url = send_url

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        try:
            headers, body = self._request(email, attempt)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        result = await self._post(headers, body, attempt)
        return self._outcome(email, result) if isinstance(result, HttpResponse) else result

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        if not self._transport.idle or email.attachments:
            return None
        headers, body = self._request(email, attempt)
        return self._transport.begin(self._send_url, headers, body, attempt, partial(self._answered, email))

    async def close(self) -> None:
        await self._transport.close()

    async def _post(
        self, headers: Mapping[str, str], body: bytes | Body, attempt: Attempt
    ) -> HttpResponse | Deferred | Uncertain:
        """The response; without a response, the outcome. Raises ProviderFault if TLS cannot succeed."""
        try:
            return await self._transport.post(self._send_url, headers, body, attempt)
        except RequestNotSent as error:
            if fault := self._tls_fault(error):
                raise fault from error
            return error.outcome
        except NoResponse as error:
            return error.outcome

    async def _checked(self, url: str, headers: Mapping[str, str]) -> HttpResponse:
        """The response to a GET for `dispatcher doctor`. Raises ProviderFault if there is none."""
        deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
        try:
            return await self._transport.get(url, headers, deadline)
        except (RequestNotSent, NoResponse) as error:
            words, remedy = f"{self.title} cannot be reached: {error.detail}.", FIREWALL
            raise self._tls_fault(error) or ProviderFault(self.name, words, remedy=remedy) from error

    def _answered(self, email: OutgoingEmail, result: HttpResponse | NoResponse) -> Outcome:
        return self._outcome(email, result) if isinstance(result, HttpResponse) else result.outcome

    def _tls_fault(self, error: Exception) -> ProviderFault | None:
        return tls_fault(self.name, self.title, error.__cause__, url=self.url_variable)

    @abstractmethod
    def _request(self, email: OutgoingEmail, attempt: Attempt) -> tuple[Mapping[str, str], bytes | Body]:
        """The headers and the body of the request for an email. Raises UnrenderableEmail."""

    @abstractmethod
    def _outcome(self, email: OutgoingEmail, response: HttpResponse) -> Outcome:
        """Raises ProviderFault if the account or the settings are at fault, and no email was accepted."""
