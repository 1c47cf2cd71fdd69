"""What the local servers share: they listen on the loopback interface, and record what they accept in a ledger."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import ssl
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import orjson

from dispatcher.dev.acceptance_ledger import AcceptanceLedger, LedgerWriter, read_ledger

_PR_SET_PDEATHSIG: Final = 1
_TURNS: Final = 5
"""So many turns of the event loop after `accept`, the task that serves the connection has begun."""


class Session(asyncio.Protocol):
    """The server's side of one connection. `_closes`: whether the server ended it."""

    _transport: asyncio.Transport
    _closes = False

    def drop(self) -> None:
        self._closes = True
        self._transport.abort()


S = TypeVar("S", bound=Session)


class RecordingServer(ABC, Generic[S]):
    """A local server and its records, in files of a folder. `sessions` are the open connections."""

    def __init__(self, folder: Path, *, records_wire: bool) -> None:
        self.sessions: set[S] = set()
        self.connections = 0
        self._folder = folder
        self._records_wire = records_wire
        self._ledger: LedgerWriter | None = None
        self._wire = -1
        self._server: asyncio.Server | None = None

    @abstractmethod
    def _new_session(self) -> S: ...

    @property
    def ledger_path(self) -> Path:
        return self._folder / "ledger.jsonl"

    @property
    def wire_path(self) -> Path:
        return self._folder / "wire.jsonl"

    @property
    def port(self) -> int:
        assert self._server is not None, "the server has not been started"
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    def ledger(self) -> AcceptanceLedger:
        return read_ledger(self.ledger_path)

    async def _start(self, port: int, tls: ssl.SSLContext | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ledger = LedgerWriter(self.ledger_path)
        if self._records_wire:
            self._wire = appended(self.wire_path)
        self._server = await asyncio.get_running_loop().create_server(
            self._new_session, "127.0.0.1", port, ssl=tls, backlog=1024
        )

    async def close(self) -> None:
        """Stops listening and closes every session. Idempotent."""
        if self._server is not None:
            await stop(self._server, self.drop_connections)
            self._server = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._wire >= 0:
            os.close(self._wire)
            self._wire = -1

    def drop_connections(self) -> None:
        """Aborts every open connection, like a server that restarts."""
        for session in tuple(self.sessions):
            session.drop()

    def _write_event(self, connection: int, event: str, fields: dict[str, object]) -> None:
        line = {"connection": connection, "event": event, "at": time.time(), **fields}
        os.write(self._wire, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def appended(path: Path) -> int:
    """A file descriptor that appends to a file."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


async def stop(server: asyncio.Server, drop_connections: Callable[[], None]) -> None:
    """Stops listening and ends every connection, also one that was accepted a moment ago."""
    # asyncio leaves a connection open if the server is closed between `accept` and the creation of the transport.
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    server.close()
    drop_connections()
    await server.wait_closed()
    await asyncio.sleep(0)  # asyncio closes an aborted connection's socket in the next turn


async def serve(server: RecordingServer[S], started: dict[str, object]) -> None:
    """Prints a line of JSON about a server that has started. Closes the server at SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    sys.stdout.buffer.write(orjson.dumps(started, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()
    await ended.wait()
    await server.close()


def die_with_parent() -> None:
    """The kernel stops this process when its parent exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def parser_of(program: str, about: str) -> argparse.ArgumentParser:
    """A parser of the options that all servers have."""
    parser = argparse.ArgumentParser(prog=f"python -m dispatcher.dev.{program}", description=about)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the records")
    parser.add_argument("--port", type=int, default=0, help="port; 0 (the default) chooses a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="delay before the answer to an email; default: 0")
    parser.add_argument("--wire", action="store_true", help="record every request and connection in wire.jsonl")
    parser.add_argument("--die-with-parent", action="store_true", help="exit when the parent process exits")
    return parser
