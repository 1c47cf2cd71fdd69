"""`./run build` and `./run deb`: the packages of the last commit, in the folder dist.

For wheel and sdist, the same commit makes the same bytes, in any folder and at any time: files have the commit's time,
fixed modes and owners, and a fixed order. (The versions of setuptools and the compressors matter, too.)
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from email.utils import format_datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PLACE: Final = "usr/lib/email-dispatcher"
PYTHON: Final = "/usr/bin/python3"
"""Debian's own Python: the package depends on it."""
BUILD: Final = "import setuptools.build_meta as b, sys; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
CONTROL: Final = """\
Package: email-dispatcher
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {kibibytes}
Depends: libc6, passwd, python3 (>= {python}), python3 (<< {next_python})
Section: mail
Priority: optional
Description: transactional email: none lost, none sent twice
 Applications enqueue emails in their own PostgreSQL transactions or over
 HTTP. Workers send them through SMTP, Amazon SES, SendGrid or Resend, and
 record the status of each email. An operator can replay failed emails.
 .
 The package contains the Python packages that it needs, at the versions
 with which it was tested, and the extras api, dns, oidc, otel and smtp.
"""
OVERRIDES: Final = """\
# The Python packages come from wheels, unchanged.
email-dispatcher: embedded-library
email-dispatcher: unstripped-binary-or-object
email-dispatcher: shared-library-lacks-prerequisites
email-dispatcher: library-not-linked-against-libc
email-dispatcher: hardening-no-fortify-functions
email-dispatcher: package-contains-documentation-outside-usr-share-doc
email-dispatcher: unusual-interpreter
# The settings contain passwords.
email-dispatcher: non-standard-file-perm 0640 != 0644 [etc/email-dispatcher/*]
"""


def words(*command: str | Path, folder: Path = ROOT, **environment: str) -> bytes:
    """Runs a command, and returns its stdout. If the command fails, this program ends with what the command printed."""
    if not shutil.which(command[0]):
        sys.exit(f"{command[0]} is not installed. `./run build` needs git and tar, `./run deb` also a Debian.")
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nfailed:\n{(done.stdout + done.stderr).decode(errors='replace')}")
    return done.stdout


def commit_seconds() -> str:
    """The time of the last commit, or SOURCE_DATE_EPOCH if it is set."""
    return os.environ.get("SOURCE_DATE_EPOCH") or words("git", "log", "-1", "--format=%ct").decode().strip()


def build(into: Path, epoch: str) -> Path:
    """Builds sdist and wheel of the last commit. Returns the wheel's path."""
    if words("git", "status", "--porcelain"):
        print("The packages contain the last commit, without your uncommitted changes.", file=sys.stderr)
    into.mkdir(exist_ok=True)
    for old in into.glob("email_dispatcher-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        archive = words("git", "-c", "tar.umask=0022", "archive", "HEAD")
        subprocess.run(["tar", "--extract", "--preserve-permissions"], cwd=source, input=archive, check=True)
        words(sys.executable, "-c", BUILD, into, folder=source, SOURCE_DATE_EPOCH=epoch)
    (sdist,) = into.glob("*.tar.gz")
    repack(sdist, int(epoch))
    (wheel,) = into.glob("*.whl")
    return wheel


def repack(sdist: Path, seconds: int) -> None:
    """Writes the sdist again without what differs between two builds: order, times, owners."""
    plain = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old, key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(plain.getvalue(), mtime=seconds))


def deb(into: Path, epoch: str) -> Path:
    """Builds the Debian package for this machine's release and processor. Returns its path."""
    wheel = build(into, epoch)
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        python = install(tree / PLACE, wheel, version)
        settle(tree, version, epoch, python)
        kibibytes = sum(path.lstat().st_size for path in tree.rglob("*")) // 1024
        architecture = words("dpkg", "--print-architecture").decode().strip()
        control = tree / "DEBIAN"
        shutil.copytree(ROOT / "deploy" / "debian", control)
        minor = words(PYTHON, "-c", "import sys; print(sys.version_info.minor)").decode().strip()
        (control / "control").write_text(
            CONTROL.format(
                version=version,
                architecture=architecture,
                maintainer=maintainer(),
                kibibytes=kibibytes,
                python=f"3.{minor}",
                next_python=f"3.{int(minor) + 1}",
            )
        )
        settings = sorted(path.name for path in (tree / "etc/email-dispatcher").iterdir())
        (control / "conffiles").write_text("".join(f"/etc/email-dispatcher/{each}\n" for each in settings))
        sums = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
        listed = [
            path.relative_to(tree) for path in sums if control not in path.parents and tree / "etc" not in path.parents
        ]
        (control / "md5sums").write_bytes(words("md5sum", *listed, folder=tree))
        words("chmod", "--recursive", "u=rwX,go=rX", tree)
        words("chmod", "0640", *(tree / "etc/email-dispatcher" / each for each in settings))
        package = into / f"email-dispatcher_{version}_{architecture}.deb"
        words("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", tree, package, SOURCE_DATE_EPOCH=epoch)
    return package


