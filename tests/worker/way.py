"""Records the files of the package whose functions are called, in order."""

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
"""A call event beyond this byte-code offset resumes a coroutine. It does not count as a new call."""


@contextmanager
def way() -> Iterator[list[str]]:
    """Collects the files during the block. A file is added each time a different file of the package calls one of its
    functions."""
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
    """The files in the order of their first call."""
    return [file for file in dict.fromkeys(stays) if file.startswith(folder)]
