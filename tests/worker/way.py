"""The files of the package that something enters, in order."""

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
"""Up to this octet of its code, a coroutine begins; later, it goes on, which is no new stay."""


@contextmanager
def way() -> Iterator[list[str]]:
    """Collects each stay in a file: as often as the way enters it from another file of the package."""
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
    """The files, each where the way enters it first."""
    return [file for file in dict.fromkeys(stays) if file.startswith(folder)]
