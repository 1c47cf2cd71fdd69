"""Traces the files of the package whose functions are called, in order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import dispatcher

ROOT: Final = Path(dispatcher.__file__).parent
FIRST_OF_COROUTINE: Final = 16
"""A call beyond this byte-code offset resumes a coroutine, and is not counted as a new call."""


@contextmanager
def way() -> Iterator[list[str]]:
    """Collects a file each time it is entered from another file of the package."""
    stays: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        is_resumed = frame.f_lasti > FIRST_OF_COROUTINE
        if event == "call" and name.startswith(str(ROOT)) and not is_resumed:
            file = str(Path(name).relative_to(ROOT))
            if not stays or stays[-1] != file:
                stays.append(file)

    sys.setprofile(note)
    try:
        yield stays
    finally:
        sys.setprofile(None)


def in_order(stays: list[str], folder: str = "") -> list[str]:
    """The files in the order in which they are first entered."""
    return [file for file in dict.fromkeys(stays) if file.startswith(folder)]
