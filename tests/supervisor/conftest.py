"""Fixture: starts parents with fake roles, and kills them after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor.parent_starter import ParentStarter


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[ParentStarter]:
    """Starts this test's parents."""
    opened = ParentStarter(tmp_path)
    yield opened
    opened.destroy()
