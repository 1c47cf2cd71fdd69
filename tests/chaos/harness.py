"""The storm's own machinery, and how it fails."""

from __future__ import annotations


class HarnessFailed(Exception):
    """A part of the harness did not do its work, so that the storm cannot be judged; names the part, and says why."""
