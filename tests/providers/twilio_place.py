"""The environment of the conformance suite for the twilio adapter."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import HttpDouble, running_double
from dispatcher.providers.twilio import TwilioProvider, TwilioSettings

ACCOUNT = f"AC{'0' * 32}"
TOKEN = "the_token_that_nobody_may_see_012345"
CALLBACK = "https://mail.example.org/v1/events/twilio"


@dataclass(frozen=True, slots=True)
class TwilioPlace:
    """The twilio adapter and the HTTP double."""

    provider: TwilioProvider
    double: HttpDouble

    def texts(self) -> list[str]:
        """The texts that arrived, in order."""
        return [document["Body"] for document in self.double.received]

    def times(self) -> Counter[str]:
        """How often each SMS arrived, by its id."""
        return Counter(self.double.ledger().times)


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
        provider = TwilioProvider(own, connections=64, ca_file=ca_file)
        try:
            yield TwilioPlace(provider, double)
        finally:
            await provider.close()
