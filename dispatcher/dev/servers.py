"""Starts, describes and stops the private PostgreSQL and RabbitMQ of one folder.

    with private_servers(folder) as servers:      # tests, demo, benchmarks: the servers stop when this process exits
        connect(servers.database_url)

    start(folder, owner_pid=None, …)              # `dispatcher dev up`: the servers run until `stop(folder)`

If DISPATCHER_DATABASE_URL or DISPATCHER_AMQP_URL names an existing server, it is used instead of a private one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from threading import Lock
from types import MappingProxyType
from urllib.parse import urlsplit

from dispatcher.config.values import addresses
from dispatcher.dev import cache, keeper, postgres, rabbitmq
from dispatcher.dev.processes import Processes
from dispatcher.errors import ServerUnavailable

DATABASE_URL = "DISPATCHER_DATABASE_URL"
AMQP_URL = "DISPATCHER_AMQP_URL"
MANAGEMENT_URL = "DISPATCHER_RABBITMQ_MANAGEMENT_URL"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Servers:
    """A running PostgreSQL and a running RabbitMQ. All URLs include the password; `management_url` ends without `/api`.
    If `owned`, the servers stop when the process exits for which they were started."""

    database_url: str
    amqp_url: str
    management_url: str
    folder: Path
    owned: bool
    postgres_source: str
    rabbitmq_source: str

    def environment(self) -> dict[str, str]:
        return {DATABASE_URL: self.database_url, AMQP_URL: self.amqp_url, MANAGEMENT_URL: self.management_url}


@dataclass(frozen=True, slots=True)
class ServersStatus:
    """The state of a server folder: the servers that were last started, unless they were stopped, and the pids of the
    running processes by name, including the keeper."""

    servers: Servers | None
    pids: dict[str, int]
    log_folder: Path

    @property
    def running(self) -> bool:
        """Whether every private server of the folder is running. There is none if environment variables name both
        servers."""
        if self.servers is None:
            return False
        wanted = set()
        if not _is_named(self.servers.postgres_source):
            wanted |= {"keeper", postgres.NAME}
        if not _is_named(self.servers.rabbitmq_source):
            wanted |= {"keeper", rabbitmq.EPMD, rabbitmq.NAME}
        return wanted <= self.pids.keys()


def start(
    folder: Path,
    *,
    progress: Progress,
    owner_pid: int | None,
    postgres_settings: Mapping[str, str] = MappingProxyType({}),
) -> Servers:
    """Starts the servers and waits until they are ready, or returns those that already run in the folder without an
    owner.

    The folder keeps data, logs and secrets for the next start. When the process `owner_pid` exits, even by a crash, the
    servers stop; if None, they run until `stop`. `progress` may be called by other threads. Raises ServerUnavailable if
    a server did not start, and then leaves none running; or if servers already run in the folder, and they or this call
    have an owner.
    """
    folder = folder.absolute()
    cache.make_writable(folder, "Set a different folder for the private servers.")
    processes = Processes(folder)
    with cache.locked(folder / "start.lock"):
        found = status(folder)
        if found.running and found.servers and found.pids and not processes.is_abandoned():
            return _reuse(found.servers, owner_pid)
        stop(folder)
        try:
            servers = _start_both(processes, _one_at_a_time(progress), owner_pid, postgres_settings)
        except BaseException:
            stop(folder)
            raise
        keeper.replace_json(folder / "servers.json", {**asdict(servers), "folder": str(folder)})
        return servers


def stop(folder: Path) -> list[str]:
    """Stops the private servers of the folder and waits until every process has exited. Idempotent. Returns the servers
    that were running. Data, passwords and ports are kept for the next start."""
    folder = folder.absolute()
    stopped = Processes(folder).stop()
    (folder / "servers.json").unlink(missing_ok=True)
    return stopped


def status(folder: Path) -> ServersStatus:
    folder = folder.absolute()
    processes = Processes(folder)
    pids = processes.running()
    if identity := processes.keeper():
        pids["keeper"] = identity.pid
    return ServersStatus(_recorded(folder), pids, folder / "log")


@contextmanager
def private_servers(
    folder: Path,
    progress: Progress = lambda _: None,
    *,
    postgres_settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Servers]:
    """Starts servers, and stops them at the end of the `with` block. They also stop if this process is killed."""
    servers = start(folder, progress=progress, owner_pid=os.getpid(), postgres_settings=postgres_settings)
    try:
        yield servers
    finally:
        stop(folder)


def _start_both(
    processes: Processes, progress: Progress, owner_pid: int | None, postgres_settings: Mapping[str, str]
) -> Servers:
    """Starts both servers at the same time. If an environment variable names a server, uses that server instead."""
    database_url = _named(DATABASE_URL, processes.folder)
    amqp_url = _named(AMQP_URL, processes.folder)
    if not (database_url and amqp_url):
        processes.spawn_keeper(owner_pid)
    disposable = owner_pid is not None
    with ThreadPoolExecutor(2, thread_name_prefix="private-server") as pool:
        database = pool.submit(_database, database_url, processes, progress, postgres_settings)
        broker = pool.submit(_broker, amqp_url, processes, progress, disposable=disposable)
        try:
            postgres_url, postgres_source = database.result()
            broker_url, management_url, rabbitmq_source = broker.result()
        except BaseException:
            # Stop both servers now. Otherwise, the end of the `with` block would wait until the other server has
            # started.
            processes.stop()
            raise
    return Servers(
        database_url=postgres_url,
        amqp_url=broker_url,
        management_url=management_url,
        folder=processes.folder,
        owned=disposable,
        postgres_source=postgres_source,
        rabbitmq_source=rabbitmq_source,
    )


def _database(
    named: str | None, processes: Processes, progress: Progress, settings: Mapping[str, str]
) -> tuple[str, str]:
    """Starts PostgreSQL, unless `named` is the URL of an existing server. Returns the URL, and where the server comes
    from."""
    if named:
        return named, _source(DATABASE_URL)
    access, source = postgres.start(processes, progress, settings)
    return access.url, source


def _broker(named: str | None, processes: Processes, progress: Progress, *, disposable: bool) -> tuple[str, str, str]:
    """Starts RabbitMQ, unless `named` is the URL of an existing server. Returns the URLs of AMQP and of the management
    API, and where the server comes from."""
    if not named:
        (access,), source = rabbitmq.start(processes, progress, disposable=disposable)
        return access.amqp_url, access.management_url, source
    return named, os.environ.get(MANAGEMENT_URL) or guess_management_url(named), _source(AMQP_URL)


def guess_management_url(amqp_url: str) -> str:
    """Converts AMQP URLs, separated by commas, to the URLs of the management APIs, with RabbitMQ's default ports."""
    return ",".join(map(_management_url_of, addresses(amqp_url)))


