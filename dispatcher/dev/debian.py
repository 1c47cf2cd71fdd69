"""Debian packages without root: apt-get downloads them into a folder, dpkg-deb unpacks them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dispatcher.dev.command import run

INSTALLED = Path("/var/lib/dpkg/status")


def fetch(
    package: str,
    into: Path,
    *,
    even_if_installed: str,
    remedy: str,
    progress: Callable[[str], None],
    also: Sequence[str] = (),
) -> None:
    """Downloads packages, and their dependencies that are not installed, and unpacks them into an existing folder.

    Packages whose names match the regular expression `even_if_installed` are unpacked in any case. Raises
    ServerUnavailable, with the remedy, without apt-get, a network or such a package.
    """
    with tempfile.TemporaryDirectory(prefix=".apt-", dir=into) as name:
        work = Path(name)
        environment = {"APT_CONFIG": str(_configuration(work, even_if_installed))}
        progress("reading Debian's package lists")
        run(["apt-get", "-q", "update"], purpose="read Debian's package lists", remedy=remedy, env=environment)
        simulate = ["apt-get", "-q", "-s", "--no-install-recommends", "install", package, *also]
        plan = run(simulate, purpose=f"find the packages that {package} needs", remedy=remedy, env=environment)
        names = to_install(plan)
        progress(f"downloading {len(names)} packages from Debian")
        download = ["apt-get", "-q", "download", *names]
        run(download, purpose=f"download {package} from Debian", remedy=remedy, env=environment, cwd=work)
        progress("unpacking the packages")
        for file in sorted(work.glob("*.deb")):
            run(["dpkg-deb", "-x", file, into], purpose=f"unpack {file.name}", remedy=remedy)
    for unneeded in ("usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(into / unneeded, ignore_errors=True)


def system() -> str:
    """This system's name, release and processor, such as `debian-12-x86_64`: one system's packages might not run on a
    different one."""
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        text = ""
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([\w.-]+)"?$', text, flags=re.MULTILINE))
    return "-".join((fields.get("ID", "linux"), fields.get("VERSION_ID", "rolling"), os.uname().machine))


def to_install(simulation: str) -> list[str]:
    """The packages that apt-get would install, from the output of `apt-get -s install`: lines such as `Inst socat
    (1.7.4 …)`."""
    return re.findall(r"^Inst (\S+) ", simulation, flags=re.MULTILINE)


def without(pattern: str, status: str) -> str:
    """The text of dpkg's status file, without the packages whose names match the pattern."""
    paragraphs = re.split(r"\n{2,}", status.strip("\n"))
    kept = [text for text in paragraphs if not re.match(rf"Package: (?:{pattern})$", text, flags=re.MULTILINE)]
    return "".join(f"{text}\n\n" for text in kept)


def library_folders(root: Path) -> list[Path]:
    """The folders of the unpacked shared libraries, for LD_LIBRARY_PATH."""
    triplet = f"{platform.machine()}-linux-gnu"
    return [folder for folder in (root / "usr/lib" / triplet, root / "lib" / triplet) if folder.is_dir()]


def _configuration(work: Path, even_if_installed: str) -> Path:
    """Writes an apt.conf, and returns its path. With it, apt writes only to the folder `work`, and needs no root."""
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "archives" / "partial").mkdir(parents=True)
    status = work / "status"
    status.write_text(without(even_if_installed, INSTALLED.read_text(errors="replace") if INSTALLED.exists() else ""))
    settings = {
        "Dir::State::lists": work / "lists",
        "Dir::State::status": status,
        "Dir::State::extended_states": work / "extended_states",
        "Dir::Cache": work,
        "Dir::Cache::archives": work / "archives",
        "Dir::Log": work,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Acquire::Retries": "3",
        "Acquire::http::Timeout": "30",
        "Acquire::https::Timeout": "30",
        "Acquire::Languages": "none",
    }
    path = work / "apt.conf"
    path.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return path
