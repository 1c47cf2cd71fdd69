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
    """The cache folder: DISPATCHER_CACHE_DIR, or `email-dispatcher` in XDG_CACHE_HOME or `~/.cache`."""
    if named := os.environ.get("DISPATCHER_CACHE_DIR"):
        return Path(named).absolute()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named).absolute() / "email-dispatcher"
    return Path.home() / ".cache" / "email-dispatcher"


def obtain(name: str, build: Callable[[Path], None]) -> Path:
    """The folder with this name in the cache. If it does not exist, `build` fills an empty folder, which is then
    renamed: an interrupted build leaves no folder with this name. Another process that calls this waits for the
    build."""
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
    """Creates the folder if it does not exist. Raises ServerUnavailable, with the remedy, unless this user can write to
    it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServerUnavailable(f"cannot create the folder {folder}: {error.strerror}.", remedy=remedy) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServerUnavailable(f"cannot write to the folder {folder}.", remedy=remedy)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps an exclusive lock on a file until the `with` block ends; the kernel releases it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(name: str) -> None:
    """Removes the folders of interrupted builds. The caller has the lock, so no running build uses these folders."""
    for leftover in folder().glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
