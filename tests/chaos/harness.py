"""The exception for failures of the test harness."""

from __future__ import annotations


class HarnessFailed(Exception):
    """A part of the harness failed, so the storm has no verdict. The text gives the part and the reason."""
