"""Environments of the conformance suite for the adapters smtp and capture, each with an independent count of emails."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path

from dispatcher.config.values import SmtpServer
from dispatcher.dev.conformance import NO_QUIRKS, ProviderQuirks
from dispatcher.dev.smtp_behaviour import SmtpBehaviour
from dispatcher.dev.smtp_sink import SmtpSink, running_sink
from dispatcher.providers.capture import CaptureProvider
from dispatcher.providers.sms_capture import SmsCaptureProvider
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings


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
class SmtpPlace:
    """The smtp adapter and the sink to which it sends."""

    provider: SmtpProvider
    sink: SmtpSink
    quirks: ProviderQuirks = NO_QUIRKS

    def contents(self) -> list[bytes]:
        return [email.content for email in self.sink.received]

    def times(self) -> Counter[str]:
        return Counter(self.sink.ledger().times)


@dataclass(frozen=True, slots=True)
class CapturePlace:
    """The capture adapter and the Maildir into which it writes."""

    provider: CaptureProvider
    folder: Path
    quirks: ProviderQuirks = NO_QUIRKS

    def contents(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.folder.glob("new/*"), key=_nanoseconds)]

    def times(self) -> Counter[str]:
        return Counter(path.name.partition(".")[0] for path in self.folder.glob("new/*"))


def _nanoseconds(path: Path) -> int:
    return int(path.name.split(".")[1])


@asynccontextmanager
async def smtp_place(
    folder: Path,
    behaviour: SmtpBehaviour | None = None,
    *,
    connections: int = 8,
    emails_per_connection: int = 100,
    trusted_idle_seconds: float = 5.0,
) -> AsyncIterator[SmtpPlace]:
    """Run the smtp adapter without TLS, and a sink with this behaviour."""
    async with running_sink(folder, behaviour) as sink:
        server = SmtpServer("127.0.0.1", sink.port, "none")
        provider = SmtpProvider(
            SmtpSettings(url=server, connections=connections, emails_per_connection=emails_per_connection),
            trusted_idle_seconds=trusted_idle_seconds,
        )
        try:
            yield SmtpPlace(provider, sink)
        finally:
            await provider.close()


@asynccontextmanager
async def sink_process(folder: Path, *arguments: str) -> AsyncIterator[int]:
    """Run a sink in a separate process; yields the sink's port."""
    command = (sys.executable, "-m", "dispatcher.dev.smtp_sink", "--folder", str(folder), "--die-with-parent")
    process = await asyncio.create_subprocess_exec(*command, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        told = json.loads(await process.stdout.readline())
        yield told["port"]
    finally:
        process.terminate()
        assert await process.wait() == 0


@asynccontextmanager
async def capture_place(folder: Path) -> AsyncIterator[CapturePlace]:
    """Create the capture adapter, with a Maildir that does not exist yet."""
    yield CapturePlace(CaptureProvider(folder / "maildir"), folder / "maildir")


@dataclass(frozen=True, slots=True)
class SmsCapturePlace(CapturePlace):
    """The sms-capture adapter and the Maildir into which it writes."""

    def texts(self) -> list[str]:
        return [json.loads(content)["text"] for content in self.contents()]


@asynccontextmanager
async def sms_capture_place(folder: Path) -> AsyncIterator[SmsCapturePlace]:
    """Run the sms-capture adapter on a Maildir in `folder`."""
    yield SmsCapturePlace(SmsCaptureProvider(folder / "sms"), folder / "sms")
