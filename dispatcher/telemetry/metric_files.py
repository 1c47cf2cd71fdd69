"""Where processes count: prometheus-client's memory-mapped files, one per kind and slot, in one folder per host.

The library names its files by process id and keeps them for ever; ours are named by slot, so that they stay as many as
there are slots however often workers die, and a counter goes on where the last process of its slot left it. Two
processes of one slot may live for a moment, when a worker is replaced: each holds a lock on its name (`w0-0`, else
`w0-1`, …), which the kernel frees when it ends. A gauge counts only while that lock is held.

A memory map over a full disk kills its process with SIGBUS. So each file gets all its pages before it is mapped, and
never grows. Whatever goes wrong here ends in a process that does not count, and never in one that does not send.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.meters import Cell, Meter
from dispatcher.telemetry.metric_reading import BadFile, read
from dispatcher.telemetry.metrics import METERS

FILE_OCTETS: Final = 256 * 1024
"""More than all combinations of labels take; a test says so."""
PREFIXES: Final = ("counter", "histogram", "gauge_livesum")
GENERATIONS: Final = 4
"""Processes of one slot that may live at once; more do not count."""
API: Final = "api"
"""The slot of all the host's API processes, which are nobody's children and may be many."""
API_GENERATIONS: Final = 64
_OURS: Final = re.compile(
    rf"(?:(?P<prefix>{'|'.join(PREFIXES)})_)?(?P<name>(?:w\d+|relay|monitor|parent|api)-\d+)\.(?:db|lock|new)"
)
_FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
# struct flock on 64-bit Linux: type, whence, start, length, pid. A lock of the open file, not of the process.
_FLOCK: Final = struct.Struct("hhqqi4x")
_WHOLE_FILE: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class MetricFile:
    """A file of ours.

    Attributes:
        prefix: Its kind: one of `PREFIXES`.
        name: The slot and generation of the process that writes it.
    """

    path: Path
    prefix: str
    name: str

    @classmethod
    def of(cls, path: Path) -> MetricFile | None:
        """What the file is by its name; None if it is not ours."""
        found = _OURS.fullmatch(path.name)
        return cls(path, found["prefix"], found["name"]) if found and found["prefix"] and path.suffix == ".db" else None


def wipe(folder: Path) -> None:
    """Makes the folder, and removes what an earlier run counted; other people's files stay. For the parent alone.

    So do the files of API processes, which live and count without it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.iterdir():
            found = _OURS.fullmatch(path.name)
            if found and not found["name"].startswith(API):
                path.unlink(missing_ok=True)
    except OSError as error:
        get_log().warning("metrics.unwritable", folder=str(folder), reason=error.strerror)


def begin(folder: Path, slot: str) -> None:
    """Counts in this slot's files from now on; call it in the process that counts, after the fork.

    Args:
        slot: `w0`, `w1`, …, `relay`, `monitor`, `parent` or `api`.
    """
    end()
    try:
        _open(folder, slot)
    except Exception as error:  # noqa: BLE001 - whatever the disk, the folder or the library has: sending goes on
        end()
        words = error.strerror if isinstance(error, OSError) else type(error).__name__
        get_log().warning("metrics.unwritable", folder=str(folder), reason=words)


def end() -> None:
    """Counts nowhere from now on; what was counted stays in the files."""
    global _lock  # noqa: PLW0603 - a process counts in one place
    for meter in METERS:
        meter.bind(None)
    if _lock is not None:
        with suppress(OSError):
            os.close(_lock)
        _lock = None


_lock: int | None = None
"""The descriptor that holds the lock on this process's name."""


def is_alive(folder: Path, name: str) -> bool:
    """Whether the process that counts under this name still lives. Takes no lock, so it gets in nobody's way."""
    try:
        descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(kind != fcntl.F_UNLCK)


def _open(folder: Path, slot: str) -> None:
    global _lock
    from prometheus_client.values import MultiProcessValue

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name, _lock = _take_name(folder, slot)
    for prefix in PREFIXES:
        _prepare(folder / f"{prefix}_{name}.db", keep=not prefix.startswith("gauge"))
    # The library reads it whenever it opens a file.
    os.environ[_FOLDER_VARIABLE] = str(folder)
    value = MultiProcessValue(process_identifier=lambda: name)

    def make_cell(meter: Meter, sample: str, names: Sequence[str], values: Sequence[str]) -> Cell:
        cell: Cell = value(
            meter.kind, meter.name, sample, tuple(names), tuple(values), meter.about, multiprocess_mode=meter.mode
        )
        return cell

    for meter in METERS:
        meter.bind(make_cell)


def _take_name(folder: Path, slot: str) -> tuple[str, int]:
    """A name of the slot that no living process has, and the descriptor that locks it."""
    for generation in range(API_GENERATIONS if slot == API else GENERATIONS):
        name = f"{slot}-{generation}"
        descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return name, descriptor
    raise OSError(None, "too many processes of one slot")


def _prepare(path: Path, *, keep: bool) -> None:
    """Makes sure that the file exists, can be read, and has all its pages.

    Args:
        keep: Go on with what it holds, where that can be read.
    """
    if keep and _is_sound(path, path.name.partition("_")[0]):
        return
    fresh = path.with_suffix(".new")
    try:
        # Written, and not only allocated: not every file system keeps its word about the latter.
        fresh.write_bytes(bytes(FILE_OCTETS))
        fresh.chmod(0o600)
        # A scrape sees a whole file, or the one before.
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def _is_sound(path: Path, kind: str) -> bool:
    try:
        read(path, kind)
        return path.stat().st_size == FILE_OCTETS and not path.is_symlink()
    except (BadFile, OSError):
        return False
