"""Generated files are up to date with `./run generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher.dev import generate


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text() == generate.generated()[path], "run: ./run generate"
