"""The cache folder for downloads: server programs and pip's packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dispatcher.errors import ServerUnavailable


def folder() -> Path:
    """The cache folder: DISPATCHER_CACHE_DIR if it is set. Otherwise, `email-dispatcher` in XDG_CACHE_HOME; or in
    `~/.cache` if XDG_CACHE_HOME is not set."""
    if named := os.environ.get("DISPATCHER_CACHE_DIR"):
        return Path(named).absolute()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named).absolute() / "email-dispatcher"
    return Path.home() / ".cache" / "email-dispatcher"


def obtain(name: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder with this name in the cache. If it does not exist, calls `build` first.

    An interrupted build leaves no folder with this name. If two processes call this at the same time, the second one
    waits until the first one has built the folder.

    Args:
        build: Fills the empty folder that it gets. Afterwards, this function renames the folder to `path_of(name)`.
    """
    final = path_of(name)
    if final.is_dir():
        return final
    make_writable(final.parent, "Set DISPATCHER_CACHE_DIR to a different folder.")
    with locked(final.with_name(f".{name}.lock")):
        if final.is_dir():
            return final
        _remove_leftovers(name)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=final.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def path_of(name: str) -> Path:
    """The path of a cached folder. The folder might not exist yet."""
    return folder() / name


def make_writable(folder: Path, remedy: str) -> None:
    """Creates the folder if it does not exist, and checks that this user can write to it.

    Args:
        remedy: What the user can do about the error, such as `Set DISPATCHER_CACHE_DIR to a different folder.`

    Raises:
        ServerUnavailable: This user cannot create the folder, or cannot write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServerUnavailable(f"cannot create the folder {folder}: {error.strerror}.", remedy=remedy) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServerUnavailable(f"cannot write to the folder {folder}.", remedy=remedy)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for an exclusive lock on a file, and keeps the lock until the `with` block ends.

    The kernel releases the lock if this process dies.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(name: str) -> None:
    """Removes the folders of interrupted builds. The caller has the lock, so no running build uses these folders."""
    for leftover in folder().glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
