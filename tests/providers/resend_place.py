"""The environment of the conformance suite for the resend adapter. It renders received requests as MIME messages."""

from __future__ import annotations

import email.message
import email.policy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dispatcher.dev.conformance import ProviderQuirks
from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import running_double
from dispatcher.providers.resend import ResendProvider, ResendSettings
from tests.providers.listeners import closing
from tests.providers.places import HttpPlace, filled

KEY = "re_the_key_that_nobody_may_see_0123456789"

QUIRKS = ProviderQuirks(frozenset({"Date", "Message-ID"}), takes_empty_files=False)


@asynccontextmanager
async def resend_place(
    folder: Path, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None, ca_file: Path | None = None
) -> AsyncIterator[HttpPlace[ResendProvider]]:
    """Run the resend adapter, without TLS by default, and a double with this behaviour."""
    async with running_double(folder, behaviour or Behaviour(key=KEY), tls=tls) as double:
        own = ResendSettings(api_key=KEY, url=double.url)
        async with closing(ResendProvider(own, connections=64, ca_file=ca_file)) as provider:
            yield HttpPlace(provider, double, QUIRKS, rendered)


def rendered(document: dict[str, Any]) -> bytes:
    """The MIME message for a request."""
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    for field, name in (("from", "From"), ("to", "To"), ("cc", "Cc"), ("reply_to", "Reply-To")):
        if field in document:
            texts = document[field] if isinstance(document[field], list) else [document[field]]
            message[name] = ", ".join(texts)
    message["Subject"] = document.get("subject", "")
    for name, value in document.get("headers", {}).items():
        message[name] = str(email.policy.default.header_factory("X", value))
    bodies = [("plain", document.get("text", "")), *([("html", document["html"])] if "html" in document else [])]
    files = [(file["content_type"], file["content"], file["filename"]) for file in document.get("attachments", ())]
    return filled(message, bodies, files)
