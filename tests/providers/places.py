"""Environments of the conformance suite: an adapter, and a server or a folder with an independent count of emails."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from dispatcher.config.values import SmtpServer
from dispatcher.dev.conformance import NO_QUIRKS, ProviderQuirks
from dispatcher.dev.http_double import HttpDouble
from dispatcher.dev.smtp_behaviour import SmtpBehaviour
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.providers.capture import CaptureProvider
from dispatcher.providers.contract import Provider
from dispatcher.providers.sms_capture import SmsCaptureProvider
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.listeners import closing

P = TypeVar("P", bound=Provider)


def filled(message: EmailMessage, bodies: Sequence[tuple[str, str]], files: Sequence[tuple[str, str, str]]) -> bytes:
    """The message with these bodies (subtype, text) and files (type, content in Base64, name), by the standard library,
    with boundaries that do not depend on chance."""
    for number, (subtype, text) in enumerate(bodies):
        add = message.add_alternative if number else message.set_content
        add(text, subtype=subtype, cte="base64")
    for content_type, content, filename in files:
        kind, _, subtype = content_type.partition("/")
        message.add_attachment(base64.b64decode(content), maintype=kind, subtype=subtype, filename=filename)
    for number, part in enumerate(one for one in message.walk() if one.is_multipart()):
        part.set_boundary(f"=_part_{number}")
    return message.as_bytes()


@dataclass(frozen=True, slots=True)
class HttpPlace(Generic[P]):
    """The adapter of an HTTP API, its double, and what makes the email from a request as recipients would get it."""

    provider: P
    double: HttpDouble
    quirks: ProviderQuirks = NO_QUIRKS
    delivered: Callable[[dict[str, Any]], bytes] = orjson.dumps

    def contents(self) -> list[bytes]:
        return [self.delivered(document) for document in self.double.received]

    def times(self) -> Counter[str]:
        return Counter(self.double.ledger().times)


@dataclass(frozen=True, slots=True)
class SmtpPlace:
    provider: SmtpProvider
    sink: SmtpSink
    quirks: ProviderQuirks = NO_QUIRKS

    def contents(self) -> list[bytes]:
        return [email.content for email in self.sink.received]

    def times(self) -> Counter[str]:
        return Counter(self.sink.ledger().times)


@asynccontextmanager
async def smtp_place(
    folder: Path, behaviour: SmtpBehaviour | None = None, *, trusted_idle_seconds: float = 5.0, **own: int
) -> AsyncIterator[SmtpPlace]:
    """Run the smtp adapter without TLS, and a sink with this behaviour."""
    async with running_sink(folder, behaviour) as sink:
        server = SmtpServer("127.0.0.1", sink.port, "none")
        settings = replace(SmtpSettings(url=server, connections=8, emails_per_connection=100), **own)  # type: ignore[arg-type]
        async with closing(SmtpProvider(settings, trusted_idle_seconds=trusted_idle_seconds)) as provider:
            yield SmtpPlace(provider, sink)


@asynccontextmanager
async def printing(module: str, folder: Path, *arguments: str) -> AsyncIterator[dict[str, Any]]:
    """Run a local server in a separate process; yields what it prints about itself."""
    command = (sys.executable, "-m", module, "--folder", str(folder), "--die-with-parent", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(await process.stdout.readline())
    finally:
        process.terminate()
        assert await process.wait() == 0


@asynccontextmanager
async def sink_process(folder: Path, *arguments: str) -> AsyncIterator[int]:
    async with printing("dispatcher.dev.smtp_sink", folder, *arguments) as printed:
        yield printed["port"]


@dataclass(frozen=True, slots=True)
class CapturePlace:
    """The adapter capture or sms-capture, and the Maildir into which it writes, which does not exist yet."""

    provider: CaptureProvider
    folder: Path
    quirks: ProviderQuirks = NO_QUIRKS

    def contents(self) -> list[bytes]:
        return [
            file.read_bytes()
            for file in sorted(self.folder.glob("new/*"), key=lambda file: int(file.name.split(".")[1]))
        ]

    def times(self) -> Counter[str]:
        return Counter(path.name.partition(".")[0] for path in self.folder.glob("new/*"))

    def texts(self) -> list[str]:
        return [orjson.loads(content)["text"] for content in self.contents()]


@asynccontextmanager
async def capture_place(folder: Path) -> AsyncIterator[CapturePlace]:
    yield CapturePlace(CaptureProvider(folder / "maildir"), folder / "maildir")


@asynccontextmanager
async def sms_capture_place(folder: Path) -> AsyncIterator[CapturePlace]:
    yield CapturePlace(SmsCaptureProvider(folder / "maildir"), folder / "maildir")
