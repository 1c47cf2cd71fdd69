"""Runs Postfix's smtp-sink, an SMTP server in C that accepts and discards emails; installed, or downloaded from Debian.

smtp-sink needs no root rights. It keeps no ledger, so lost and duplicate emails cannot be counted at the provider's
side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dispatcher.dev import cache, debian, ports
from dispatcher.errors import ServerUnavailable

NAME: Final = "postfix-smtp-sink"
READY_SECONDS: Final = 10.0
BACKLOG: Final = "1000"
REMEDY: Final = "Install Postfix, which contains smtp-sink (apt-get install postfix), or use --sink python."


@contextmanager
def running_c_sink(latency_ms: float = 0.0) -> Iterator[tuple[int, int]]:
    """Start a sink, and stop it after the block; yields its process id and its port.

    Raises:
        ServerUnavailable: smtp-sink is not available; or the latency is not a whole number of seconds.
    """
    if latency_ms % 1000:
        raise ServerUnavailable(
            "Postfix's smtp-sink supports only latencies of whole seconds.", remedy="Use --sink python."
        )
    program, environment = _find()
    (port,) = ports.choose(1)
    # smtp-sink refuses to run as root.
    user = ["-u", "nobody"] if os.geteuid() == 0 else []
    wait = ["-w", str(int(latency_ms / 1000))] if latency_ms else []
    with subprocess.Popen([program, *user, *wait, f"127.0.0.1:{port}", BACKLOG], env=environment) as process:
        try:
            _wait_until_ready(process, port)
            yield process.pid, port
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not ports.accepts(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerUnavailable("Postfix's smtp-sink did not start.", remedy=REMEDY)
        time.sleep(0.05)


def _find() -> tuple[str, dict[str, str]]:
    if installed := shutil.which("smtp-sink", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"):
        return installed, dict(os.environ)

    def build(folder: Path) -> None:
        debian.fetch("postfix", folder, even_if_installed="postfix", remedy=REMEDY, progress=lambda _: None)

    root = cache.obtain(NAME, build)
    libraries = [root / "usr/lib/postfix", *debian.library_folders(root)]
    return str(root / "usr/sbin/smtp-sink"), {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}
