"""Parents with toys, gone when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor.nursery import Nursery


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """Where this test's parents live."""
    opened = Nursery(tmp_path)
    yield opened
    opened.destroy()
