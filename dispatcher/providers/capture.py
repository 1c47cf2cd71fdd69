"""The provider capture: every email becomes a file in a Maildir. For development, demo and tests; delivers nothing.

Sending an email twice gives two files, `<email id>.<nanoseconds>.<process>.eml`: whoever counts sees the duplicate.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Accepted, Outcome, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.transport.mime import rendered
from dispatcher.transport.mime_headers import UnrenderableEmail

NAME: Final = "capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings(ProviderSettings):
    """What an operator can set."""

    dir: Path | None = setting(
        values.path_of, None, "Maildir that the capture provider writes into.", needed="set a folder"
    )


class CaptureProvider:
    """Writes emails into a Maildir; see `contract.Provider`.

    Writes on the loop's thread: a local file costs less than the way to another thread. Nothing is synced to the disk:
    a capture is no archive.
    """

    name = NAME
    capabilities = Capabilities(copies=4, delivers=False)  # it writes a file at once
    settings = CaptureSettings

    def __init__(self, folder: Path) -> None:
        """An adapter for one Maildir, which is made when the first email comes."""
        self._folder = folder
        self._tmp = str(folder / "tmp") + "/"
        self._new = str(folder / "new") + "/"
        self._is_made = False

    @classmethod
    def open(cls, settings: Settings) -> CaptureProvider:
        """See `contract.ProviderClass`."""
        folder = settings.of(CaptureSettings).dir
        if folder is None:
            raise ConfigurationError(["DISPATCHER_CAPTURE_DIR is not set: set it to a folder."])
        return cls(folder)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`. The deadline is not looked at: this waits for nobody."""
        try:
            with attempt.rendering:
                content = (await rendered(email)).content
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        name = f"{email.email_id}.{time.time_ns()}.{os.getpid()}.eml"
        try:
            self._make()
            self._write(name, content)
            attempt.leaving()
            self._show(name)
        except OSError as error:
            raise self._fault(error) from error
        return Accepted(name)

    async def check(self) -> str:
        """What can be said of the Maildir, for `dispatcher doctor`; makes it, and leaves no email in it.

        Raises:
            ProviderFault: it cannot be written.
        """
        name = f"check.{time.time_ns()}.{os.getpid()}"
        try:
            self._make()
            self._write(name, b"")
            os.unlink(self._tmp + name)  # noqa: PTH108
        except OSError as error:
            raise self._fault(error) from error
        return f"{self._folder} is writable; emails are captured there and delivered to nobody."

    async def close(self) -> None:
        """Nothing is open."""

    def _make(self) -> None:
        if not self._is_made:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            # Private whatever the umask: it will hold what people are sent.
            for folder in (self._folder, *(self._folder / part for part in ("tmp", "new", "cur"))):
                folder.mkdir(exist_ok=True, mode=0o700)
            self._is_made = True

    def _write(self, name: str, content: bytes) -> None:
        path = self._tmp + name
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            written = 0
            while written < len(content):
                written += os.write(file, content[written:] if written else content)
        except OSError:
            os.unlink(path)  # noqa: PTH108
            raise
        finally:
            os.close(file)

    def _show(self, name: str) -> None:
        """Let readers see a file, whole from the first look; its name is new, so nothing is overwritten."""
        try:
            os.rename(self._tmp + name, self._new + name)  # noqa: PTH104
        except OSError:
            os.unlink(self._tmp + name)  # noqa: PTH108
            raise

    def _fault(self, error: OSError) -> ProviderFault:
        self._is_made = False
        return ProviderFault(
            NAME,
            f"{self._folder} cannot be written: {error.strerror}.",
            remedy="Make room, or point DISPATCHER_CAPTURE_DIR at a folder that we may write.",
        )


PROVIDER: Final = CaptureProvider