def _management_url_of(amqp_url: str) -> str:
    parts = urlsplit(amqp_url)
    credentials = parts.netloc.rpartition("@")[0] or "guest:guest"
    host = parts.hostname or "localhost"
    scheme, port = ("https", 15671) if parts.scheme == "amqps" else ("http", 15672)
    return f"{scheme}://{credentials}@{f'[{host}]' if ':' in host else host}:{port}"


def _named(variable: str, folder: Path) -> str | None:
    """The URL of an existing server, from the environment variable. None for the URL of this folder's own private
    server, which an earlier `dispatcher dev up` printed."""
    url = os.environ.get(variable)
    own = {postgres.known_url(folder), rabbitmq.known_url(folder)}
    return url if url and url not in own else None


def _source(variable: str) -> str:
    return f"set in {variable}"


def _is_named(source: str) -> bool:
    return source in (_source(DATABASE_URL), _source(AMQP_URL))


def _reuse(servers: Servers, owner_pid: int | None) -> Servers:
    """The running servers, if the caller may use them: they have no owner, and `owner_pid` is None."""
    if owner_pid is None and not servers.owned:
        return servers
    folder = servers.folder
    remedy = f"Stop them with `dispatcher dev down --folder {quote(str(folder))}`, or use a different folder."
    if servers.owned:
        remedy += " They also stop when the program that started them, such as a demo, exits."
    raise ServerUnavailable(f"private servers are already running in {folder}.", remedy=remedy)


def _recorded(folder: Path) -> Servers | None:
    """The servers that were last started in the folder; None if they were stopped, or never started."""
    try:
        fields = json.loads((folder / "servers.json").read_text())
    except FileNotFoundError:
        return None
    return Servers(**{**fields, "folder": Path(fields["folder"])})


def _one_at_a_time(progress: Progress) -> Progress:
    """Wraps `progress`, so that several threads may call the result at the same time."""
    lock = Lock()

    def report(text: str) -> None:
        with lock:
            progress(text)

    return report
