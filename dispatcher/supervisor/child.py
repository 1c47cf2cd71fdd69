"""What a forked process does before it becomes a worker or the relay: it ties its life to its parent's."""

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
"""A role's main: takes its context, returns the exit code."""


def become(title: str, entry: Entry, context: ChildContext, parent: int) -> NoReturn:
    """Runs a role in a process that was just forked, and ends it."""
    code = _FAILED
    try:
        _tie_to(parent)
        _forget_handlers()
        # What the parent counts in is the parent's.
        metric_files.end()
        # Where the loop stands still the parent sends SIGABRT: then, and where a library crashes, this says where.
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(sys.stderr)
        setproctitle(f"dispatcher: {title}")
        code = entry(context)
        if code:
            context.process_slot.note_reason(f"exit {code}.")
    except BaseException as error:  # noqa: BLE001 - the edge of a process: it must never run on into the parent's code
        code = _MISCONFIGURED if isinstance(error, ConfigurationError) else _FAILED
        context.process_slot.note_reason(_public_words(error))
        with suppress(OSError):
            _print(title, error, is_up=context.process_slot.is_up)
    finally:
        # Even where the disk is full, or nobody reads our words any more.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _print(title: str, error: BaseException, *, is_up: bool) -> None:
    """Prints an error that an operator can mend as text, and any other with its traceback: it is a bug of ours."""
    if isinstance(error, ConfigurationError):
        print(*(f"{title}: {mistake}" for mistake in error.mistakes), sep="\n", file=sys.stderr)
    elif isinstance(error, DispatcherError | OSError) and not is_up:
        print(f"{title}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _public_words(error: BaseException) -> str:
    """Why a process ends, in words for the public: without host, user, path or other value."""
    for each in (error, error.__cause__):
        if isinstance(each, DispatcherError) and each.public:
            return each.public
    if isinstance(error, DispatcherError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}. The log has details."
    return f"{type(error).__name__}. The log has details."


def _tie_to(parent: int) -> None:
    """The kernel sends SIGTERM when the parent dies; a parent that died before the call is noticed by its id.

    SIGTERM and not SIGKILL: what is on the wire then ends with an answer, and nothing new is begun.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_FAILED)


def _forget_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # A terminal sends these to its whole group, for Ctrl-C and when it closes. The parent alone answers them: by a
    # drain, or by its own end, which is a drain for us as well.
    # Likewise what it sends to whoever reads or writes in its background: to the parent it means something else.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
