"""TLS contexts of our clients: which servers they trust, and what they refuse."""

from __future__ import annotations

import ssl
from pathlib import Path


def client_context(ca_file: Path | str | None = None) -> ssl.SSLContext:
    """A context that verifies the server's certificate and its name.

    Some builds of Python (Debian 12's) accept a connection that ends without TLS's closing message. Anybody on the way
    could then cut off an answer that has no length. This context treats such an end as an error.

    Args:
        ca_file: Trusted instead of the system's certificates; None for those.

    Raises:
        OSError: the file cannot be read, or holds no certificates (ssl.SSLError is an OSError).
    """
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    return context
