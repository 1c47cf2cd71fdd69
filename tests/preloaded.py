"""Starts `python -m MODULE` by fork, from a process that has imported the product: half the CPU of many a start.

Each test process has one such process. Programs whose environment changes how Python or an import works are executed
instead, as are all others.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
import setproctitle

CHECKOUT: Final = Path(__file__).parents[1]
_EXECUTED: Final = ("LD_", "PYTHON", "FAKETIME", "DISPATCHER_DATABASE_SCHEMA", "TZ")
"""Beginnings of the variables that are read before our code, or when it is imported."""
_LEFT_OUT: Final = ("dispatcher.providers.", "dispatcher.dev.")
_LIBRARIES: Final = ("boto3", "botocore.session", "pyreqwest.client", "sendgrid")
_PR_SET_PDEATHSIG: Final = 1
_STATUS: Final = struct.Struct("i")
_MAX_REQUEST_BYTES: Final = 1 << 18


class Process(Protocol):
    """What `Program` needs of a process; a part of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start(argv: Sequence[str], *, env: Mapping[str, str], stdout: int, stderr: int) -> Process:
    """Start a program in its own session and in the checkout, without input."""
    is_module = argv[0] == sys.executable and argv[1] == "-m"
    if is_module and not any(name.startswith(_EXECUTED) for name in env):
        return _forker().fork(argv[2:], env, stdout, stderr)
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


class _Forker:
    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded"], cwd=CHECKOUT, stdin=theirs.fileno(), start_new_session=True
            )
        atexit.register(self._end)

    def fork(self, words: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> _Forked:
        report, theirs = os.pipe()
        try:
            request = orjson.dumps({"words": [str(word) for word in words], "env": dict(env)})
            socket.send_fds(self._requests, [request], [stdout, stderr, theirs])
        finally:
            os.close(theirs)
        return _Forked(report)

    def _end(self) -> None:
        self._requests.close()
        self._process.wait()


@functools.cache
def _forker() -> _Forker:
    return _Forker()


class _Forked:
    def __init__(self, report: int) -> None:
        self._report = report
        self._code: int | None = None
        (self.pid,) = _STATUS.unpack(os.read(report, _STATUS.size))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._code if self._code is not None or not self._has_ended(0.0) else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not self._has_ended(timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            (status,) = _STATUS.unpack(os.read(self._report, _STATUS.size))
            os.close(self._report)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def _has_ended(self, seconds: float | None) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            return bool(selector.select(seconds))


@dataclass(frozen=True, slots=True)
class _Request:
    words: list[str]
    env: dict[str, str]
    stdout: int
    stderr: int


def _preload() -> None:
    package = importlib.import_module("dispatcher")
    for found in pkgutil.walk_packages(package.__path__, "dispatcher."):
        if not found.name.startswith(_LEFT_OUT) and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in _LIBRARIES:
        importlib.import_module(name)
    # This finds the memory of the title, which needs the environment of the start. Storms find a worker by its title.
    setproctitle.getproctitle()


def _serve(requests: socket.socket) -> _Request | None:
    """Fork a process for each request. Returns the request in each of them, and None at the end."""
    reports: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its end is reported
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    message, fds, _flags, _address = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
                    if not message:
                        return None
                    stdout, stderr, report = fds
                    if not (pid := os.fork()):
                        return _Request(**orjson.loads(message), stdout=stdout, stderr=stderr)
                    os.write(report, _STATUS.pack(pid))
                    os.close(stdout)
                    os.close(stderr)
                    ended = os.pidfd_open(pid)
                    reports[ended] = pid, report
                    selector.register(ended, selectors.EVENT_READ)
                else:
                    selector.unregister(key.fd)
                    pid, report = reports.pop(key.fd)
                    status = os.waitpid(pid, 0)[1]
                    os.close(key.fd)
                    _tell(report, status)


def _tell(report: int, status: int) -> None:
    try:
        os.write(report, _STATUS.pack(status))
    except BrokenPipeError:
        pass  # the test does not ask for the exit code
    finally:
        os.close(report)


def _become(request: _Request) -> None:
    """Run the module as `python -m` would. The kernel kills it when the test process ends, also after Ctrl-C."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), request.stdout, request.stderr)):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(request.env)
    named: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin, sys.stdout = os.fdopen(0, **named), os.fdopen(1, "w", **named)
    sys.stderr = os.fdopen(2, "w", 1, **{**named, "errors": "backslashreplace"})
    module, *arguments = request.words
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    _preload()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        request = _serve(requests)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
