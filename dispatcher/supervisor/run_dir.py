"""The run directory: checks who can write to it, and locks it for one parent.

The ledgers in this directory decide whether an email counts as sent. So any user who can write to the directory, or
replace it, can change this decision.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
from pathlib import Path

from dispatcher.domain.values import dataclass
from dispatcher.errors import ConfigurationError, DispatcherError


@dataclass(frozen=True, slots=True)
class RunDirFault:
    """Why other users could write or replace the ledgers: words to put after the directory's path, and a remedy."""

    words: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.words}. {self.remedy}"


def run_dir_fault(run_dir: Path) -> RunDirFault | None:
    """Why other users could write to the run directory; None if only this user and root can."""
    found = run_dir.stat(follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        return RunDirFault("is a symbolic link, whose target could change", "Set the folder that the link points to.")
    if found.st_uid not in (os.geteuid(), 0):
        return RunDirFault(
            f"belongs to another user ({_name_of(found.st_uid)})", "Run as that user, or set a folder of your own."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "every user of this host" if found.st_mode & stat.S_IWOTH else "its group"
        return RunDirFault(f"is writable by {who}", f"Run: chmod 700 {run_dir}")
    for path in (run_dir, run_dir.resolve()):
        for folder in path.parents:
            if fault := _fault_above(folder, holds_it=folder == path.parent):
                return fault
    return None


def _fault_above(folder: Path, *, holds_it: bool) -> RunDirFault | None:
    if folder.is_symlink() and folder.stat(follow_symlinks=False).st_uid not in (os.geteuid(), 0):
        return RunDirFault(f"is reached by another user's symbolic link, {folder}", "Set a path without that link.")
    mode = folder.stat().st_mode
    # In a folder that every user may write to, other users can create a missing entry. The sticky bit only keeps them
    # from renaming an existing entry.
    if mode & stat.S_IWOTH and (holds_it or not mode & stat.S_ISVTX):
        return RunDirFault(f"is in {folder}, which every user of this host may write to", "Set a folder elsewhere.")
    return None


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def make_run_dir(run_dir: Path) -> None:
    """Creates the run directory if it does not exist. Raises ConfigurationError if other users can write to it."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := run_dir_fault(run_dir):
        raise ConfigurationError([f"DISPATCHER_RUN_DIR: {run_dir} {fault}"])


def lock_run_dir(run_dir: Path) -> int:
    """Creates the run directory, and locks it while this process runs; returns the lock's file descriptor. Raises
    DispatcherError."""
    try:
        make_run_dir(run_dir)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(run_dir / "run.lock", flags, 0o600)
    except OSError as error:
        raise DispatcherError(
            f"The run directory {run_dir} cannot be used: {error.strerror}.",
            remedy="Set DISPATCHER_RUN_DIR to a folder that this user may write to.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DispatcherError(
            f"Another `dispatcher run` uses the run directory {run_dir}.",
            remedy="Stop that process, or set DISPATCHER_RUN_DIR to a different directory.",
        ) from error
    return descriptor
