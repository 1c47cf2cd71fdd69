"""Runs a worker, relay or monitor (a role) in a forked process, which ends when its parent dies."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from setproctitle import setproctitle

from dispatcher.errors import ConfigurationError, DispatcherError
from dispatcher.host.process_table import ChildContext
from dispatcher.telemetry import metric_files

_PR_SET_PDEATHSIG: Final = 1
_FAILED: Final = 1

_MISCONFIGURED: Final = 78

Entry = Callable[[ChildContext], int]
"""The main function of a role: takes the process's context, returns the exit code."""


def run_child(title: str, entry: Entry, context: ChildContext, parent: int) -> NoReturn:
    """Runs the main function of a role in a process that was just forked, and exits with its result."""
    code = _FAILED
    try:
        _follow_parent(parent)
        _reset_signals()
        # Stop counting in the inherited metrics files, because they belong to the parent.
        metric_files.end()
        # The parent sends SIGABRT to a process whose loop hangs. faulthandler then prints the traceback. It also prints
        # the traceback if a library crashes.
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(sys.stderr)
        setproctitle(f"dispatcher: {title}")
        code = entry(context)
        if code:
            context.process_slot.note_reason(f"exit {code}.")
    except BaseException as error:  # noqa: BLE001 - the process must exit here, and not continue the parent's code
        code = _MISCONFIGURED if isinstance(error, ConfigurationError) else _FAILED
        context.process_slot.note_reason(_public_reason(error))
        with suppress(OSError):
            _print(title, error, is_up=context.process_slot.is_up)
    finally:
        # Exit even if a stream cannot be flushed, because the disk is full or the stream's reader has closed it.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _print(title: str, error: BaseException, *, is_up: bool) -> None:
    """Prints an error, without the traceback if an operator can probably fix the cause."""
    if isinstance(error, ConfigurationError):
        print(*(f"{title}: {mistake}" for mistake in error.mistakes), sep="\n", file=sys.stderr)
    elif isinstance(error, DispatcherError | OSError) and not is_up:
        print(f"{title}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _public_reason(error: BaseException) -> str:
    """Why a process ends, as a text for public pages: without hosts, users, paths or other values."""
    for each in (error, error.__cause__):
        if isinstance(each, DispatcherError) and each.public:
            return each.public
    if isinstance(error, DispatcherError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}. The log has details."
    return f"{type(error).__name__}. The log has details."


def _follow_parent(parent: int) -> None:
    """Makes the kernel end this process with its parent: by SIGTERM, so that it still waits for the answers to
    in-flight emails."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_FAILED)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # A terminal sends these signals to its whole process group: on Ctrl-C, when the terminal closes, or when a process
    # in the background uses the terminal. Ignore them here, because only the parent must react to them. When the parent
    # drains or dies, this process drains.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
