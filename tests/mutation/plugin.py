"""A pytest plugin that records which test executes which line: `pytest -p tests.mutation.plugin`.

Each process of the run writes its own file beside the one that the variable `DATA_FILE` names; see `coverage combine`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Final

import coverage
import pytest

DATA_FILE: Final = "DISPATCHER_TESTS_BY_LINE"


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
