"""Creates a Python environment for each peer, with the peer's pinned requirements, in the cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dispatcher.dev import cache

HERE: Final = Path(__file__).resolve().parent
ENVIRONMENTS: Final = ("celery", "dramatiq", "procrastinate", "post_office")
"""The folders with a `requirements.txt`."""


def interpreter(environment: str, progress: Callable[[str], None]) -> Path:
    """The Python of an environment; creates the environment if necessary.

    Raises:
        RuntimeError: The environment could not be created; the text says why.
    """
    requirements = HERE / environment / "requirements.txt"
    name = f"peer-{environment}-{_fingerprint(requirements)}"
    if not cache.path_of(name).is_dir():
        progress(f"installing {environment} into a separate environment, in {cache.path_of(name)}")
    return cache.obtain(name, lambda folder: _install(folder, requirements)) / "bin" / "python"


def lock(upgrade: bool) -> None:
    """Write every `requirements.txt` from its `requirements.in`.

    Raises:
        RuntimeError: uv is missing, or failed.
    """
    uv = _uv()
    if uv is None:
        raise RuntimeError("uv is missing: run ./run lock once, which downloads it")
    for environment in ENVIRONMENTS:
        command = [uv, "pip", "compile", "requirements.in", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-emit-index-url", "--output-file", "requirements.txt"]
        command += ["--custom-compile-command", "python benchmarks/peers/run.py --lock"]
        _call([*command, "--upgrade"] if upgrade else command, HERE / environment)


def _install(folder: Path, requirements: Path) -> None:
    python = folder / "bin" / "python"
    uv = _uv()
    # `obtain` renames the folder at the end. The interpreter still works, because it is a link to a file elsewhere. The
    # environment's scripts contain the folder's old path and would fail, so programs are started as modules.
    _call([sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), str(folder)])
    if uv:
        _call([uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "-r", str(requirements)])
    else:
        _call([str(python), "-m", "pip", "install", "-qq", "--require-hashes", "-r", str(requirements)])


def _uv() -> str | None:
    """The path of the uv that `./run` downloaded; None if `./run` did not download uv."""
    uv = cache.path_of("uv") / "bin" / "uv"
    return str(uv) if uv.is_file() else None


def _call(command: list[str], folder: Path | None = None) -> None:
    environment = {
        **os.environ,
        "UV_CACHE_DIR": str(cache.path_of("uv-cache")),
        "UV_PYTHON_DOWNLOADS": "never",
        "PIP_CACHE_DIR": str(cache.path_of("pip")),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} … failed:\n{done.stderr.strip() or done.stdout.strip()}")


def _fingerprint(requirements: Path) -> str:
    """The inputs of an environment: its packages and the interpreter."""
    stuff = requirements.read_bytes() + platform.python_version().encode()
    return hashlib.sha256(stuff).hexdigest()[:12]
