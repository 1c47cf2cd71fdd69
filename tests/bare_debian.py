"""A bare Debian of debootstrap, in which tests install packages. Needs root, and Debian's archive for the first call.

A test gets a copy. Its commands see the host's network, but their own mounts and process ids: each command is process
1, as in a container.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest

from dispatcher.dev import cache

needs_root: Final = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"
)
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER: Final = 'root=$1; shift; mount -t proc proc "$root/proc"; exec chroot "$@"'
_NETWORK: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
_CERTIFICATES: Final = "/certificates.crt"  # the package ca-certificates rewrites the usual file
_INDEX: Final = {
    "PIP_CERT": _CERTIFICATES,
    "SSL_CERT_FILE": _CERTIFICATES,
    **{name: value for name, value in os.environ.items() if name.startswith("PIP_INDEX")},
}


@dataclass(frozen=True)
class Debian:
    """A folder with a Debian system, and the user and environment of the commands that run in it."""

    root: Path
    user: str = "0:0"
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH, **_INDEX})

    def words(self, *command: str) -> list[str]:
        own = [f"{name}={value}" for name, value in self.environment.items()]
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", _ENTER, "sh", str(self.root)]
        return [*enter, f"--userspec={self.user}", str(self.root), "env", "-i", *own, *command]

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(self.words(*command), capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def having(self, **variables: str) -> Debian:
        return replace(self, environment={**self.environment, **variables})

    def drain(self, process: subprocess.Popen[bytes]) -> int:
        """Sends SIGTERM to process 1 of a command that was started with `words`. Returns the exit code."""
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(child), signal.SIGTERM)
        return process.wait(60)


def make_debian(release: str, root: Path) -> Debian:
    """A copy of the release's smallest system. It also has the host's way to package indexes."""

    def download(folder: Path) -> None:
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", release, folder], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stdout + made.stderr

    base = cache.obtain(f"debian-{release}", download)
    subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
    for path in filter(os.path.exists, _NETWORK):
        shutil.copy(path, root / path.lstrip("/"))
    shutil.copy(ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt", root / _CERTIFICATES[1:])
    return Debian(root)


def build_image(file: Path, context: Path, folder: Path) -> tuple[Debian, dict[str, str]]:
    """Executes a Containerfile: each stage in a system of its own, from the release that FROM names. Returns the last
    stage's system, and the text of the instructions that describe the image, such as CMD."""
    stages: dict[str, Path] = {}
    system, described = Debian(folder), dict[str, str]()
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE))
    for verb, rest in (line.split(None, 1) for line in text.splitlines() if line):
        if verb == "FROM":
            release = rest.split()[0].rpartition(":")[2].removesuffix("-slim")
            system = make_debian(release, folder / str(len(stages)))
            stages[f"--from={rest.rpartition(' AS ')[2]}"] = system.root
        elif verb == "RUN":
            system.run("/bin/sh", "-c", rest)
        elif verb == "COPY":
            first, *others = rest.split()
            *patterns, to = others if first in stages else [first, *others]
            found = [path for each in patterns for path in stages.get(first, context).glob(each.lstrip("/"))]
            assert len(found) >= len(patterns), f"COPY {rest}: a file does not exist"
            target = system.root / to.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["cp", "--archive", *(f"{one}/." if one.is_dir() else one for one in found), target], check=True
            )
        elif verb == "ENV":
            system = system.having(**dict([rest.split("=", 1)]))
        elif verb == "USER":
            system = replace(system, user=rest)
        else:
            described[verb] = rest
    return system, described
