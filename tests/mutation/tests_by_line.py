"""Which tests execute which line of the product: `pytest -p tests.mutation.tests_by_line` records them.

Each process of the run writes its own file beside the one that the variable `DATA_FILE` names; see `coverage combine`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Final

import coverage
import pytest

DATA_FILE: Final = "DISPATCHER_TESTS_BY_LINE"
PROCESSES: Final = 4
_STATEMENT: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_PART: Final = re.compile(r"^-- (?:name|part): (\w+)$", re.MULTILINE)


class TestsByLine:
    """The tests of the first tier by the lines that they execute in the test process."""

    __test__ = False  # for pytest

    def __init__(self, checkout: Path, data_file: Path) -> None:
        self._checkout = checkout
        self._data = coverage.CoverageData(str(data_file))
        self._data.read()
        self._by_file = {str(file): self._data.contexts_by_lineno(file) for file in self._data.measured_files()}
        self._sources = {str(file): (checkout / file).read_text() for file in self._by_file}
        self._sql = {path: path.read_text() for path in sorted((checkout / "sql/queries").glob("*.sql"))}
        files = (checkout / "tests").rglob("test_*.py")
        self._tests = {path.relative_to(checkout).as_posix(): path.read_text() for path in files}

    def tests_of(self, file: str, lines: Iterable[int]) -> list[str]:
        """The tests of some lines: first the files whose tests may execute them in other processes or past the
        product's callers, then the tests that have the module's name, then the others of its room."""
        named = f"test_{Path(file).stem}"
        if file.endswith(".sql"):
            own, names = "tests/store/", self._statements(file, min(lines))
            action = re.compile(rf'^class (\w+)\(.*query="(?:{"|".join(names)})"', re.MULTILINE)
            actions = [found for words in self._sources.values() for found in action.findall(words)]
            call = re.compile(rf"\b(?:{'|'.join([*names, *actions])})\(")
            whole = {path for path, words in self._tests.items() if call.search(words)}
            tests = self._of_statements(names) | whole
        else:
            own, tests = f"tests/{Path(file).parent.name}/", self._of_python(file, lines)
            whole = self._tests.keys() & {f"{own}{named}.py"}
        if not tests:  # the line runs when the module is imported, or only in whole processes
            return [path for path in (own, "tests/acceptance") if (self._checkout / path).is_dir()]
        others = {test for test in tests if test.partition("::")[0] not in whole}
        return sorted(whole) + sorted(others, key=lambda test: (named not in test, not test.startswith(own), test))

    def _of_python(self, file: str, lines: Iterable[int]) -> set[str]:
        by_line = self._by_file.get(file, {})
        return {test for line in lines for test in by_line.get(line, ()) if test}

    def _statements(self, file: str, line: int) -> set[str]:
        """The statement or part of the line, and the statements that contain the part."""
        text = self._sql[self._checkout / file]
        above = "\n".join(text.splitlines()[:line])
        (*_, heading) = _PART.findall(above) or [""]
        names = {heading}
        for sql in self._sql.values():
            for section in re.split(r"^(?=-- (?:name|part): )", sql, flags=re.MULTILINE):
                if f"{{{heading}}}" in section and (found := _PART.match(section)):
                    names.add(found[1])
        return names

    def _of_statements(self, names: Iterable[str]) -> set[str]:
        """The tests that execute a line which names one of the statements."""
        found_tests = set()
        for name in names:
            quoted = f'"{name}"'
            stubs = {Path(source).stem for source, words in self._sources.items() if f"def {name}(" in words}
            called = re.compile(rf"\b{name}\(")
            for source, words in self._sources.items():
                calls = any(re.search(rf"\b{stub}\b", words) for stub in stubs)
                numbers = [
                    number
                    for number, each in enumerate(words.splitlines(), 1)
                    if quoted in each or (calls and called.search(each))
                ]
                found_tests |= self._of_python(source, numbers)
        return found_tests


def record(checkout: Path, data_file: Path, paths: Sequence[str]) -> None:
    """Run the tests once with coverage, which takes twice as long as without."""
    for old in data_file.parent.glob(f"{data_file.name}*"):
        old.unlink()
    distribution = ["--numprocesses", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.tests_by_line", *distribution, *paths]
    subprocess.run(command, cwd=checkout, env={**os.environ, DATA_FILE: str(data_file)}, check=False)
    combined = coverage.Coverage(data_file=str(data_file), config_file=False)
    combined.combine([str(data_file.parent)])
    combined.save()


class _Recorder:
    def __init__(self, data_file: str) -> None:
        self._coverage = coverage.Coverage(
            data_file=data_file, data_suffix=True, source=["dispatcher"], branch=False, config_file=False
        )
        self._coverage.set_option("run:relative_files", True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(os.environ[DATA_FILE]))
