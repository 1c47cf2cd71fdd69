"""A Maildir into which a mail server delivers messages: a folder with `new`, `cur` and `tmp`, one file per message."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

MAX_OCTETS: Final = 256 * 1024
"""Only this much of a message is read. A bounce has its reason at the beginning, and a copy of the email at the end."""
ASIDE: Final = ".Refused"
"""The folder for messages that are forged or cannot be read. Mail programs show it as a separate folder (Maildir++)."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    name: str
    octets: bytes | None  # the beginning of the message; None if the entry is not a regular file
    received_at: datetime  # when the mail server wrote the file


class Maildir:
    """Reads new messages. A message stays in `new` until the caller calls `put_away` or `set_aside`."""

    def __init__(self, folder: Path, *, keeps: bool) -> None:
        """`keeps`: whether `put_away` moves a message to `cur`; otherwise it deletes the message."""
        self.folder = folder
        self._keeps = keeps

    def read_new(self, limit: int) -> list[NewMessage]:
        """Reads up to `limit` messages of the folder `new`, in any order."""
        new = os.open(self.folder / "new", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(new) as entries:
                names = list(islice((entry.name for entry in entries if not entry.name.startswith(".")), limit))
            return [message for name in names if (message := _read(new, name))]
        finally:
            os.close(new)

    def put_away(self, name: str) -> None:
        """Deletes a message, or moves it to `cur` with the flag `seen`. Idempotent."""
        with suppress(FileNotFoundError):
            if self._keeps:
                (self.folder / "new" / name).rename(self.folder / "cur" / f"{name.partition(':')[0]}:2,S")
            else:
                (self.folder / "new" / name).unlink()

    def set_aside(self, name: str) -> None:
        """Moves a message to `.Refused`, for the operator. Idempotent."""
        for each in ("", "new", "cur", "tmp"):
            (self.folder / ASIDE / each).mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            (self.folder / "new" / name).rename(self.folder / ASIDE / "new" / name)


def _read(folder: int, name: str) -> NewMessage | None:
    """Reads a message; None if another process has removed it. Never follows a link, and never waits for a pipe."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError:  # the entry is a link, or a file of another user
        return NewMessage(name, None, datetime.now(UTC))
    try:
        found, octets = os.fstat(file), None
        if stat.S_ISREG(found.st_mode):
            with os.fdopen(file, "rb", closefd=False) as content:
                octets = content.read(MAX_OCTETS)
        return NewMessage(name, octets, datetime.fromtimestamp(found.st_mtime, UTC))
    finally:
        os.close(file)
