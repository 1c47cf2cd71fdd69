"""The files in which processes count: prometheus-client's memory-mapped files, one per kind of metric and slot.

prometheus-client names its files by process id and never deletes them. We name them by slot: the number of files does
not grow when workers die, and a counter continues where the previous process in its slot stopped. While a worker is
being replaced, two processes run in one slot. Each process therefore locks a name of its own (`w0-0`, or `w0-1` if
`w0-0` is taken, and so on), and the kernel releases the lock when the process exits. A gauge counts only while its
process has the lock.

Writing to a memory map on a full disk kills the process with SIGBUS. So the pages of a file are written before they are
mapped, even when the file grows. If anything fails here, the process stops counting and continues to send.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import struct
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.meters import Labels, Meter, SampleValue

FIRST_OCTETS: Final = 64 * 1024
"""The size of a new file. A full file doubles in size."""
PREFIXES: Final = ("counter", "histogram", "gauge_livesum")
_PREFIX_OF: Final = {prefix.partition("_")[0]: prefix for prefix in PREFIXES}
GENERATIONS: Final = 4
"""The most processes that may count in one slot at the same time."""
API: Final = "api"
"""The slot that all API processes of the host share. They have no common parent that could number them, and there may
be many."""
API_GENERATIONS: Final = 64
_OURS: Final = re.compile(
    rf"(?:(?P<prefix>{'|'.join(PREFIXES)})_)?(?P<name>(?:w\d+|relay|monitor|parent|api)-\d+)\.(?:db|lock|new)"
)
_BESIDE_KEY_OCTETS: Final = 28
"""The bytes that a value needs in addition to its key: 16 for the numbers, 12 for the key's length and alignment."""
_HEAD_OCTETS: Final = 8
_PREFIX: Final = "dispatcher_"
_MAX_KEYS: Final = 100_000
"""How many keys a process remembers. A host has a few hundred; the limit only bounds the memory."""
# struct flock on 64-bit Linux: type, whence, start, length, pid. The lock belongs to the open file, not to the process.
_FLOCK: Final = struct.Struct("hhqqi4x")
_WHOLE_FILE: Final = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class BadFile(Exception):
    """A metric file that is skipped: `empty`, `corrupt`, `foreign` or `unreadable`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def wipe(folder: Path) -> None:
    """Creates the folder and deletes the metric files of an earlier run; only the parent calls this. Files of other
    programs stay, and of API processes, because these run without the parent."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.iterdir():
            found = _OURS.fullmatch(path.name)
            if found and not found["name"].startswith(API):
                path.unlink(missing_ok=True)
    except OSError as error:
        get_log().warning("metrics.unwritable", folder=str(folder), reason=error.strerror)


def begin(folder: Path, slot: str) -> None:
    """Makes this process count from now on in the files of its slot: `w0`, …, `relay`, `monitor`, `parent` or `api`.
    Call this after the fork."""
    end()
    try:
        _open(folder, slot)
    except Exception as error:  # noqa: BLE001 - no error of the disk, the folder or the library may stop sending
        _give_up(folder, error)


def _give_up(folder: Path, error: Exception) -> None:
    end()
    words = error.strerror if isinstance(error, OSError) else type(error).__name__
    get_log().warning("metrics.unwritable", folder=str(folder), reason=words)


def end() -> None:
    """Stops counting. The files stay."""
    global _lock  # noqa: PLW0603 - a process counts in one set of files
    for meter in Meter.declared:
        meter.bind(None)
    if _lock is not None:
        with suppress(OSError):
            os.close(_lock)
        _lock = None


_lock: int | None = None
"""The open file descriptor with the lock on this process's name."""
_files: Final[list[MmapedDict]] = []
"""Every file that this process has opened. They stay open, because another thread may be writing."""
_writing: Final = Lock()
_key_text: Final = lru_cache(_MAX_KEYS)(mmap_key)
"""The text of a key. Forked processes find the keys of their parent in the cache."""


class Key(NamedTuple):
    """The sample that a value belongs to. `bound` is the upper bound of a histogram's bucket, otherwise empty."""

    metric: str
    sample: str
    labels: tuple[tuple[str, str], ...]
    bound: str
    about: str


def read(path: Path) -> list[tuple[str, float]]:
    """The values in a file, each with its key as text, in the order of their creation. `key_of` accepts all the keys.
    Raises BadFile, or FileNotFoundError if a new parent has deleted the file."""
    ours = _OURS.fullmatch(path.name)
    if ours is None or path.suffix != ".db":
        raise BadFile("foreign")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            used = int.from_bytes(file.read(4), sys.byteorder, signed=True)
        # Check the length here, because prometheus-client treats a file with a negative length as empty.
        stored = MmapedDict.read_all_values_from_file(str(path)) if 0 < used <= size else ()
        found = [(key, value) for key, value, _, _ in stored]
        for key, _ in found:
            key_of(kind_of(path), key)
    except (FileNotFoundError, BadFile):
        raise
    except OSError as error:
        raise BadFile("unreadable") from error
    except Exception as error:  # the library raises many types
        raise BadFile("corrupt") from error
    if not 0 <= used <= size or size < _HEAD_OCTETS:
        raise BadFile("empty" if size < _HEAD_OCTETS else "corrupt")
    if not all(0 <= value < math.inf for _, value in found):
        raise BadFile("corrupt")
    return found


