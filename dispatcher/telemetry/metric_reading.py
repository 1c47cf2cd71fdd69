"""What a metric file holds, or why it cannot be believed: only samples of ours with the labels that we declared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from dispatcher.telemetry.meters import Labels, Meter
from dispatcher.telemetry.metrics import METERS

_METER_OF: Final = {(meter.name, sample): meter for meter in METERS for sample in meter.samples}
_HEAD_OCTETS: Final = 8


class BadFile(Exception):
    """A file whose numbers are left out.

    Attributes:
        reason: `empty`, `corrupt`, `foreign` or `unreadable`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Key(NamedTuple):
    """Which number it is: a sample of a meter, with the values of the sample's labels in their declared order."""

    meter: Meter
    sample: str
    values: Labels


def read(path: Path, kind: str) -> list[tuple[Key, float]]:
    """Every number in a file.

    Args:
        kind: The meters' that the file may hold.

    Raises:
        BadFile: nothing in it counts.
        FileNotFoundError: it went away, as files of ended processes do.
    """
    try:
        if path.stat().st_size < _HEAD_OCTETS:
            raise BadFile("empty")
        return list(_entries(path, kind))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadFile("unreadable") from error


def _entries(path: Path, kind: str) -> Iterator[tuple[Key, float]]:
    from prometheus_client.mmap_dict import MmapedDict

    try:
        entries = [(text, value) for text, value, *_ in MmapedDict.read_all_values_from_file(str(path))]
    except OSError:
        raise
    except Exception as error:  # the library says it in many ways
        raise BadFile("corrupt") from error
    for text, value in entries:
        key = _parse(text)
        if key is None or key.meter.kind != kind:
            raise BadFile("foreign")
        if not math.isfinite(value) or value < 0:
            raise BadFile("corrupt")
        yield key, value


@lru_cache(maxsize=8192)
def _parse(text: str) -> Key | None:
    """The key in the library's words; None if it is not ours. Cached: all slots and scrapes have the same ones."""
    try:
        name, sample, labels, _ = json.loads(text)
        meter = _METER_OF[name, sample]
        names = meter.samples[sample]
        if set(labels) != set(names) or not all(isinstance(value, str) for value in labels.values()):
            return None
        return Key(meter, sample, tuple(labels[each] for each in names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
