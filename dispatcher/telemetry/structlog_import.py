"""Imports structlog without rich, which structlog imports if it is installed.

rich colours tracebacks, and our log does not use it: `format_exc_info` formats them. Importing rich takes 80 ms, a
seventh of what `dispatcher run` takes for its imports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without_rich() -> Iterator[None]:
    """Makes `import rich` fail in the block, as if rich were not installed."""
    if "rich" in sys.modules:
        yield
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["rich"]


with _without_rich():
    import structlog

__all__ = ["structlog"]
