"""Runs `dispatcher` in a separate process, with only the environment variables that a test sets."""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from struct import pack
from typing import Any, Final

import orjson

from dispatcher.broker.topology import Topology
from dispatcher.cli.main import main
from dispatcher.dev.servers import Servers

DEADLINE_SECONDS: Final = 60.0
PROGRAM: Final = (sys.executable, "-m", "dispatcher.cli.main")


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    stdout: str
    stderr: str

    @property
    def refusals(self) -> list[str]:
        events = [orjson.loads(line) for line in self.stdout.splitlines()]
        return [event["reason"] for event in events if (event["event"], event["level"]) == ("startup.failed", "error")]

    @property
    def json(self) -> Any:
        assert self.stdout.count("\n") == 1, self.stdout
        return orjson.loads(self.stdout)


def in_process(*arguments: str) -> CommandResult:
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        code = main(arguments)
    gc.enable()  # short commands disable the garbage collector
    return CommandResult(code, stdout.getvalue(), stderr.getvalue())


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs `dispatcher`. Unless `needs_process`, a call runs the command in the test's process, which takes a tenth of
    the time; except `run` and `api`, which configure the log of their process."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_process: bool = True
    program: tuple[str, ...] = PROGRAM

    def having(self, **variables: str | None) -> CommandLine:
        merged = {**self.environment, **variables}
        return replace(self, environment={name: value for name, value in merged.items() if value is not None})

    def __call__(self, *arguments: str, stdin: str | bytes = b"") -> CommandResult:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        if not (self.needs_process or arguments[0] in ("run", "api")):
            return self._run_here(arguments, given)
        done = subprocess.run(
            [*self.program, *arguments],
            input=given,
            capture_output=True,
            cwd=self.folder,
            env=self.whole_environment,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    def _run_here(self, arguments: tuple[str, ...], given: bytes) -> CommandResult:
        ours, theirs, stdin = dict(os.environ), self.whole_environment, sys.stdin
        sys.stdin = TextIOWrapper(BytesIO(given))
        try:
            os.environ.clear()
            os.environ.update(theirs)
            time.tzset()
            with chdir(self.folder):
                return in_process(*arguments)
        finally:
            sys.stdin = stdin
            os.environ.clear()
            os.environ.update(ours)
            time.tzset()

    @contextmanager
    def started(self, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen([*self.program, *arguments], cwd=self.folder, env=self.whole_environment, **pipes)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate(timeout=DEADLINE_SECONDS)

    def on_terminal(
        self,
        *arguments: str,
        columns: int = 110,
        when: Callable[[bytes], bool] = lambda _: False,
        then: Callable[[subprocess.Popen[bytes]], bytes | None] = lambda _: None,
    ) -> CommandResult:
        """Runs a command until it exits, with stdout and stderr on one terminal. The result's `stdout` contains all
        text on the terminal. As soon as `when` is true for this text, calls `then` once, and types what it returns."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, pack("HHHH", 40, columns, 0, 0))
        with self.started(*arguments, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            screen, is_done = b"", False
            with suppress(OSError):  # Linux reports the closed terminal as an error
                while read := os.read(ours, 65536):
                    screen += read
                    if not is_done and when(screen):
                        is_done = True
                        os.write(ours, then(process) or b"")
            os.close(ours)
            return CommandResult(process.wait(timeout=DEADLINE_SECONDS), screen.decode(), "")

    @property
    def whole_environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "TERM": "xterm", **self.environment}


def settings_for(topology: Topology, servers: Servers, database_url: str) -> dict[str, str]:
    """Settings for a test's queues and tables, with the provider that writes emails to files."""
    return {
        "DISPATCHER_DATABASE_URL": database_url,
        "DISPATCHER_AMQP_URL": servers.amqp_url,
        "DISPATCHER_EXCHANGE": topology.exchange,
        "DISPATCHER_QUEUE": topology.queue,
        "DISPATCHER_DLQ": topology.dlq,
        "DISPATCHER_PROVIDERS": "capture",
        "DISPATCHER_CAPTURE_DIR": "mail",
        "DISPATCHER_LOG_FORMAT": "json",
    }
