"""The folder of things fetched once: server binaries and pip's downloads."""

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
    """Where fetched things are kept; the only place outside the checkout that we write to."""
    if named := os.environ.get("DISPATCHER_CACHE_DIR"):
        return Path(named).absolute()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named).absolute() / "email-dispatcher"
    return Path.home() / ".cache" / "email-dispatcher"


def obtain(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder of this name, built first if it is not there.

    An interrupted build leaves nothing that a later run would take for whole; of two runs at once one builds and the
    other waits. The folder given to `build` is renamed afterwards: what must know its final path asks `place(name)`.
    """
    final = place(name)
    if final.is_dir():
        return final
    make_writable(final.parent, "Name another cache folder in DISPATCHER_CACHE_DIR.")
    with locked(final.with_name(f".{name}.lock")):
        if final.is_dir():
            return final
        _sweep(name)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=final.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def place(name: str) -> Path:
    """Where the cached folder of this name is or will be."""
    return folder() / name


def make_writable(folder: Path, remedy: str) -> None:
    """Make the folder if need be.

    Raises:
        ServerUnavailable: We may not write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServerUnavailable(f"cannot make the folder {folder}: {error.strerror}.", remedy=remedy) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServerUnavailable(f"cannot write to the folder {folder}.", remedy=remedy)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when we die; waits for whoever holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(name: str) -> None:
    """Remove what interrupted builds left; the caller holds the lock, so none of it is in use."""
    for leftover in folder().glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
