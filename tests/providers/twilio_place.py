"""The environment of the conformance suite for the twilio adapter."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import running_double
from dispatcher.providers.twilio import TwilioProvider, TwilioSettings
from tests.providers.listeners import closing
from tests.providers.places import HttpPlace

ACCOUNT = f"AC{'0' * 32}"
TOKEN = "the_token_that_nobody_may_see_012345"
CALLBACK = "https://mail.example.org/v1/events/twilio"


class TwilioPlace(HttpPlace[TwilioProvider]):
    """The twilio adapter and the HTTP double."""

    def texts(self) -> list[str]:
        return [document["Body"] for document in self.double.received]


@asynccontextmanager
async def twilio_place(
    folder: Path,
    behaviour: Behaviour | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    ca_file: Path | None = None,
    sender: str = "",
) -> AsyncIterator[TwilioPlace]:
    """Run the twilio adapter, without TLS by default, and a double with this behaviour."""
    async with running_double(folder, behaviour or Behaviour(key=TOKEN), tls=tls) as double:
        own = TwilioSettings(
            account_sid=ACCOUNT, auth_token=TOKEN, sender=sender, callback_url=CALLBACK, url=double.url
        )
        async with closing(TwilioProvider(own, connections=64, ca_file=ca_file)) as provider:
            yield TwilioPlace(provider, double)
