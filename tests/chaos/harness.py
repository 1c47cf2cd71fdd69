"""The exception for failures of the storm's own machinery."""

from __future__ import annotations


class HarnessFailed(Exception):
    """A part of the harness failed, so the storm cannot be judged. Names the part and the reason."""
