"""Fixtures for the tests of private servers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

Eventually = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def eventually() -> Eventually:
    """A function that waits up to half a minute for a condition, and then fails with the given text."""

    def wait(condition: Callable[[], bool], words: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within 30 s: {words}")
            time.sleep(0.02)

    return wait
