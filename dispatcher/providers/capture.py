"""The provider `capture`: writes each email to a file in a Maildir and delivers nothing. For development and tests.

The file is `<email id>.<nanoseconds>.<process>.eml`, so an email that is sent twice leaves two files.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

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
    dir: Path | None = setting(
        values.path_of, None, "Maildir that the capture provider writes into.", needed="set a folder"
    )


class CaptureProvider:
    """Writes emails into a Maildir; see `contract.Provider`.

    Writes on the loop's thread, because writing a local file costs less than switching to a thread. Files are not
    synced to the disk, because a capture is not an archive.
    """

    name = NAME
    # The other adapters encode an attachment while they write it. This adapter puts the whole rendered email into
    # memory first, so up to four copies of an attachment are in memory at the same time.
    capabilities = Capabilities(copies=4, delivers=False, inline_parts=True, calendar=True, raw_mime=True)
    settings: type[CaptureSettings] = CaptureSettings
    _suffix = "eml"
    _variable = "DISPATCHER_CAPTURE_DIR"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tmp = str(folder / "tmp") + "/"
        self._new = str(folder / "new") + "/"
        self._is_created = False

    @classmethod
    def open(cls, settings: Settings) -> Self:
        folder: Path | None = settings.of(cls.settings).dir
        if folder is None:
            raise ConfigurationError([f"{cls._variable} is not set: set it to a folder."])
        return cls(folder)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """Ignores the deadline, because it waits for no server."""
        try:
            with attempt.rendering:
                content = await self._rendered(email)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        name = f"{email.email_id}.{time.time_ns()}.{os.getpid()}.{self._suffix}"
        try:
            self._create_maildir()
            self._write(name, content)
            attempt.mark_on_wire()
            self._move_to_new(name)
        except OSError as error:
            raise self._fault(error) from error
        return Accepted(name)

    @staticmethod
    async def _rendered(email: OutgoingEmail) -> bytes:
        return (await rendered(email)).content

    async def check(self) -> str:
        """Checks with a file whether the Maildir, which it creates if necessary, is writable."""
        name = f"check.{time.time_ns()}.{os.getpid()}"
        try:
            self._create_maildir()
            self._write(name, b"")
            os.unlink(self._tmp + name)  # noqa: PTH108
        except OSError as error:
            raise self._fault(error) from error
        return f"{self._folder} is writable; emails are captured there and are not delivered."

    async def close(self) -> None:
        """Does nothing, because no file or connection is open."""

    def _create_maildir(self) -> None:
        if not self._is_created:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            # Only this user may read the folders, whatever the umask, because the emails are confidential.
            for folder in (self._folder, *(self._folder / part for part in ("tmp", "new", "cur"))):
                folder.mkdir(exist_ok=True, mode=0o700)
            self._is_created = True

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

    def _move_to_new(self, name: str) -> None:
        try:
            os.rename(self._tmp + name, self._new + name)  # noqa: PTH104
        except OSError:
            os.unlink(self._tmp + name)  # noqa: PTH108
            raise

    def _fault(self, error: OSError) -> ProviderFault:
        self._is_created = False
        remedy = f"Free some disk space, or set {self._variable} to a writable folder."
        return ProviderFault(self.name, f"{self._folder} cannot be written: {error.strerror}.", remedy=remedy)


PROVIDER: Final = CaptureProvider
