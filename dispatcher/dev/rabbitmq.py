"""A private RabbitMQ with its management plugin: found, configured and started on loopback, with an epmd of its own."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from dispatcher.dev import cache, debian, ports
from dispatcher.dev.keeper import Plan, replace_json
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.errors import ServerUnavailable

NAME = "rabbitmq"
EPMD = "epmd"
USER = "dispatcher"
VHOST = "/"
ACCESS_FILE = "rabbitmq.json"
READY_SECONDS = 120.0
REMEDY = (
    "Check the network, install RabbitMQ (apt-get install rabbitmq-server), or name a server in DISPATCHER_AMQP_URL."
)
ERLANG_PACKAGES = r"rabbitmq-server|erlang-\S+"

# Schedulers that spin while they wait would take a core from whatever is measured beside this server.
ERLANG_ARGUMENTS = "+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"


@dataclass(frozen=True, slots=True)
class Binaries:
    """RabbitMQ's and Erlang's programs.

    Attributes:
        scripts: The folder of the real `rabbitmq-server`, not of a distribution's wrapper, which wants root.
        erlang: The folder of `erl` and `epmd`.
        libraries: Folders for LD_LIBRARY_PATH.
        source: Where they came from, in words for a person.
    """

    scripts: Path
    erlang: Path
    libraries: tuple[Path, ...]
    source: str

    @property
    def version(self) -> str:
        """RabbitMQ's version as its folder's name tells it; empty if it does not."""
        found = re.search(r"rabbitmq_server-([\d.]+)", str(self.scripts))
        return found.group(1) if found else ""


@dataclass(frozen=True, slots=True)
class Access:
    """What a folder's node keeps from one start to the next."""

    password: str
    cookie: str
    node: str
    amqp_port: int
    management_port: int
    distribution_port: int
    epmd_port: int

    @property
    def amqp_url(self) -> str:
        """For AMQP clients."""
        return f"amqp://{USER}:{self.password}@{ports.LOOPBACK}:{self.amqp_port}/{quote(VHOST, safe='')}"

    @property
    def management_url(self) -> str:
        """For the HTTP API."""
        return f"http://{USER}:{self.password}@{ports.LOOPBACK}:{self.management_port}"


def known_url(folder: Path) -> str | None:
    """The AMQP URL that the folder's node had when it ran last; None if it never did."""
    path = folder / ACCESS_FILE
    return Access(**json.loads(path.read_text())).amqp_url if path.exists() else None


def start(processes: Processes, progress: Callable[[str], None], *, disposable: bool) -> tuple[str, str, str]:
    """The AMQP URL and the management URL of a running private node, and in words where its programs came from.

    A disposable node, whose data nobody will read again, is killed in the end; an orderly stop takes it six seconds.

    Raises:
        ServerUnavailable: There are no programs to be had, or they do not work here.
    """
    began = time.monotonic()
    binaries = find(progress)
    home = processes.folder / "rabbitmq"
    home.mkdir(mode=0o700, exist_ok=True)
    access = _access(processes.folder)
    _configure(home, access)
    progress(f"starting RabbitMQ {binaries.version}".rstrip())
    processes.launch(EPMD, _epmd_plan(processes.folder, binaries, access))
    _await(processes, EPMD, "Erlang's port mapper", lambda: ports.accepts(access.epmd_port))
    processes.launch(NAME, _plan(processes.folder, binaries, access, disposable=disposable))
    _await(processes, NAME, "RabbitMQ", lambda: is_ready(access))
    progress(f"RabbitMQ {binaries.version} is ready after {time.monotonic() - began:.1f} s ({binaries.source})")
    return access.amqp_url, access.management_url, binaries.source


def find(progress: Callable[[str], None]) -> Binaries:
    """Installed programs, else Debian's, fetched if need be; DISPATCHER_DEV_RABBITMQ forces one of the two."""
    forced = os.environ.get("DISPATCHER_DEV_RABBITMQ")
    if forced not in (None, "", "installed", "debian"):
        raise ServerUnavailable(f"DISPATCHER_DEV_RABBITMQ is {forced!r}.", remedy='Set it to "installed" or "debian".')
    if forced != "debian":
        if installed := find_installed():
            return installed
        if forced:
            raise ServerUnavailable("RabbitMQ is not installed.", remedy=REMEDY)
    return _fetch_debian(progress)


