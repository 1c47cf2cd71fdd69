"""Each named fault can be planted in the product as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("patch", sorted(Path(__file__).parent.glob("faults/*.patch")), ids=lambda path: path.stem)
def test_its_patch_applies(patch: Path) -> None:
    command = ["git", "apply", "--check", str(patch)]
    applied = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)

    assert applied.returncode == 0, applied.stderr
