"""The provider `twilio`: sends SMS through Twilio's Messages API, over our own HTTP transport.

responses  the outcome for each response
statuses   the event for each status of a message
polling    reads the status of a message, because status callbacks are easily lost

Twilio has no idempotency keys: if the answer to a request is lost, the outcome is unknown. The SMS's policy determines
whether the SMS is then held or sent again. Each request gives Twilio a URL for status callbacks that contains the SMS's
id. So a callback proves that Twilio accepted this SMS.
"""

from __future__ import annotations

import asyncio
import math
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.event import OpenMessage, ProviderEvent
from dispatcher.domain.outcome import Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.phone import sms_number
from dispatcher.domain.sms import SMS_CHANNEL
from dispatcher.domain.text import body_fault
from dispatcher.errors import InvalidEmail, ProviderFault
from dispatcher.providers.contract import Attempt, NoFreeConnection, PollRefused
from dispatcher.providers.http_provider import HttpProvider
from dispatcher.providers.twilio.polling import Message, document_of, event_in, list_path_of, matching, path_of
from dispatcher.providers.twilio.responses import NAME, fault_of, outcome_of
from dispatcher.transport.body import Body
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.mime_headers import UnrenderableEmail

POLL_SECONDS: Final = 15.0
"""The time limit of `TwilioProvider.find_event`."""
MAX_CHARACTERS: Final = 1600
MAX_VALIDITY_SECONDS: Final = 36_000
"""Twilio's default and longest `ValidityPeriod`. After this time, Twilio discards an SMS that is still in its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwilioSettings(ProviderSettings):
    account_sid: str = setting(
        values.twilio_sid("AC"), None, "Twilio's account SID: AC and 32 digits.", needed="set it to the account's SID"
    )
    auth_token: str = setting(
        values.api_key,
        None,
        "The account's auth token. It verifies the signatures of status callbacks and, without an API key, logs in.",
        secret=True,
        empty="",
        needed="set it to the account's auth token",
    )
    api_key: str | None = setting(
        values.twilio_sid("SK"), None, "The SID of an API key (SK and 32 digits), to log in without the auth token."
    )
    api_secret: str | None = setting(values.api_key, None, "The secret of the API key.", secret=True)
    webhook_secrets: tuple[str, ...] = setting(
        values.secrets,
        None,
        "The secrets of shared keys that sign Twilio's requests instead of the auth token, comma-separated.",
        secret=True,
        empty=(),
    )
    sender: str = setting(
        values.sms_sender,
        None,
        "The default sender of SMS: a number, a name, or the SID of a Messaging Service.",
        empty="",
    )
    callback_url: str | None = setting(
        values.callback_url,
        None,
        "The public URL of /v1/events/twilio, as Twilio reaches it, with user:password@ if a proxy asks for a login; "
        "unset: Twilio sends no status callbacks.",
        secret=True,
    )
    url: str = setting(values.https_host, "https://api.twilio.com", "The URL of Twilio's API.")

    def max_connections(self, settings: Settings, /) -> int:
        return settings.http_connections

    def sender_countries(self) -> frozenset[str]:
        with suppress(InvalidEmail):  # a name, a short code and a pool are no numbers
            return frozenset(filter(None, sms_number("sender", self.sender)[1:]))
        return frozenset()


class TwilioProvider(HttpProvider):
    name = NAME
    title = "Twilio"
    url_variable = "DISPATCHER_TWILIO_URL"
    capabilities = Capabilities(copies=2, channel=SMS_CHANNEL)
    settings = TwilioSettings

    def __init__(self, own: TwilioSettings, *, connections: int = 256, ca_file: Path | None = None) -> None:
        """`ca_file`: certificates to trust in addition to the system's."""
        self._own = own
        self._account_url = f"{own.url}/2010-04-01/Accounts/{own.account_sid}"
        super().__init__(HttpTransport(connections=connections, ca_file=ca_file), f"{self._account_url}/Messages.json")
        user = own.api_key or own.account_sid
        secret = own.api_secret if own.api_key and own.api_secret else own.auth_token
        self._headers = {
            "Authorization": f"Basic {b64encode(f'{user}:{secret}'.encode()).decode()}",
            "User-Agent": "email-dispatcher",
            "Accept": "application/json",
            "Content-Type": "application/x-www-form-urlencoded",
        }

    @classmethod
    def open(cls, settings: Settings) -> TwilioProvider:
        own = settings.of(TwilioSettings)
        return cls(own, connections=settings.http_connections, ca_file=settings.ca_file)

    def _request(self, email: OutgoingEmail, attempt: Attempt) -> tuple[Mapping[str, str], bytes | Body]:
        with attempt.rendering:
            return self._headers, form_of(email, self._own.sender, self._own.callback_url, attempt.expires_in)

    def _outcome(self, _: OutgoingEmail, response: HttpResponse) -> Outcome:
        return outcome_of(response)

    async def check(self) -> str:
        response = await self._checked(f"{self._account_url}.json", self._headers)
        if response.status != 200:
            raise fault_of(response)
        if (status := response.document.get("status")) != "active":
            words = f"Twilio's account is not active: {str(status)[:20]}."
            raise ProviderFault(NAME, words, remedy="Ask Twilio's support.")
        kind = "trial account; only verified numbers get SMS" if response.document.get("type") == "Trial" else "account"
        return f"Twilio accepts the credentials of the {kind}."

    async def find_event(self, message: OpenMessage) -> ProviderEvent | None:
        found: Message | None = None
        if message.message_id is not None:
            if path := path_of(message.message_id):
                found = await self._read(path)
        elif message.traits is not None:
            listed = await self._read(list_path_of(message.traits))
            found = matching(listed or {}, message.traits, self._own.sender)
        return event_in(found, message.email_id) if found else None

    async def _read(self, path: str) -> Message | None:
        """Reads a document of the account, such as a message; None if it does not exist."""
        deadline = asyncio.get_running_loop().time() + POLL_SECONDS
        try:
            return document_of(await self._transport.get(f"{self._account_url}{path}", self._headers, deadline))
        except (RequestNotSent, NoResponse) as error:
            is_about_all = isinstance(error, RequestNotSent)
            raise PollRefused(f"Twilio cannot be reached: {error.detail}.", is_about_all=is_about_all) from error
        except NoFreeConnection:
            raise PollRefused("Twilio was not asked: no connection of the pool became free in time.") from None