def maintainer() -> str:
    named = os.environ.get("DEBFULLNAME", "The Email Dispatcher founders")
    return f"{named} <{os.environ.get('DEBEMAIL', 'packages@email-dispatcher.invalid')}>"


def install(place: Path, wheel: Path, version: str) -> Path:
    """Makes a virtual environment with the pinned packages and the wheel. Returns its Python."""
    words(PYTHON, "-m", "venv", "--without-pip", place)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    pinned = [word for extra in ("dns", "oidc", "otel", "smtp") for word in ("-r", f"requirements/{extra}.txt")]
    words(*pip, "--require-hashes", *pinned)
    # By its name, because a path would be recorded in the package.
    words(*pip, "--no-index", "--no-deps", "--find-links", wheel.parent, f"email-dispatcher=={version}")
    return python


def settle(tree: Path, version: str, epoch: str, python: Path) -> None:
    """Moves files to the folders that Debian has for them, and removes what names the folder of the build."""
    place, at = tree / PLACE, datetime.fromtimestamp(int(epoch), UTC)
    document = tree / "usr/share/doc/email-dispatcher"
    for folder in ("etc/email-dispatcher", "usr/bin", "usr/lib/systemd/system", "usr/share/lintian/overrides"):
        (tree / folder).mkdir(parents=True)
    (tree / "usr/share/man/man1").mkdir(parents=True)
    document.mkdir(parents=True)
    manual = words(python, "-B", ROOT / "deploy" / "manual.py", epoch)
    (tree / "usr/share/man/man1/dispatcher.1.gz").write_bytes(gzip.compress(manual, mtime=0))
    log = f"email-dispatcher ({version}) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n"
    log += f" -- {maintainer()}  {format_datetime(at)}\n"
    (document / "changelog.gz").write_bytes(gzip.compress(log.encode(), mtime=0))
    (document / "copyright").write_text(licences(place))
    shutil.copy(ROOT / "CHANGELOG.md", document)
    (tree / "usr/share/lintian/overrides/email-dispatcher").write_text(OVERRIDES)

    shipped = place / "share/email-dispatcher"
    for unit in shipped.glob("*.service"):
        text = unit.read_text().replace("/opt/email-dispatcher/", f"/{PLACE}/")
        (tree / "usr/lib/systemd/system" / unit.name).write_text(text)
        unit.unlink()
    for file in shipped.glob("*.env"):
        run_directory = "DISPATCHER_RUN_DIR=/var/lib/email-dispatcher"
        text = re.sub(r"^#DISPATCHER_RUN_DIR=.*", run_directory, file.read_text(), flags=re.MULTILINE)
        (tree / "etc/email-dispatcher" / file.name).write_text(text)
        file.unlink()
    (shipped / "supervisord.conf").unlink()  # the units do its work
    shipped.rename(tree / "usr/share/email-dispatcher")

    for script in (place / "bin").iterdir():
        if not script.name.startswith("python") and script.name != "dispatcher":
            script.unlink()
    program = place / "bin/dispatcher"
    program.write_text(f"#!/{PLACE}/bin/python\n" + program.read_text().partition("\n")[2])
    (tree / "usr/bin/dispatcher").symlink_to("../lib/email-dispatcher/bin/dispatcher")
    (place / "bin/python3").unlink()
    (place / "bin/python3").symlink_to("../../../bin/python3")
    settings = place / "pyvenv.cfg"
    settings.write_text("".join(line for line in settings.open() if not line.startswith("command")))
    for record in place.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        record.unlink()  # it has the hashes of the scripts, and dpkg knows the files
    for path in (place / "lib").rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def licences(place: Path) -> str:
    """The copyright file: our licence, and where the licence of each contained package is."""
    (folder,) = place.glob("lib/python*/site-packages")
    lines = ["Email Dispatcher\n\n", (ROOT / "LICENSE").read_text(), "\n"]
    lines.append(
        "The package also contains these Python packages. Their licences are in their folders *.dist-info below\n"
    )
    lines.append(f"/{folder.relative_to(place.parents[2])}:\n\n")
    for each in sorted(distributions(path=[str(folder)]), key=lambda one: one.name.lower()):
        names = each.metadata.get_all("License-Expression", []) + each.metadata.get_all("License", [])
        names += [one.split(" :: ")[-1] for one in each.metadata.get_all("Classifier", []) if one.startswith("License")]
        name = next((one for one in names if one and "\n" not in one), "see its folder")
        lines.append(f"  {each.name} {each.version}: {name}\n")
    lines.append("\nThe LGPL is in /usr/share/common-licenses/LGPL-3, the Apache licence in Apache-2.0 beside it.\n")
    return "".join(lines)


if __name__ == "__main__":
    os.umask(0o022)
    print({"build": build, "deb": deb}[sys.argv[1]](ROOT / "dist", commit_seconds()))
