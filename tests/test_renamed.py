"""No name that CHANGELOG.md lists as renamed is left in code, SQL, `deploy/`, documentation or benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SEARCHED = (
    "dispatcher", "sql/queries", "deploy", "docs", "benchmarks", "examples", "README.md", "ARCHITECTURE.md",
    "CONTRIBUTING.md",
)  # fmt: skip
HISTORY = (ROOT / "docs" / "decisions", ROOT / "benchmarks" / "results")
ENDINGS = {".py", ".sql", ".md", ".env", ".yml", ".json", ".conf", ".service", ".sh"}


def renames() -> list[tuple[str, str]]:
    """The old and new names in the table below "### Renamed" in CHANGELOG.md, without prose."""
    section = (ROOT / "CHANGELOG.md").read_text().partition("\n### Renamed\n")[2].partition("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return [(old, new) for _, old, new in rows]


def unambiguous() -> list[str]:
    """Old names that must not appear anywhere: names of one word that are not also a new name.

    The table explains ambiguous names in prose, such as "`how` of `process.exited`", because such a name may also
    belong to something else.
    """
    new_names = {new for _, new in renames()}
    return [old.strip("`") for old, _ in renames() if re.fullmatch("`[^`]+`", old) and old not in new_names]


def files() -> Iterator[Path]:
    """All files that a user reads or runs, except records of past decisions and measurements."""
    for place in SEARCHED:
        found = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*"))
        for path in found:
            if path.suffix in ENDINGS and not any(path.is_relative_to(folder) for folder in HISTORY):
                yield path


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """The text of every searched file."""
    return {path: path.read_text() for path in files()}


def test_the_table_lists_renames() -> None:
    assert len(renames()) > 30
    assert all(old != new for old, new in renames())


@pytest.mark.parametrize("old", unambiguous())
def test_an_old_name_is_left_nowhere(old: str, texts: dict[Path, str]) -> None:
    name = re.compile(rf"(?<![\w-]){re.escape(old)}(?![\w-])")

    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if name.search(text)] == []
