"""Three RabbitMQ nodes, and a PostgreSQL primary with a synchronous standby, which a storm may kill and freeze.

`PostgresPair` is also the HA manager, like Patroni: it fences a primary before it promotes the standby.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg

from dispatcher.dev import keeper, postgres, rabbitmq
from dispatcher.dev.keeper import Plan, descendants
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import Servers
from tests.supervisor.program import eventually

NODES: Final = 3
MEMBERS: Final = ("postgres-1", "postgres-2")
SETTINGS: Final = {
    "shared_buffers": "64MB",
    "wal_keep_size": "1GB",  # enough for a standby to catch up after it was down for a while
    "wal_retrieve_retry_interval": "500ms",  # the longest time until a standby notices its promotion
}
BOOT_SECONDS: Final = 180.0
LOOK_SECONDS: Final = 0.1

P = TypeVar("P", bound="PostgresPair")


class PostgresPair:
    """A primary and a standby, which is synchronous from the start. `primary` and `standby` are their names now; with
    `url`, a client reaches the primary."""

    def __init__(self, processes: Processes, progress: Callable[[str], None]) -> None:
        self._processes = processes
        self._progress = progress
        self._plans: dict[str, Plan] = {}
        self.primary, self.standby = MEMBERS
        first, self.source = postgres.start(processes, progress, SETTINGS, name=self.primary)
        self._members = {self.primary: first}
        self.rebuild_standby()
        hosts = ",".join(f"127.0.0.1:{self._members[name].port}" for name in MEMBERS)
        login = f"{postgres.ROLE}:{first.password}"
        self.url = f"postgresql://{login}@{hosts}/{postgres.DATABASE}?target_session_attrs=read-write"

    def freeze(self, name: str) -> None:
        _send(self._family(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        _send(self._family(name), signal.SIGCONT)

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a server, which stays down until `restart`. SIGKILL also ends the server's children and frozen
        processes."""
        # Starting any server also starts all other servers that have a plan file.
        path = self._processes.folder / "plan" / f"{name}.json"
        self._plans[name] = json.loads(path.read_text())
        path.unlink()
        family = self._family(name)
        _send(family if number == signal.SIGKILL else family[:1], number)
        gone = [identity for pid in family if (identity := keeper.identify(pid))]
        self._await(lambda: not any(map(keeper.is_alive, gone)), f"the end of {name}")
        self._await(lambda: name not in self._processes.running(), f"the keeper's record that {name} has ended")

    def restart(self, name: str) -> None:
        self._processes.launch(name, self._plans.pop(name))

    def promote(self) -> None:
        """Promote the standby. Before the call, the primary must be fenced: it must have ended and must not restart as
        a primary."""
        assert self.primary not in self._processes.running(), "the primary is not fenced"
        with self.session(self.standby) as session:
            # The new primary has no standby yet. If its settings required one, commits would wait.
            session.execute("alter system set synchronous_standby_names = ''")
            session.execute("select pg_reload_conf()")
            session.execute("select pg_promote(wait => false)")
        self._await(lambda: self.says(self.standby, "select not pg_is_in_recovery()"), "the promotion")
        self.primary, self.standby = self.standby, self.primary

    def rebuild_standby(self) -> None:
        self._plans.pop(self.standby, None)
        primary = self._members[self.primary]
        access, _ = postgres.start(self._processes, self._progress, SETTINGS, name=self.standby, primary=primary)
        self._members[self.standby] = access
        self.trust_standby()

    def distrust_standby(self) -> None:
        """Stop commits from waiting for the standby. Commits that already wait complete now."""
        self._set_synchronous("")

    def trust_standby(self) -> None:
        streams = "select count(*) = 1 from pg_stat_replication where state = 'streaming'"
        self._await(lambda: self.says(self.primary, streams), f"the stream to {self.standby}")
        self._set_synchronous(f'ANY 1 ("{self.standby}")')
        quorum = "select count(*) = 1 from pg_stat_replication where sync_state = 'quorum'"
        self._await(lambda: self.says(self.primary, quorum), f"{self.standby} as a synchronous standby")

    def _set_synchronous(self, names: str) -> None:
        with self.session(self.primary) as session:
            session.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
            session.execute("select pg_reload_conf()")

    def says(self, name: str, question: str) -> bool:
        with suppress(psycopg.OperationalError), self.session(name) as session:
            row = session.execute(question.encode()).fetchone()
            return bool(row and row[0])
        return False

    @contextmanager
    def session(self, name: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self._members[name].url, autocommit=True, connect_timeout=2) as session:
            yield session

    def _family(self, name: str) -> list[int]:
        pid = self._processes.running()[name]
        return [pid, *descendants(pid)]

    def _await(self, condition: Callable[[], bool], what: str, looks_every: float = LOOK_SECONDS) -> None:
        def holds() -> bool:
            time.sleep(looks_every)
            return condition()

        eventually(holds, what, seconds=BOOT_SECONDS)


class Cluster(PostgresPair):
    def __init__(self, processes: Processes, progress: Callable[[str], None]) -> None:
        accesses, rabbitmq_source = rabbitmq.start(processes, progress, disposable=True, nodes=NODES)
        self.nodes = dict(zip(rabbitmq.names_of(NODES), accesses, strict=True))
        super().__init__(processes, progress)
        self.servers = Servers(
            database_url=self.url,
            amqp_url=",".join(access.amqp_url for access in accesses),
            management_url=",".join(access.management_url for access in accesses),
            folder=processes.folder,
            owned=True,
            postgres_source=self.source,
            rabbitmq_source=rabbitmq_source,
        )

    def leader_of(self, queue: str) -> str:
        node = self._queue(queue).get("leader")
        return next(name for name, access in self.nodes.items() if access.node == node)

    def await_nodes(self) -> None:
        self._await(lambda: set(self._joined()) == {NODES}, f"{NODES} nodes of RabbitMQ", looks_every=0.5)

    def await_quorum(self) -> None:
        self._await(lambda: max(self._joined()) > NODES // 2, "a quorum of RabbitMQ's nodes")

    def _joined(self) -> list[int]:
        """For each node, the number of nodes that run with it in one cluster."""
        return [rabbitmq.running_nodes(access) for access in self.nodes.values()]

    def await_replicas(self, queue: str) -> None:
        self._await(lambda: len(self._queue(queue).get("online", ())) == NODES, f"the members of {queue}", 0.5)

    def _queue(self, queue: str) -> dict[str, Any]:
        for access in self.nodes.values():
            status, found = rabbitmq.ask(access, f"/api/queues/%2F/{queue}")
            if status == 200:
                return dict(found)
        return {}


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def private(kind: type[P], folder: Path, progress: Callable[[str], None]) -> Iterator[P]:
    """Run a pair or a cluster for the block. If this process is killed inside the block, the servers end, too."""
    folder.mkdir(mode=0o700)
    processes = Processes(folder.absolute())
    processes.spawn_keeper(os.getpid())
    try:
        yield kind(processes, progress)
    finally:
        processes.stop()
