"""Private servers as a whole: PostgreSQL and RabbitMQ of one folder, started together, described, stopped.

    with private_servers(folder) as servers:      # the tests, the demo, benchmarks: gone with their owner
        connect(servers.database_url)

    start(folder, owner_pid=None, …)              # `dispatcher dev up`: they stay until `stop(folder)`

What the environment names is used and not started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
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
    """A PostgreSQL and a RabbitMQ that answer.

    Attributes:
        database_url: With the password; so are the others.
        amqp_url: With the vhost, percent-encoded.
        management_url: RabbitMQ's HTTP API, without `/api`.
        folder: The server folder; absolute.
        owned: Whether they end with their owner.
        postgres_source: In words, where PostgreSQL came from.
        rabbitmq_source: In words, where RabbitMQ came from.
    """

    database_url: str
    amqp_url: str
    management_url: str
    folder: Path
    owned: bool
    postgres_source: str
    rabbitmq_source: str

    def environment(self) -> dict[str, str]:
        """The settings that point our programs to these servers."""
        return {DATABASE_URL: self.database_url, AMQP_URL: self.amqp_url, MANAGEMENT_URL: self.management_url}


@dataclass(frozen=True, slots=True)
class ServersStatus:
    """What is known of a server folder.

    Attributes:
        servers: What was started there and has not been stopped; None if nothing was.
        pids: The processes that run now, by name, the keeper included.
        log_folder: Where their logs are.
    """

    servers: Servers | None
    pids: dict[str, int]
    log_folder: Path

    @property
    def running(self) -> bool:
        """Whether every private server of the folder runs; true, too, where the environment names all of them."""
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
    """Running servers, ready for clients; blocks until then. Ownerless ones that run already are returned as they are.

    Args:
        folder: For their data, logs and secrets; made if need be, kept from one start to the next.
        progress: Told what goes on, one line at a time; may be called from another thread.
        owner_pid: The process whose end, by any death, ends the servers; None: they stay until `stop`.
        postgres_settings: For a PostgreSQL that is started, besides ours.

    Raises:
        ServerUnavailable: They cannot be had, or belong to another owner; nothing is left running.
    """
    folder = folder.absolute()
    cache.make_writable(folder, "Name another folder for the private servers.")
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
    """End the private servers of the folder and wait until every process is gone; harmless when nothing runs.

    Returns the names of those that ran. Data, passwords and ports stay for the next start.
    """
    folder = folder.absolute()
    stopped = Processes(folder).stop()
    (folder / "servers.json").unlink(missing_ok=True)
    return stopped


def status(folder: Path) -> ServersStatus:
    """What runs in the folder now."""
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
    """Servers that end with the block, and with this process should it be killed inside.

    Raises:
        ServerUnavailable: As `start` does.
    """
    servers = start(folder, progress=progress, owner_pid=os.getpid(), postgres_settings=postgres_settings)
    try:
        yield servers
    finally:
        stop(folder)


def _start_both(
    processes: Processes, progress: Progress, owner_pid: int | None, postgres_settings: Mapping[str, str]
) -> Servers:
    """Take each server from the environment, or start it; the two at the same time."""
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
            processes.stop()  # so that the other one need not be awaited
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
    """PostgreSQL's URL and source."""
    if named:
        return named, _source(DATABASE_URL)
    access, source = postgres.start(processes, progress, settings)
    return access.url, source


def _broker(named: str | None, processes: Processes, progress: Progress, *, disposable: bool) -> tuple[str, str, str]:
    """RabbitMQ's two URLs and its source."""
    if not named:
        (access,), source = rabbitmq.start(processes, progress, disposable=disposable)
        return access.amqp_url, access.management_url, source
    return named, os.environ.get(MANAGEMENT_URL) or guess_management_url(named), _source(AMQP_URL)


def guess_management_url(amqp_url: str) -> str:
    """The HTTP API beside each AMQP server, if it is where RabbitMQ puts it by default."""
    return ",".join(map(_management_url_beside, addresses(amqp_url)))


def _management_url_beside(amqp_url: str) -> str:
    parts = urlsplit(amqp_url)
    credentials = parts.netloc.rpartition("@")[0] or "guest:guest"
    host = parts.hostname or "localhost"
    scheme, port = ("https", 15671) if parts.scheme == "amqps" else ("http", 15672)
    return f"{scheme}://{credentials}@{f'[{host}]' if ':' in host else host}:{port}"


def _named(variable: str, folder: Path) -> str | None:
    """What the environment names, unless it names the very server of this folder, by `dev up` of an earlier hour."""
    url = os.environ.get(variable)
    own = {postgres.known_url(folder), rabbitmq.known_url(folder)}
    return url if url and url not in own else None


def _source(variable: str) -> str:
    return f"named in {variable}"


def _is_named(source: str) -> bool:
    return source in (_source(DATABASE_URL), _source(AMQP_URL))


def _reuse(servers: Servers, owner_pid: int | None) -> Servers:
    """Servers that run already, if they may be had."""
    if owner_pid is None and not servers.owned:
        return servers
    raise ServerUnavailable(
        f"private servers already run in {servers.folder}.",
        remedy="Wait for the program that they belong to, stop them (dispatcher dev down), or use another folder.",
    )


def _recorded(folder: Path) -> Servers | None:
    """What the last start in the folder returned, unless it was stopped."""
    try:
        fields = json.loads((folder / "servers.json").read_text())
    except FileNotFoundError:
        return None
    return Servers(**{**fields, "folder": Path(fields["folder"])})


def _one_at_a_time(progress: Progress) -> Progress:
    """The same, for two threads: their lines do not mix."""
    lock = Lock()

    def speak(words: str) -> None:
        with lock:
            progress(words)

    return speak
