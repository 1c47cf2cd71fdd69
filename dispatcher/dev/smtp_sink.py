"""A local SMTP server that keeps a ledger of what it accepted: for the demo, tests and benchmarks. It delivers nothing.

    python -m dispatcher.dev.smtp_sink --folder FOLDER [--port 0] [--no-eml] [--wire] [--latency-ms 5] [--reply X=TEXT]

prints one line of JSON with its ports and paths, and runs until SIGTERM. In the folder: `ledger.jsonl` (see `ledger`),
`mail/<email id>.<n>.eml` for each acceptance, and with `--wire`, `wire.jsonl`, with what was seen of each email and
connection (see `SmtpSink.witness`). A line of JSON on the control port changes its behaviour while it runs (see
`smtp_behaviour.SmtpBehaviour.change`), and gets a line back. Recipients decide their own fate by how they begin:

    refused…      550 5.1.1, always
    greylisted…   451 4.7.1 the first time
    slow…         accepted, late
    busy-…        450 4.2.1, always
    limited-…     450 4.7.1, always
    unverified-…  451 4.3.0, always
    full-…        452 4.2.2, always
    closing-…     421 4.3.2, always, and the connection ends
    hurried-…     421 4.7.28, always, and the connection ends
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import orjson

from dispatcher.dev.acceptance_ledger import AcceptanceLedger, LedgerEntry, LedgerWriter, read_ledger
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_session import Received, SmtpSession

PR_SET_PDEATHSIG: Final = 1


class SmtpSink:
    """The server and its books.

    Attributes:
        behaviour: What it does besides accepting; may be changed while it runs.
        received: What it accepted, if it was told to keep it.
        commands: How often each command came.
        connections: How many there ever were.
        sessions: Those that are open.
    """

    def __init__(
        self,
        folder: Path,
        behaviour: SmtpBehaviour | None = None,
        *,
        writes_eml: bool = True,
        keeps: bool = False,
        watches_wire: bool = False,
    ) -> None:
        self.behaviour = behaviour or SmtpBehaviour()
        self.received: list[Received] = []
        self.commands: Counter[str] = Counter()
        self.greylisted: Counter[str] = Counter()
        self.connections = 0
        self.sessions: set[SmtpSession] = set()
        self._folder = folder
        self._mail_prefix = f"{folder / 'mail'}/"
        self._writes_eml = writes_eml
        self._keeps = keeps
        self._watches_wire = watches_wire
        self._wire = -1
        self._numbers = itertools.count(1)
        self._ledger: LedgerWriter | None = None
        self._server: asyncio.Server | None = None

    @property
    def ledger_path(self) -> Path:
        """Where the ledger is."""
        return self._folder / "ledger.jsonl"

    @property
    def wire_path(self) -> Path:
        """Where the wire's events are."""
        return self._folder / "wire.jsonl"

    @property
    def mail_folder(self) -> Path:
        """Where the `.eml` files are."""
        return self._folder / "mail"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None, "the sink has not been started"
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    def ledger(self) -> AcceptanceLedger:
        """What it accepted so far."""
        return read_ledger(self.ledger_path)

    async def start(self, port: int = 0) -> None:
        """Listen on the loopback; 0 finds a free port."""
        self.mail_folder.mkdir(parents=True, exist_ok=True)
        self._ledger = LedgerWriter(self.ledger_path)
        if self._watches_wire:
            self._wire = os.open(self.wire_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        tls = self.behaviour.tls if self.behaviour.security == "tls" else None
        self._server = await asyncio.get_running_loop().create_server(
            self._new_session, "127.0.0.1", port, ssl=tls, backlog=1024
        )

    async def close(self) -> None:
        """Stop listening and end every session. Again is harmless."""
        if self._server is not None:
            self._server.close()
            self.drop_connections()
            await self._server.wait_closed()
            self._server = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._wire >= 0:
            os.close(self._wire)
            self._wire = -1

    def drop_connections(self) -> None:
        """End every open session without a word, as a restarted server does."""
        for session in tuple(self.sessions):
            session.drop()

    def accept(self, email: Received) -> str:
        """Enter an email into the books, before the answer goes out; the name that it got."""
        email_id = email.email_id
        name = f"{email_id or 'unnamed'}.{next(self._numbers)}"
        if self._writes_eml:
            _write_new(f"{self._mail_prefix}{_file_name(name)}.eml", email.content)
        if self._keeps:
            self.received.append(email)
        assert self._ledger is not None
        self._ledger.append(LedgerEntry(email_id, len(email.recipients), len(email.content), time.time()))
        return name

    def witness(self, connection: int, event: str, email: Received | None = None, **fields: object) -> None:
        """Enter what is seen on the wire: a body `began`, an email was `read` to its final dot (`email_id`), its reply
        was `answered` (the kernel took the whole reply while the connection was open), and a connection `ended`
        (`by_us`, `by_reset`).
        """
        if self._wire >= 0:
            told = {"email_id": email.email_id} if email else {}
            line = {"connection": connection, "event": event, "at": time.time(), **told, **fields}
            os.write(self._wire, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    async def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Change the behaviour as each line says; answer it with a line."""
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
    """Write a file whose name is new; a third of what `Path.write_bytes` costs."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
    finally:
        os.close(file)


@asynccontextmanager
async def running_sink(
    folder: Path, behaviour: SmtpBehaviour | None = None, *, writes_eml: bool = False, keeps: bool = True
) -> AsyncIterator[SmtpSink]:
    """A sink on this loop, for tests; keeps what it receives in memory."""
    sink = SmtpSink(folder, behaviour, writes_eml=writes_eml, keeps=keeps)
    await sink.start()
    try:
        yield sink
    finally:
        await sink.close()


async def _serve(sink: SmtpSink, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await sink.start(port)
    control = await asyncio.start_server(sink.obey, "127.0.0.1", 0)
    told = {
        "host": "127.0.0.1",
        "port": sink.port,
        "control_port": control.sockets[0].getsockname()[1],
        "ledger": str(sink.ledger_path),
        "mail": str(sink.mail_folder),
    }
    sys.stdout.buffer.write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()
    await stop.wait()
    control.close()
    await sink.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; returns after SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m dispatcher.dev.smtp_sink", description="A local SMTP server.")
    parser.add_argument("--folder", type=Path, required=True, help="for the ledger and the mail")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) finds a free one")
    parser.add_argument("--no-eml", action="store_true", help="keep the ledger only")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before the answer to an email")
    parser.add_argument("--slow-ms", type=float, default=200.0, help="before the reply to a recipient named slow…")
    parser.add_argument("--reply", action="append", default=[], metavar="STEP=TEXT", type=_scripted, help=(
        f"say this instead; steps: {', '.join(Step)}; instead of a text: {', '.join(SmtpFault)}"
    ))  # fmt: skip
    parser.add_argument("--login", metavar="USER:PASSWORD", help="what MAIL needs; default: an open server")
    parser.add_argument("--wire", action="store_true", help="keep a record of every email and connection")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started us does")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    behaviour = SmtpBehaviour(
        script=dict(options.reply),
        login=_login(options.login),
        latency_seconds=options.latency_ms / 1000,
        slow_seconds=options.slow_ms / 1000,
    )
    import uvloop

    sink = SmtpSink(options.folder, behaviour, writes_eml=not options.no_eml, watches_wire=options.wire)
    uvloop.run(_serve(sink, options.port))


def _login(text: str | None) -> tuple[str, str] | None:
    user, _, password = (text or "").partition(":")
    return (user, password) if text else None


def _scripted(text: str) -> tuple[Step, str]:
    step, _, reply = text.partition("=")
    return Step(step), reply


if __name__ == "__main__":
    main()
