"""What the adapters have in common whose call is one POST to the provider's API."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

from dispatcher.domain.outcome import Outcome, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.transport.body import Body
from dispatcher.transport.http_response import HttpResponse, NoResponse
from dispatcher.transport.mime_headers import UnrenderableEmail
from dispatcher.transport.provider_api import ProviderApi


class HttpProvider(ABC):
    """Makes the attempts of an adapter whose subclass builds the request, and translates the response."""

    def __init__(self, api: ProviderApi, send_url: str) -> None:
        self._api = api
        self._send_url = send_url

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """See `contract.Provider.send`. Raises ProviderFault also if the provider has answered, and accepted no
        email."""
        try:
            headers, body = self._request(email, attempt)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        result = await self._api.post(self._send_url, headers, body, attempt)
        return self._outcome(email, result) if isinstance(result, HttpResponse) else result

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        """See `contract.PromptProvider.begin`."""
        transport = self._api.transport
        if not transport.idle or email.attachments:
            return None
        headers, body = self._request(email, attempt)
        return transport.begin(self._send_url, headers, body, attempt, partial(self._answered, email))

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.transport.close()

    def _answered(self, email: OutgoingEmail, result: HttpResponse | NoResponse) -> Outcome:
        return self._outcome(email, result) if isinstance(result, HttpResponse) else result.outcome

    @abstractmethod
    def _request(self, email: OutgoingEmail, attempt: Attempt) -> tuple[Mapping[str, str], bytes | Body]:
        """The headers and the body of the request for an email. Raises UnrenderableEmail."""

    @abstractmethod
    def _outcome(self, email: OutgoingEmail, response: HttpResponse) -> Outcome:
        """The outcome for a response. Raises ProviderFault if the account or the settings are at fault."""
