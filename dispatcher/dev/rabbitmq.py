"""A private RabbitMQ with its management plugin: one node, or a cluster of several, on the loopback interface.

Finds the programs, and configures and starts the nodes. The nodes use a private epmd (Erlang's port mapper).
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dispatcher.dev import cache, debian, ports
from dispatcher.dev.keeper import Plan, replace_json
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.errors import ServerUnavailable

NAME = "rabbitmq"
EPMD = "epmd"
USER = "dispatcher"
VHOST = "/"
READY_SECONDS = 120.0
REMEDY = (
    "Check the network, install RabbitMQ (apt-get install rabbitmq-server), or set DISPATCHER_AMQP_URL to a server."
)
ERLANG_PACKAGES = r"rabbitmq-server|erlang-\S+"

# By default, Erlang's idle schedulers spin, which would take a core from a benchmark on the same machine.
ERLANG_ARGUMENTS = "+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"
# After about this long, the nodes of a cluster treat a frozen node as down. The default is 60 s.
NET_TICK_SECONDS = 10
CLUSTER_ARGUMENTS = f"+S 1:1 -kernel net_ticktime {NET_TICK_SECONDS}"


@dataclass(frozen=True, slots=True)
class RabbitBinaries:
    """RabbitMQ's and Erlang's programs. `scripts` is the folder of the original `rabbitmq-server`: a distribution's
    wrapper script needs root. `erlang` is the folder of `erl` and `epmd`, `libraries` are for LD_LIBRARY_PATH."""

    scripts: Path
    erlang: Path
    libraries: tuple[Path, ...]
    source: str

    @property
    def version(self) -> str:
        """RabbitMQ's version, from its folder's name; empty if the folder's name has no version."""
        found = re.search(r"rabbitmq_server-([\d.]+)", str(self.scripts))
        return found.group(1) if found else ""


@dataclass(frozen=True, slots=True)
class RabbitAccess:
    """The secrets, name and ports of a node, which the folder stores for the next start. The nodes of a cluster have
    the same secrets."""

    password: str
    cookie: str
    node: str
    amqp_port: int
    management_port: int
    distribution_port: int
    epmd_port: int

    @property
    def amqp_url(self) -> str:
        return f"amqp://{USER}:{self.password}@{ports.LOOPBACK}:{self.amqp_port}/{quote(VHOST, safe='')}"

    @property
    def management_url(self) -> str:
        return f"http://{USER}:{self.password}@{ports.LOOPBACK}:{self.management_port}"


def known_url(folder: Path) -> str | None:
    """The AMQP URL that the folder's node had at its last start; None if no node was ever started in the folder."""
    path = folder / f"{NAME}.json"
    return RabbitAccess(**json.loads(path.read_text())).amqp_url if path.exists() else None


def names_of(nodes: int) -> tuple[str, ...]:
    """The names of the nodes' processes, such as `rabbitmq-1`; for a single node, `rabbitmq`."""
    return (NAME,) if nodes == 1 else tuple(f"{NAME}-{number}" for number in range(1, nodes + 1))


def start(
    processes: Processes, progress: Callable[[str], None], *, disposable: bool, nodes: int = 1
) -> tuple[tuple[RabbitAccess, ...], str]:
    """Starts private nodes, which form a cluster with `pause_minority`, and waits until all are ready. Returns the
    secrets and ports of each node, and where the programs come from.

    If `disposable`, the data may be lost: the nodes are stopped with SIGKILL, because a clean stop takes 6 s. Raises
    ServerUnavailable if the programs cannot be found or downloaded, or do not work here.
    """
    began = time.monotonic()
    binaries = find(progress)
    names = names_of(nodes)
    accesses = _accesses(processes.folder, names)
    progress(f"starting RabbitMQ {binaries.version}".rstrip())
    epmd = _epmd_plan(processes.folder, binaries, accesses[0])
    processes.launch(EPMD, epmd)
    _await(processes, EPMD, "Erlang's port mapper", lambda: ports.accepts(accesses[0].epmd_port))
    for name, access in zip(names, accesses, strict=True):
        _configure(processes.folder / name, access, accesses)
        processes.launch(name, _plan(processes.folder, name, binaries, access, disposable=disposable, nodes=nodes))
    for name, access in zip(names, accesses, strict=True):
        _await(processes, name, "RabbitMQ", partial(_has_joined, access, nodes))
    progress(f"RabbitMQ {binaries.version} is ready after {time.monotonic() - began:.1f} s ({binaries.source})")
    return accesses, binaries.source