def form_of(email: OutgoingEmail, default_sender: str, callback_url: str | None, expires_in: float | None) -> bytes:
    """The request's form. `callback_url`: to which Twilio posts the SMS's status; this function adds the SMS's id."""
    text, sender = email.text or "", email.sender or default_sender
    if not text:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "the SMS has no text")
    if len(text) > MAX_CHARACTERS:
        words = f"text has {len(text):,} characters; Twilio accepts at most {MAX_CHARACTERS:,}"
        raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
    if fault := body_fault(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"text {fault}")
    if len(email.to) != 1 or not email.to[0].startswith("+"):
        words = "the SMS must have exactly one recipient, a phone number in E.164 format, such as +4915112345678"
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, words)
    if not sender:
        words = "the SMS has no sender, and DISPATCHER_TWILIO_SENDER is not set"
        raise UnrenderableEmail(Reason.REJECTED_SENDER, words)
    form = {"To": email.to[0], "MessagingServiceSid" if sender.startswith("MG") else "From": sender, "Body": text}
    if expires_in is not None:
        # Round down, because the period begins a little later: when Twilio accepts the SMS.
        form["ValidityPeriod"] = str(max(1, min(math.floor(expires_in), MAX_VALIDITY_SECONDS)))
    if callback_url is not None:
        form["StatusCallback"] = f"{callback_url}?email_id={email.email_id}"
    return urlencode(form).encode()


PROVIDER: Final = TwilioProvider
