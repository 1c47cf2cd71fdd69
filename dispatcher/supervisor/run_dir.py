"""The run directory: whose it must be, and that one parent has it.

Its ledgers decide whether an email was sent. Who may write there, or put another folder in its place, decides that too.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from dispatcher.errors import ConfigurationError, DispatcherError


@dataclass(frozen=True, slots=True)
class Fault:
    """Why others could write the ledgers, or put theirs in the place of ours.

    Attributes:
        words: The rest of a sentence that begins with the folder.
        remedy: What to do about it.
    """

    words: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.words}. {self.remedy}"


def run_dir_fault(run_dir: Path) -> Fault | None:
    """What is wrong with the run directory; None where nobody but us and root can write there."""
    found = run_dir.stat(follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        return Fault("is a symbolic link, which may lead elsewhere later", "Name the folder that it leads to.")
    if found.st_uid not in (os.geteuid(), 0):
        return Fault(
            f"belongs to another user ({_name_of(found.st_uid)})", "Run as that user, or name a folder of your own."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "every user of this machine" if found.st_mode & stat.S_IWOTH else "its group"
        return Fault(f"may be written by {who}", f"Run: chmod 700 {run_dir}")
    for way in (run_dir, run_dir.resolve()):
        for folder in way.parents:
            if fault := _fault_above(folder, holds_it=folder == way.parent):
                return fault
    return None


def _fault_above(folder: Path, *, holds_it: bool) -> Fault | None:
    if folder.is_symlink() and folder.stat(follow_symlinks=False).st_uid not in (os.geteuid(), 0):
        return Fault(f"is reached by another user's symbolic link, {folder}", "Name the folder without that link.")
    mode = folder.stat().st_mode
    # Where the sticky bit is set, others cannot move what is there. But they can make what is not there yet.
    if mode & stat.S_IWOTH and (holds_it or not mode & stat.S_ISVTX):
        return Fault(f"is in {folder}, which every user of this machine may write", "Name a folder in another place.")
    return None


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def make_run_dir(run_dir: Path) -> None:
    """Makes the run directory, or makes sure of it.

    Raises:
        ConfigurationError: others may write into it.
        OSError: it cannot be made.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := run_dir_fault(run_dir):
        raise ConfigurationError([f"DISPATCHER_RUN_DIR: {run_dir} {fault}"])


def lock_run_dir(run_dir: Path) -> int:
    """Makes the run directory and locks it for this process's life; returns the lock's descriptor.

    Raises:
        DispatcherError: another `dispatcher run` holds it, it cannot be made, or others may write into it.
    """
    try:
        make_run_dir(run_dir)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(run_dir / "run.lock", flags, 0o600)
    except OSError as error:
        raise DispatcherError(
            f"The run directory {run_dir} cannot be used: {error.strerror}.",
            remedy="Set DISPATCHER_RUN_DIR to a folder that this user may write.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DispatcherError(
            f"Another `dispatcher run` uses the run directory {run_dir}.",
            remedy="Stop it, or give this one a DISPATCHER_RUN_DIR of its own.",
        ) from error
    return descriptor