def kind_of(path: Path) -> str:
    """The kind of the metrics in a file: `counter`, `gauge` or `histogram`."""
    return path.name.partition("_")[0]


@lru_cache(maxsize=_MAX_KEYS)
def key_of(kind: str, text: str) -> Key:
    """Parses the text of a key. Raises BadFile if the key does not match the declaration of its metric. A metric that
    is not declared only needs our prefix: it might belong to a provider that this process has not loaded."""
    metric, sample, labels, about = json.loads(text)
    names, are_texts = set(labels), all(isinstance(value, str) for value in (sample, about, *labels.values()))
    meter = next((each for each in Meter.declared if each.name == metric), None)
    if meter is None:
        is_ours = metric.startswith(_PREFIX)
    else:
        is_ours = meter.kind == kind and names == set(meter.samples.get(sample, (None,)))
    if not (is_ours and are_texts):
        raise BadFile("foreign")
    bound = labels.pop("le", "") if kind == "histogram" else ""
    float(bound or 0)
    return Key(metric, sample, tuple(labels.items()), bound, about)


def is_current(path: Path) -> bool:
    """Whether a file's values count. Counters and histograms always count; gauges only while their process runs, which
    holds its lock."""
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


def _open(folder: Path, slot: str) -> None:
    global _lock
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name, _lock = _take_name(folder, slot)
    files, rooms = {}, dict.fromkeys(PREFIXES, 0)
    for prefix in PREFIXES:
        path = folder / f"{prefix}_{name}.db"
        _prepare(path, keep=not prefix.startswith("gauge"))
        files[prefix] = MmapedDict(str(path))
    _files.extend(files.values())

    def make_value(meter: Meter, sample: str, names: Labels, values: Labels) -> SampleValue:
        prefix = _PREFIX_OF[meter.kind]
        key = _key_text(meter.name, sample, names, values, meter.about)
        octets = len(key.encode()) + _BESIDE_KEY_OCTETS
        with _writing:
            try:
                if rooms[prefix] < octets:
                    rooms[prefix] = _make_room(folder / f"{prefix}_{name}.db", octets)
            except OSError as error:
                _give_up(folder, error)
                return _NullValue()
            rooms[prefix] -= octets
            return _Value(files[prefix], key)

    for meter in Meter.declared:
        meter.bind(make_value)


class _Value:
    """As prometheus-client's `MmapedValue`, whose creation takes ten times as long, most of a process's start."""

    def __init__(self, file: MmapedDict, key: str) -> None:
        self._file = file
        self._key = key
        self._value, _ = file.read_value(key)

    def inc(self, amount: float) -> None:
        with _writing:
            self._value += amount
            self._file.write_value(self._key, self._value, 0.0)

    def set(self, value: float) -> None:
        with _writing:
            self._value = value
            self._file.write_value(self._key, value, 0.0)


class _NullValue:
    """Replaces the value of a sample that cannot be stored, because its file cannot grow."""

    def inc(self, amount: float) -> None: ...

    def set(self, value: float) -> None: ...


def _take_name(folder: Path, slot: str) -> tuple[str, int]:
    """A name that no other process in the slot uses, and the file descriptor whose lock reserves the name."""
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
    raise OSError(None, "too many processes use the same slot")


def _prepare(path: Path, *, keep: bool) -> None:
    """Makes sure that the file exists, is valid, and has all its pages on disk. If `keep`, keeps valid values."""
    with suppress(BadFile, OSError):
        if keep and not path.is_symlink():
            read(path)
            return
    fresh = path.with_suffix(".new")
    try:
        # Write the pages, because some file systems reserve no disk space for pages that are only allocated.
        fresh.write_bytes(bytes(FIRST_OCTETS))
        fresh.chmod(0o600)
        # A scrape sees either the complete new file or the previous file.
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def _make_room(path: Path, octets: int) -> int:
    """Doubles the file if `octets` do not fit; returns how many fit. prometheus-client would not write the new pages:
    on a full disk, a later write to one would kill the process."""
    try:
        with path.open("r+b") as file:
            used = int.from_bytes(file.read(4), sys.byteorder)
            size = file.seek(0, os.SEEK_END)
            if used + octets > size:
                size += file.write(bytes(size))
            return size - used
    except FileNotFoundError:
        return octets  # a deleted file needs no room: no scrape reads it
