"""A local SMTP server for the demo, tests and benchmarks. It records accepted emails in a ledger and delivers nothing.

    python -m dispatcher.dev.smtp_sink --folder FOLDER [--port 0] [--no-eml] [--wire] [--latency-ms 5] [--reply X=TEXT]

The command prints one line of JSON with the server's ports and paths, and runs until SIGTERM. It writes to the folder:

    ledger.jsonl              every email that the server accepted (see `acceptance_ledger`)
    mail/<email id>.<n>.eml   the content of every accepted email
    wire.jsonl                with `--wire`: events of each email and connection (see `SmtpSink.record_event`)

The server also has a control port. A client that sends a line of JSON to this port changes the server's behaviour (see
`smtp_behaviour.SmtpBehaviour.change`), and gets a line as the answer.

The reply to a recipient depends on how the recipient's address begins:

    refused…      550 5.1.1, always
    greylisted…   451 4.7.1 the first time, then accepted
    slow…         accepted, after a delay
    busy-…        450 4.2.1, always
    limited-…     450 4.7.1, always
    unverified-…  451 4.3.0, always
    full-…        452 4.2.2, always
    closing-…     421 4.3.2, always, and the connection ends
    hurried-…     421 4.7.28, always, and the connection ends
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from dispatcher.dev.acceptance_ledger import LedgerEntry
from dispatcher.dev.recording_server import RecordingServer, die_with_parent, parser_of, serve
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_session import Received, SmtpSession


class SmtpSink(RecordingServer[SmtpSession]):
    """The local SMTP server and its records: the accepted emails (only if `keeps`), how often each SMTP command
    arrived, and how often each recipient was greylisted (deferred at the first attempt)."""

    def __init__(
        self,
        folder: Path,
        behaviour: SmtpBehaviour | None = None,
        *,
        writes_eml: bool = True,
        keeps: bool = False,
        records_wire: bool = False,
    ) -> None:
        super().__init__(folder, records_wire=records_wire)
        self.behaviour = behaviour or SmtpBehaviour()
        self.received: list[Received] = []
        self.commands: Counter[str] = Counter()
        self.greylisted: Counter[str] = Counter()
        self._mail_prefix = f"{folder / 'mail'}/"
        self._writes_eml = writes_eml
        self._keeps = keeps
        self._numbers = itertools.count(1)

    @property
    def mail_folder(self) -> Path:
        return self._folder / "mail"

    async def start(self, port: int = 0) -> None:
        """Listens on the loopback interface; port 0 chooses a free port."""
        self.mail_folder.mkdir(parents=True, exist_ok=True)
        await self._start(port, self.behaviour.tls if self.behaviour.security == "tls" else None)

    def accept(self, email: Received) -> str:
        """Writes an email to the ledger, before the answer is sent; returns the email's queue id."""
        email_id = email.email_id
        name = f"{email_id or 'unnamed'}.{next(self._numbers)}"
        if self._writes_eml:
            _write_new(f"{self._mail_prefix}{_file_name(name)}.eml", email.content)
        if self._keeps:
            self.received.append(email)
        assert self._ledger is not None
        to = email.recipients
        self._ledger.append(LedgerEntry(email_id, len(to), len(email.content), time.time(), to))
        return name

    def record_event(self, connection: int, event: str, email: Received | None = None, **fields: object) -> None:
        """Writes an event of a connection to wire.jsonl, if `records_wire`.

        `began`: the first octet of the content arrived. `read`: the final dot arrived. `answered`: the kernel took the
        whole reply while the connection was open. `ended`: the connection was closed, `by_us` or `by_reset`.
        """
        if self._wire >= 0:
            ids = {"email_id": email.email_id} if email else {}
            self._write_event(connection, event, {**ids, **fields})

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection to the control port: each line sets the behaviour, and gets a line as the answer."""
        while line := await reader.readline():
            try:
                self.behaviour.change(orjson.loads(line))
            except (ValueError, TypeError, AttributeError):
                writer.write(b'{"error": "not a behaviour"}\n')
            else:
                writer.write(b"{}\n")
        writer.close()

    def _new_session(self) -> SmtpSession:
        self.connections += 1
        return SmtpSession(self, self.connections)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:200]


def _write_new(path: str, content: bytes) -> None:
    """Writes a new file, in a third of the time of `Path.write_bytes`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
    finally:
        os.close(file)


@asynccontextmanager
async def running_sink(
    folder: Path, behaviour: SmtpBehaviour | None = None, *, writes_eml: bool = False, keeps: bool = True
) -> AsyncIterator[SmtpSink]:
    """Runs the local server on this event loop, for tests. By default, keeps the accepted emails in memory only."""
    sink = SmtpSink(folder, behaviour, writes_eml=writes_eml, keeps=keeps)
    await sink.start()
    try:
        yield sink
    finally:
        await sink.close()


async def _serve(sink: SmtpSink, port: int) -> None:
    await sink.start(port)
    control = await asyncio.start_server(sink.control, "127.0.0.1", 0)
    started: dict[str, object] = {
        "host": "127.0.0.1",
        "port": sink.port,
        "control_port": control.sockets[0].getsockname()[1],
        "ledger": str(sink.ledger_path),
        "mail": str(sink.mail_folder),
    }
    await serve(sink, started)
    control.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the server until SIGTERM or SIGINT."""
    parser = parser_of("smtp_sink", "A local SMTP server.")
    parser.add_argument("--no-eml", action="store_true", help="write the ledger, but no .eml files")
    parser.add_argument(
        "--slow-ms", type=float, default=200.0, help="delay before the reply to a recipient slow…; default: 200"
    )
    parser.add_argument("--reply", action="append", default=[], metavar="STEP=TEXT", type=_scripted, help=(
        f"send this reply at a step ({', '.join(Step)}), or inject a fault ({', '.join(SmtpFault)})"
    ))  # fmt: skip
    parser.add_argument(
        "--recipients-per-transaction", type=int, default=0, metavar="N", help="answer 452 to more; default: no limit"
    )
    parser.add_argument("--login", metavar="USER:PASSWORD", help="the login that MAIL requires; default: none")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()
    behaviour = SmtpBehaviour(
        script=dict(options.reply),
        login=_login(options.login),
        most_recipients=options.recipients_per_transaction,
        latency_seconds=options.latency_ms / 1000,
        slow_seconds=options.slow_ms / 1000,
    )
    import uvloop

    sink = SmtpSink(options.folder, behaviour, writes_eml=not options.no_eml, records_wire=options.wire)
    uvloop.run(_serve(sink, options.port))


def _login(text: str | None) -> tuple[str, str] | None:
    user, _, password = (text or "").partition(":")
    return (user, password) if text else None


def _scripted(text: str) -> tuple[Step, str]:
    step, _, reply = text.partition("=")
    return Step(step), reply


if __name__ == "__main__":
    main()
