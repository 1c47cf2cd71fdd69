"""The folder of a demo: one demo at a time, cleared by the next, small at the end.

demo.lock     held while a demo runs; marks the folder as one that the next demo may clear
log/          a log per process
run/          the run directory of `dispatcher run`, with the in-flight ledgers
smtp/         the SMTP server's ledger, and `mail/` with an .eml for each email that it accepted
servers/      private servers, while the demo runs
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dispatcher.dev import servers
from dispatcher.dev.processes import Processes
from dispatcher.errors import DispatcherError

_LOCK: Final = "demo.lock"
_REMEDY: Final = "Name another folder with --folder."


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """A folder that is empty but for the lock; at the end, without what only the servers need.

    Raises:
        DispatcherError: another demo is there, or files that no demo made.
    """
    if folder.exists() and not (folder / _LOCK).exists() and any(folder.iterdir()):
        raise DispatcherError(f"{folder} holds files that no demo made.", remedy=_REMEDY)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DispatcherError(f"Another demo runs in {folder}.", remedy=_REMEDY) from error
        _clear(folder)
        try:
            yield
        finally:
            _keep_logs(folder)


def _clear(folder: Path) -> None:
    """Removes what an earlier demo left; its last processes too, should it have been killed a moment ago."""
    Processes(folder).stop()
    servers.stop(folder / "servers")
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _keep_logs(folder: Path) -> None:
    """Moves the private servers' logs to the others, and removes their data."""
    (folder / "log").mkdir(exist_ok=True)
    for name in ("postgres.log", "rabbitmq.log"):
        if (log := folder / "servers" / "log" / name).exists():
            log.replace(folder / "log" / name)
    for leftover in ("servers", "plan"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
