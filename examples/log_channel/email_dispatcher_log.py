"""A package that adds a channel: lines of log files, with the same outbox, leases, retries and dead letters as emails.

enqueue(connection, LogLine(message_key="order-17", to="orders", text="Order 17 was paid."))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.message import TextMessage
from dispatcher.domain.outcome import Accepted, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt


class LogLine(TextMessage):
    """A line for a log file. `to` is the file's name, without `.log`."""

    channel = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings(ProviderSettings):
    dir: Path | None = setting(values.path_of, None, "Folder of the log files.", needed="set a folder")


class LogProvider:
    name = "log"
    capabilities = Capabilities(copies=1, channel="log", delivers=False)
    settings = LogSettings

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def open(cls, settings: Settings) -> LogProvider:
        return cls(settings.of(LogSettings).dir or Path())

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        try:
            line = orjson.dumps({"id": email.email_id, "text": email.text}, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            return Rejected(Reason.INVALID_CONTENT, "the text is not valid Unicode")
        if not email.text or len(email.to) != 1 or not email.to[0].isidentifier():
            return Rejected(Reason.INVALID_CONTENT, "a line needs a text and the name of a log")
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{email.to[0]}.log").open("ab") as file:
            attempt.mark_on_wire()
            file.write(line)
        return Accepted()

    async def check(self) -> str:
        return f"{self._folder} gets a file for each log."

    async def close(self) -> None: ...
