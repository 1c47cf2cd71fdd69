"""The environments of the conformance suite for the sendgrid, resend and twilio adapters. They render received requests
as MIME messages."""

from __future__ import annotations

import email.message
import email.policy
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from email.headerregistry import Address
from email.utils import parseaddr
from pathlib import Path
from typing import Any

import orjson

from dispatcher.dev.conformance import NO_QUIRKS, ProviderQuirks
from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import running_double
from dispatcher.providers.resend import ResendProvider, ResendSettings
from dispatcher.providers.sendgrid import SendGridProvider, SendGridSettings
from dispatcher.providers.twilio import TwilioProvider, TwilioSettings
from tests.providers.listeners import closing
from tests.providers.places import HttpPlace, P, filled

SENDGRID_KEY = "SG.the-key-that-nobody-may-see.0123456789"
RESEND_KEY = "re_the_key_that_nobody_may_see_0123456789"
ACCOUNT = f"AC{'0' * 32}"
TOKEN = "the_token_that_nobody_may_see_012345"
CALLBACK = "https://mail.example.org/v1/events/twilio"

SendGridPlace = HttpPlace[SendGridProvider]


class TwilioPlace(HttpPlace[TwilioProvider]):
    def texts(self) -> list[str]:
        return [document["Body"] for document in self.double.received]


@asynccontextmanager
async def _http_place(
    folder: Path,
    behaviour: Behaviour,
    open_provider: Callable[..., P],
    quirks: ProviderQuirks = NO_QUIRKS,
    rendered: Callable[[dict[str, Any]], bytes] = orjson.dumps,
    *,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[HttpPlace[P]]:
    """Run a double with this behaviour, without TLS by default, and the adapter that `open_provider` makes of its URL
    and the options."""
    given = {"connections": 64, **options}
    async with (
        running_double(folder, behaviour, tls=tls) as double,
        closing(open_provider(double.url, **given)) as provider,
    ):
        yield HttpPlace(provider, double, quirks, rendered)


def sendgrid_place(
    folder: Path, behaviour: Behaviour | None = None, *, sandbox: bool = False, **options: Any
) -> AbstractAsyncContextManager[SendGridPlace]:
    def opened(url: str, **given: Any) -> SendGridProvider:
        return SendGridProvider(SendGridSettings(api_key=SENDGRID_KEY, host=url, sandbox=sandbox), **given)

    quirks = ProviderQuirks(frozenset({"Date"}), takes_empty_files=False)
    return _http_place(folder, behaviour or Behaviour(key=SENDGRID_KEY), opened, quirks, _of_sendgrid, **options)


def resend_place(
    folder: Path, behaviour: Behaviour | None = None, **options: Any
) -> AbstractAsyncContextManager[HttpPlace[ResendProvider]]:
    def opened(url: str, **given: Any) -> ResendProvider:
        return ResendProvider(ResendSettings(api_key=RESEND_KEY, url=url), **given)

    quirks = ProviderQuirks(frozenset({"Date", "Message-ID"}), takes_empty_files=False)
    return _http_place(folder, behaviour or Behaviour(key=RESEND_KEY), opened, quirks, _of_resend, **options)


@asynccontextmanager
async def twilio_place(
    folder: Path, behaviour: Behaviour | None = None, *, sender: str = "", **options: Any
) -> AsyncIterator[TwilioPlace]:
    account = TwilioSettings(account_sid=ACCOUNT, auth_token=TOKEN, sender=sender, callback_url=CALLBACK)

    def opened(url: str, **given: Any) -> TwilioProvider:
        return TwilioProvider(replace(account, url=url), **given)

    async with _http_place(folder, behaviour or Behaviour(key=TOKEN), opened, **options) as place:
        yield TwilioPlace(place.provider, place.double)


def _of_sendgrid(document: dict[str, Any]) -> bytes:
    """The MIME message for the first personalization of a request."""
    people = document["personalizations"][0]
    replies = document.get("reply_to_list", [document["reply_to"]] if "reply_to" in document else [])
    fields = {"From": [document["from"]], "To": people.get("to"), "Cc": people.get("cc"), "Reply-To": replies}
    bodies = [(part["type"].removeprefix("text/"), part["value"]) for part in document.get("content", ())]
    message = _headed({name: [_mailbox(one) for one in found] for name, found in fields.items() if found}, document)
    return filled(message, bodies, _files(document, "type"))


def _of_resend(document: dict[str, Any]) -> bytes:
    fields: dict[str, Any] = {}
    for field, name in (("from", "From"), ("to", "To"), ("cc", "Cc"), ("reply_to", "Reply-To")):
        if field in document:
            texts = document[field] if isinstance(document[field], list) else [document[field]]
            fields[name] = ", ".join(texts)
    bodies = [("plain", document.get("text", "")), *([("html", document["html"])] if "html" in document else [])]
    return filled(_headed(fields, document), bodies, _files(document, "content_type"))


def _headed(fields: dict[str, Any], document: dict[str, Any]) -> email.message.EmailMessage:
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    for name, value in {**fields, "Subject": document.get("subject", "")}.items():
        message[name] = value
    for name, value in document.get("headers", {}).items():
        message[name] = str(email.policy.default.header_factory("X", value))
    return message


def _files(document: dict[str, Any], kind: str) -> list[tuple[str, str, str]]:
    return [(file[kind], file["content"], file["filename"]) for file in document.get("attachments", ())]


def _mailbox(entry: dict[str, str]) -> Address:
    # SendGrid writes a quoted name into the header unchanged; mail programs remove the quotes.
    name = entry.get("name", "")
    name = parseaddr(f"{name} <a@b>")[0] if name.startswith('"') else name
    return Address(name, addr_spec=entry["email"])