def find(progress: Callable[[str], None]) -> RabbitBinaries:
    """The installed programs, or those of downloaded Debian packages. DISPATCHER_DEV_RABBITMQ=installed forbids the
    download; DISPATCHER_DEV_RABBITMQ=debian ignores installed programs."""
    forced = os.environ.get("DISPATCHER_DEV_RABBITMQ")
    if forced not in (None, "", "installed", "debian"):
        raise ServerUnavailable(
            f"DISPATCHER_DEV_RABBITMQ has the unknown value {forced!r}.", remedy='Set it to "installed" or "debian".'
        )
    if forced != "debian":
        if installed := find_installed():
            return installed
        if forced:
            raise ServerUnavailable("RabbitMQ is not installed.", remedy=REMEDY)
    return _fetch_debian(progress)


def find_installed() -> RabbitBinaries | None:
    """The installed programs; None if RabbitMQ or Erlang is not installed."""
    erl = shutil.which("erl")
    candidates = [Path("/usr/lib/rabbitmq/bin"), *sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin"), reverse=True)]
    if program := shutil.which("rabbitmq-server"):
        candidates.append(Path(program).resolve().parent)
    scripts = next((real for folder in candidates if (real := real_scripts(folder))), None)
    if erl is None or scripts is None:
        return None
    return RabbitBinaries(scripts, Path(erl).resolve().parent, (), f"installed in {scripts}")


def real_scripts(folder: Path) -> Path | None:
    """The folder of the original `rabbitmq-server`, to which `folder` may link; None if it contains only a wrapper
    script."""
    script = (folder / "rabbitmq-server").resolve()
    return script.parent if script.is_file() and (script.parent / "rabbitmq-defaults").is_file() else None


def is_ready(access: RabbitAccess) -> bool:
    """Whether the node accepts AMQP clients. Checks this with a connection, and with the management API."""
    listening = f"/api/health/checks/port-listener/{access.amqp_port}"
    return ports.accepts(access.amqp_port) and all(_answers(access, path) for path in ("/api/overview", listening))


def running_nodes(access: RabbitAccess) -> int:
    """The number of running nodes of the cluster, as this node reports it; 0 if this node does not answer."""
    status, nodes = ask(access, "/api/nodes")
    return sum(node.get("running", False) for node in nodes) if status == http.HTTPStatus.OK else 0


def _has_joined(access: RabbitAccess, nodes: int) -> bool:
    return is_ready(access) and (nodes == 1 or running_nodes(access) == nodes)


def patch_root(script: Path, root: Path) -> None:
    """Sets Erlang's folder to `root` in one of Erlang's start scripts. Debian's scripts expect /usr/lib/erlang."""
    text = script.read_text()
    quoted = "'" + str(root).replace("'", "'\\''") + "'"
    script.write_text(re.sub(r"ROOTDIR=/\S+", lambda _: f"ROOTDIR={quoted}", text))


def _answers(access: RabbitAccess, path: str) -> bool:
    return ask(access, path)[0] == http.HTTPStatus.OK


def ask(access: RabbitAccess, path: str) -> tuple[int, Any]:
    """Sends a GET request to the management API. Returns the status and the JSON; 0 and None if no answer came."""
    connection = http.client.HTTPConnection(ports.LOOPBACK, access.management_port, timeout=5)
    credentials = base64.b64encode(f"{USER}:{access.password}".encode()).decode()
    try:
        connection.request("GET", path, headers={"Authorization": f"Basic {credentials}"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def _fetch_debian(progress: Callable[[str], None]) -> RabbitBinaries:
    """Returns Debian's programs. Downloads and unpacks the packages if the cache folder does not have them."""
    name = f"rabbitmq-{debian.system()}"
    final = cache.path_of(name)

    def build(folder: Path) -> None:
        progress("downloading RabbitMQ from Debian (35 MB)")
        debian.fetch(
            "rabbitmq-server", folder, even_if_installed=ERLANG_PACKAGES, remedy=REMEDY,
            progress=lambda words: progress(f"RabbitMQ: {words}"),
        )  # fmt: skip
        for script in ("erl", "start"):
            patch_root(folder / "usr/lib/erlang/bin" / script, final / "usr/lib/erlang")

    root = cache.obtain(name, build)
    scripts = real_scripts(root / "usr/lib/rabbitmq/bin")
    if scripts is None:
        raise ServerUnavailable(f"Debian's RabbitMQ in {root} has no start script.", remedy=REMEDY)
    libraries = tuple(debian.library_folders(root))
    return RabbitBinaries(scripts, root / "usr/lib/erlang/bin", libraries, f"from Debian's packages, in {root}")


def _accesses(folder: Path, names: Sequence[str]) -> tuple[RabbitAccess, ...]:
    """The nodes' secrets, names and ports of the last start, or new ones, which are stored. If an old port is in use,
    all are new."""
    paths = [folder / f"{name}.json" for name in names]
    known = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    first, own = known[0], ("amqp_port", "management_port", "distribution_port")
    earlier = [first["epmd_port"], *(each[port] for each in known for port in own)] if all(known) else []
    chosen = iter(ports.keep_or_choose(earlier, 1 + len(own) * len(names)))
    password = first.get("password") or secrets.token_urlsafe(24)
    cookie = first.get("cookie") or secrets.token_hex(16)
    epmd_port = next(chosen)
    accesses = []
    for path, each in zip(paths, known, strict=True):
        node = each.get("node") or f"dispatcher-{secrets.token_hex(4)}@localhost"
        access = RabbitAccess(password, cookie, node, epmd_port=epmd_port, **{port: next(chosen) for port in own})
        replace_json(path, asdict(access))
        accesses.append(access)
    return tuple(accesses)


def _configure(home: Path, access: RabbitAccess, cluster: Sequence[RabbitAccess]) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
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
    if len(cluster) > 1:
        settings["cluster_formation.peer_discovery_backend"] = "classic_config"
        settings |= {f"cluster_formation.classic_config.nodes.{n}": each.node for n, each in enumerate(cluster, 1)}
        settings["cluster_partition_handling"] = "pause_minority"
    _write_private(home / "rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in settings.items()))
    _write_private(home / "enabled_plugins", "[rabbitmq_management].\n")
    cookie = home / ".erlang.cookie"
    cookie.unlink(missing_ok=True)
    _write_private(cookie, access.cookie)
    cookie.chmod(0o400)


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _epmd_plan(folder: Path, binaries: RabbitBinaries, access: RabbitAccess) -> Plan:
    """How to start and stop a private epmd (Erlang's port mapper). Otherwise the node would start an epmd for the whole
    machine, which other nodes would use, and which would keep running after the node has stopped."""
    environment = _environment(binaries, folder, access)
    return Plan(
        argv=[str(binaries.erlang / "epmd"), "-address", ports.LOOPBACK, "-port", str(access.epmd_port)],
        env=environment,
        cwd=str(folder),
        log=str(folder / "log" / f"{EPMD}.log"),
        stop=["SIGTERM"],
        orphaned="SIGKILL",
    )


def _plan(
    folder: Path, name: str, binaries: RabbitBinaries, access: RabbitAccess, *, disposable: bool, nodes: int
) -> Plan:
    """How to start and stop a node.

    The start script fails if its path has a space, so it is started in its own folder, by its name alone. With
    RABBITMQ_ALLOW_INPUT, the Erlang machine replaces the script's shell (exec). Otherwise, the shell would keep running
    until the machine exits.
    """
    home = folder / name
    arguments = ERLANG_ARGUMENTS if nodes == 1 else f"{ERLANG_ARGUMENTS} {CLUSTER_ARGUMENTS}"
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
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": arguments,
        },
        cwd=str(binaries.scripts),
        log=str(folder / "log" / f"{name}.log"),
        stop=["SIGKILL" if disposable else "SIGTERM"],
        orphaned="SIGKILL",
    )


def _environment(binaries: RabbitBinaries, home: Path, access: RabbitAccess) -> dict[str, str]:
    """The whole environment for Erlang programs. It contains no RABBITMQ_… variables of the user's shell."""
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
    """Waits until `ready` returns True. Raises ServerUnavailable if the process exits, or after READY_SECONDS."""
    await_condition(
        ready,
        seconds=READY_SECONDS,
        broken=lambda: processes.exit_report(name),
        what=what,
        log=processes.folder / "log" / f"{name}.log",
    )
