"""callgrind's command line, and the totals in its files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

_TOTAL: Final = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


class NotCounted(RuntimeError):
    """A count failed; the message says why."""


def callgrind(folder: Path, name: str, mark: str) -> list[str]:
    """The words before a command whose instructions are counted.

    Whenever a process calls the function `mark`, its count since the last call is written to the next file
    `folder/name.PID.NUMBER`. At its exit, its last count is written to `folder/name.PID`.
    """
    files = [f"--callgrind-out-file={folder / name}.%p", f"--log-file={folder / name}.log.%p"]
    program = shutil.which("valgrind")
    assert program is not None
    return [program, "--tool=callgrind", f"--dump-before={mark}", *files]


def total_of(path: Path) -> int:
    """The instructions that one of callgrind's files counts. Raises NotCounted if the file contains no total."""
    found = _TOTAL.search(path.read_text(errors="replace")) if path.exists() else None
    if found is None:
        raise NotCounted(f"callgrind wrote no total to {path.name}")
    return int(found[1])


def python_of(tree: Path) -> Path:
    """The Python of a checkout."""
    return tree.resolve() / ".venv" / "bin" / "python"
