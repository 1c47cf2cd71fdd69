"""Where processes count: prometheus-client's memory-mapped files, one per kind and slot, in one folder per host.

The library names its files by process id and keeps them for ever; ours are named by slot, so that they stay as many as
there are slots however often workers die, and a counter goes on where the last process of its slot left it. Two
processes of one slot may live for a moment, when a worker is replaced: each holds a lock on its name (`w0-0`, else
`w0-1`, …), which the kernel frees when it ends. A gauge counts only while that lock is held.

A memory map over a full disk kills its process with SIGBUS. So the pages of a file are written before they are mapped,
also where it grows. Whatever goes wrong here ends in a process that does not count, never in one that does not send.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.meters import Cell, Meter

if TYPE_CHECKING:
    from prometheus_client import Metric

FIRST_OCTETS: Final = 64 * 1024
"""Of a new file; it doubles as it fills."""
PREFIXES: Final = ("counter", "histogram", "gauge_livesum")
GENERATIONS: Final = 4
"""Processes of one slot that may live at once; more do not count."""
API: Final = "api"
"""The slot of all the host's API processes, which are nobody's children and may be many."""
API_GENERATIONS: Final = 64
_OURS: Final = re.compile(
    rf"(?:(?P<prefix>{'|'.join(PREFIXES)})_)?(?P<name>(?:w\d+|relay|monitor|parent|api)-\d+)\.(?:db|lock|new)"
)
_BESIDE_KEY_OCTETS: Final = 28
"""A number's own 16, the length of its key, and what aligns them."""
_HEAD_OCTETS: Final = 8
_PREFIX: Final = "dispatcher_"
_FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
# struct flock on 64-bit Linux: type, whence, start, length, pid. A lock of the open file, not of the process.
_FLOCK: Final = struct.Struct("hhqqi4x")
_WHOLE_FILE: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class BadFile(Exception):
    """A file whose numbers are left out.

    Attributes:
        reason: `empty`, `corrupt`, `foreign` or `unreadable`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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
        _give_up(folder, error)


def _give_up(folder: Path, error: Exception) -> None:
    end()
    words = error.strerror if isinstance(error, OSError) else type(error).__name__
    get_log().warning("metrics.unwritable", folder=str(folder), reason=words)


def end() -> None:
    """Counts nowhere from now on; what was counted stays in the files."""
    global _lock  # noqa: PLW0603 - a process counts in one place
    for meter in Meter.declared:
        meter.bind(None)
    if _lock is not None:
        with suppress(OSError):
            os.close(_lock)
        _lock = None


_lock: int | None = None
"""The descriptor that holds the lock on this process's name."""


def read(path: Path) -> list[Metric]:
    """What a file holds: only numbers of ours, with the labels that we declare. Histograms are not accumulated yet.

    Raises:
        BadFile: nothing in it counts.
        FileNotFoundError: it went away, as files of ended processes do.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    ours = _OURS.fullmatch(path.name)
    if ours is None or path.suffix != ".db":
        raise BadFile("foreign")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            used = int.from_bytes(file.read(4), sys.byteorder, signed=True)
        # The library takes a length below zero for an empty file.
        found = list(MultiProcessCollector.merge([str(path)], accumulate=False)) if 0 < used <= size else []
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadFile("unreadable") from error
    except Exception as error:  # the library says it in many ways
        raise BadFile("corrupt") from error
    if not 0 <= used <= size or size < _HEAD_OCTETS:
        raise BadFile("empty" if size < _HEAD_OCTETS else "corrupt")
    for metric in found:
        if not _is_ours(metric):
            raise BadFile("foreign")
        if not all(math.isfinite(sample.value) and sample.value >= 0 for sample in metric.samples):
            raise BadFile("corrupt")
    return found


def counts(path: Path) -> bool:
    """Whether a file's numbers are still true: those of a gauge only while its process lives. Takes no lock."""
    ours = _OURS.fullmatch(path.name)
    if ours is None or ours["prefix"] != PREFIXES[-1]:
        return True
    try:
        descriptor = os.open(path.with_name(f"{ours['name']}.lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(kind != fcntl.F_UNLCK)


def _is_ours(metric: Metric) -> bool:
    """Whether it is as we declare it, or may be a provider's that this process has not loaded."""
    meter = next((each for each in Meter.declared if each.name == metric.name), None)
    if meter is None:
        return metric.name.startswith(_PREFIX)
    return meter.kind == metric.type and all(
        set(sample.labels) == set(meter.samples.get(sample.name, (None,)))
        and all(isinstance(value, str) for value in sample.labels.values())
        for sample in metric.samples
    )


def _open(folder: Path, slot: str) -> None:
    global _lock
    from prometheus_client.mmap_dict import mmap_key
    from prometheus_client.values import MultiProcessValue

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name, _lock = _take_name(folder, slot)
    for prefix in PREFIXES:
        _prepare(folder / f"{prefix}_{name}.db", keep=not prefix.startswith("gauge"))
    # The library reads it whenever it opens a file.
    os.environ[_FOLDER_VARIABLE] = str(folder)
    value = MultiProcessValue(process_identifier=lambda: name)

    def make_cell(meter: Meter, sample: str, names: Sequence[str], values: Sequence[str]) -> Cell:
        mode = "livesum" if meter.kind == "gauge" else ""
        path = folder / f"{meter.kind}{mode and f'_{mode}'}_{name}.db"
        key = mmap_key(meter.name, sample, list(names), list(values), meter.about)
        try:
            _make_room(path, len(key.encode()) + _BESIDE_KEY_OCTETS)
        except OSError as error:
            _give_up(folder, error)
            return _Nowhere()
        cell: Cell = value(
            meter.kind, meter.name, sample, tuple(names), tuple(values), meter.about, multiprocess_mode=mode
        )
        return cell

    for meter in Meter.declared:
        meter.bind(make_cell)


class _Nowhere:
    """The cell of a number that has no place."""

    def inc(self, amount: float) -> None:
        """Counts nothing."""

    def set(self, value: float) -> None:
        """Keeps nothing."""


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
    with suppress(BadFile, OSError):
        if keep and not path.is_symlink():
            read(path)
            return
    fresh = path.with_suffix(".new")
    try:
        # Written, and not only allocated: not every file system keeps its word about the latter.
        fresh.write_bytes(bytes(FIRST_OCTETS))
        fresh.chmod(0o600)
        # A scrape sees a whole file, or the one before.
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def _make_room(path: Path, octets: int) -> None:
    """Doubles a file into which so many octets more do not fit; the library would stretch it, and write no page."""
    with suppress(FileNotFoundError), path.open("r+b") as file:  # removed: nobody reads it any more
        used = int.from_bytes(file.read(4), sys.byteorder)
        size = file.seek(0, os.SEEK_END)
        if used + octets > size:
            file.write(bytes(size))
