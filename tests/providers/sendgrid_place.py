"""The environment of the conformance suite for the sendgrid adapter. Renders received requests as MIME messages."""

from __future__ import annotations

import email.message
import email.policy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.headerregistry import Address
from email.utils import parseaddr
from pathlib import Path
from typing import Any

from dispatcher.dev.conformance import ProviderQuirks
from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import running_double
from dispatcher.providers.sendgrid import SendGridProvider, SendGridSettings
from tests.providers.listeners import closing
from tests.providers.places import HttpPlace, filled

KEY = "SG.the-key-that-nobody-may-see.0123456789"
QUIRKS = ProviderQuirks(frozenset({"Date"}), takes_empty_files=False)

SendGridPlace = HttpPlace[SendGridProvider]


@asynccontextmanager
async def sendgrid_place(
    folder: Path,
    behaviour: Behaviour | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    ca_file: Path | None = None,
    sandbox: bool = False,
    connections: int = 64,
) -> AsyncIterator[SendGridPlace]:
    """Run the sendgrid adapter, without TLS by default, and a double with this behaviour."""
    async with running_double(folder, behaviour or Behaviour(key=KEY), tls=tls) as double:
        own = SendGridSettings(api_key=KEY, host=double.url, sandbox=sandbox)
        async with closing(SendGridProvider(own, connections=connections, ca_file=ca_file)) as provider:
            yield HttpPlace(provider, double, QUIRKS, rendered)


def rendered(document: dict[str, Any]) -> bytes:
    """The MIME message for the first personalization of a request."""
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    people = document["personalizations"][0]
    message["From"] = _mailbox(document["from"])
    for field, name in (("to", "To"), ("cc", "Cc")):
        if field in people:
            message[name] = [_mailbox(one) for one in people[field]]
    replies = document.get("reply_to_list", [document["reply_to"]] if "reply_to" in document else [])
    if replies:
        message["Reply-To"] = [_mailbox(one) for one in replies]
    message["Subject"] = document.get("subject", "")
    for name, value in document.get("headers", {}).items():
        message[name] = _decoded(value)
    bodies = [(part["type"].removeprefix("text/"), part["value"]) for part in document.get("content", ())]
    files = [(file["type"], file["content"], file["filename"]) for file in document.get("attachments", ())]
    return filled(message, bodies, files)


def _mailbox(entry: dict[str, str]) -> Address:
    # SendGrid writes a quoted name into the header unchanged; mail programs remove the quotes.
    name = entry.get("name", "")
    name = parseaddr(f"{name} <a@b>")[0] if name.startswith('"') else name
    return Address(name, addr_spec=entry["email"])


def _decoded(value: str) -> str:
    return str(email.policy.default.header_factory("X", value))
