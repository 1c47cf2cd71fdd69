"""Prints the test files of what was changed: `./run test --changed` runs them.

A change is a difference to the branch `main` (of `origin` if there is one), and what is not committed. Chosen are the
changed tests, those that import a changed module, directly or by another module of tests/, and those of its room: for
`dispatcher/relay/`, `tests/relay/`. For SQL, these are tests/store and the tests of all statements. This leaves out
tests that use a changed module only through others: before a push, run all tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[1]
_OF_SQL: Final = ("tests/store", "tests/test_sql.py", "tests/recovery")
_OF_ALL: Final = {"tests/conftest.py", "pyproject.toml", "setup.cfg"}


def paths_of(changed: Iterable[str], checkout: Path = CHECKOUT) -> list[str]:
    """The paths of the tests that a change of these files concerns; all of tests/ if it concerns every test."""
    changed = set(changed)
    if changed & _OF_ALL:
        return ["tests"]
    imports = {str(path.relative_to(checkout)): {*_imported(path)} for path in (checkout / "tests").rglob("*.py")}
    touched = {_module(path) for path in changed if path.endswith(".py")}
    found = set(changed & imports.keys())
    while more := {path for path, names in imports.items() if names & touched} - found:
        found |= more
        touched |= {_module(path) for path in more if not Path(path).name.startswith("test_")}
    rooms = {f"tests/{path.split('/')[1]}" for path in changed if path.startswith("dispatcher/")}
    rooms |= set(_OF_SQL) if any(path.endswith(".sql") for path in changed) else set()
    rooms = {room for room in rooms if (checkout / room).exists()}
    files = {path for path in found if Path(path).name.startswith("test_") and (checkout / path).exists()}
    return sorted(rooms | {path for path in files if not any(path.startswith(f"{room}/") for room in rooms)})


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _changed() -> set[str]:
    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        return done.stdout.split("\n")[:-1] if done.returncode == 0 else []

    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or ["HEAD"]
    return {*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")}


def main() -> None:
    """Print a path per line; exit code 1 if no test is concerned."""
    tests = paths_of(_changed())
    sys.stdout.writelines(f"{path}\n" for path in tests)
    sys.exit(not tests)


if __name__ == "__main__":
    main()