def find_installed() -> Binaries | None:
    """The installed programs; None unless RabbitMQ and Erlang are both there."""
    erl = shutil.which("erl")
    candidates = [Path("/usr/lib/rabbitmq/bin"), *sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin"), reverse=True)]
    if program := shutil.which("rabbitmq-server"):
        candidates.append(Path(program).resolve().parent)
    scripts = next((real for folder in candidates if (real := real_scripts(folder))), None)
    if erl is None or scripts is None:
        return None
    return Binaries(scripts, Path(erl).resolve().parent, (), f"installed in {scripts}")


def real_scripts(folder: Path) -> Path | None:
    """Where a folder's `rabbitmq-server` really is, if that is RabbitMQ's own script and not a wrapper around it."""
    script = (folder / "rabbitmq-server").resolve()
    return script.parent if script.is_file() and (script.parent / "rabbitmq-defaults").is_file() else None


def is_ready(access: Access) -> bool:
    """Whether AMQP clients are let in and the management API knows it."""
    listening = f"/api/health/checks/port-listener/{access.amqp_port}"
    return ports.accepts(access.amqp_port) and all(_answers(access, path) for path in ("/api/overview", listening))


def patch_root(script: Path, root: Path) -> None:
    """Tell one of Erlang's start scripts where Erlang is; Debian's build knows only /usr/lib/erlang."""
    text = script.read_text()
    quoted = "'" + str(root).replace("'", "'\\''") + "'"
    script.write_text(re.sub(r"ROOTDIR=/\S+", lambda _: f"ROOTDIR={quoted}", text))


def _answers(access: Access, path: str) -> bool:
    """Whether the management API says 200."""
    connection = http.client.HTTPConnection(ports.LOOPBACK, access.management_port, timeout=5)
    credentials = base64.b64encode(f"{USER}:{access.password}".encode()).decode()
    try:
        connection.request("GET", path, headers={"Authorization": f"Basic {credentials}"})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _fetch_debian(progress: Callable[[str], None]) -> Binaries:
    """Debian's programs, unpacked in the cache folder."""
    name = f"rabbitmq-{debian.system()}"
    final = cache.place(name)

    def build(folder: Path) -> None:
        progress("fetching RabbitMQ from Debian (35 MB)")
        debian.fetch(
            "rabbitmq-server", folder, unless_installed=ERLANG_PACKAGES, remedy=REMEDY,
            progress=lambda words: progress(f"RabbitMQ: {words}"),
        )  # fmt: skip
        for script in ("erl", "start"):
            patch_root(folder / "usr/lib/erlang/bin" / script, final / "usr/lib/erlang")

    root = cache.obtain(name, build)
    scripts = real_scripts(root / "usr/lib/rabbitmq/bin")
    if scripts is None:
        raise ServerUnavailable(f"Debian's RabbitMQ in {root} has no start script.", remedy=REMEDY)
    libraries = tuple(debian.library_folders(root))
    return Binaries(scripts, root / "usr/lib/erlang/bin", libraries, f"from Debian's packages, in {root}")


def _access(folder: Path) -> Access:
    """The password, cookie, node name and ports of last time; new ports if somebody took one of the old."""
    path = folder / ACCESS_FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    names = ("amqp_port", "management_port", "distribution_port", "epmd_port")
    chosen = ports.keep_or_choose([known[name] for name in names if name in known], len(names))
    access = Access(
        password=known.get("password") or secrets.token_urlsafe(24),
        cookie=known.get("cookie") or secrets.token_hex(16),
        node=known.get("node") or f"dispatcher-{secrets.token_hex(4)}@localhost",
        **dict(zip(names, chosen, strict=True)),
    )
    replace_json(path, asdict(access))
    return access


def _configure(home: Path, access: Access) -> None:
    """Write what the node reads when it starts."""
    settings = {
        "listeners.tcp.1": f"{ports.LOOPBACK}:{access.amqp_port}",
        "management.tcp.ip": ports.LOOPBACK,
        "management.tcp.port": access.management_port,
        "default_vhost": VHOST,
        "default_user": USER,
        "default_pass": access.password,
        "default_user_tags.administrator": "true",
        "log.console": "true",
        "log.console.level": "info",
    }
    _write_private(home / "rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in settings.items()))
    _write_private(home / "enabled_plugins", "[rabbitmq_management].\n")
    cookie = home / ".erlang.cookie"
    cookie.unlink(missing_ok=True)
    _write_private(cookie, access.cookie)
    cookie.chmod(0o400)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only we may read."""
    path.touch(mode=0o600)
    path.write_text(text)


def _epmd_plan(folder: Path, binaries: Binaries, access: Access) -> Plan:
    """Erlang's port mapper in the foreground; left to itself the node starts one that outlives it and serves others."""
    environment = _environment(binaries, folder / "rabbitmq", access)
    return Plan(
        argv=[str(binaries.erlang / "epmd"), "-address", ports.LOOPBACK, "-port", str(access.epmd_port)],
        env=environment,
        cwd=str(folder),
        log=str(folder / "log" / f"{EPMD}.log"),
        stop=["SIGTERM"],
        orphaned="SIGKILL",
    )


def _plan(folder: Path, binaries: Binaries, access: Access, *, disposable: bool) -> Plan:
    """How the keeper is to run the node.

    The script is started from its own folder by a relative name, because it does not survive a space in its path, and
    told that input is allowed, because only then does it become the Erlang machine and not a shell that waits for it.
    """
    home = folder / "rabbitmq"
    return Plan(
        argv=["/bin/sh", "./rabbitmq-server"],
        env={
            **_environment(binaries, home, access),
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODENAME": access.node,
            "RABBITMQ_DIST_PORT": str(access.distribution_port),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(home / "node.pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG_ARGUMENTS,
        },
        cwd=str(binaries.scripts),
        log=str(folder / "log" / f"{NAME}.log"),
        stop=["SIGKILL" if disposable else "SIGTERM"],
        orphaned="SIGKILL",
    )


def _environment(binaries: Binaries, home: Path, access: Access) -> dict[str, str]:
    """A whole environment for Erlang programs, without anything that a developer's shell may hold about RabbitMQ."""
    environment = {
        "PATH": os.pathsep.join([str(binaries.erlang), os.environ.get("PATH", os.defpath)]),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_PORT": str(access.epmd_port),
        "ERL_EPMD_ADDRESS": ports.LOOPBACK,
        "ERL_CRASH_DUMP": str(home / "erl_crash.dump"),
    }
    if binaries.libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, binaries.libraries))
    return environment


def _await(processes: Processes, name: str, what: str, ready: Callable[[], bool]) -> None:
    """Wait for one of our two processes."""
    await_condition(
        ready,
        seconds=READY_SECONDS,
        broken=lambda: processes.obituary(name),
        what=what,
        log=processes.folder / "log" / f"{name}.log",
    )
