"""Runs PgBouncer between the dispatcher and PostgreSQL. Debian's package is downloaded without root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from dispatcher.dev import cache, debian, ports, postgres
from tests.waiting import wait_until


@contextmanager
def pgbouncer(folder: Path, database_url: str, *, mode: str) -> Iterator[str]:
    """Runs a pooler in this mode (`session`, `transaction`) during the block; yields the database's URL through the
    pooler."""
    root = cache.obtain("pgbouncer-debian", _fetch)
    parts = urlsplit(database_url)
    (port,) = ports.choose(1)
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n"
        f"pooled = host={parts.hostname} port={parts.port} dbname={parts.path[1:]}"
        f" user={parts.username} password={parts.password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {mode}\ndefault_pool_size = 40\n"
    )
    configuration.chmod(0o644)
    libraries = ":".join(map(str, debian.library_folders(root)))
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [*postgres.unprivileged_prefix(), root / "usr/sbin/pgbouncer", configuration],
            env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": libraries},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: ports.accepts(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "pgbouncer.log").read_text()
        yield f"postgresql://somebody@127.0.0.1:{port}/pooled"
    finally:
        process.kill()
        process.wait()


def _fetch(folder: Path) -> None:
    debian.fetch("pgbouncer", folder, even_if_installed="pgbouncer", remedy="Install pgbouncer.", progress=print)
