"""A storm on a cluster: `./run chaos --cluster`. Causes its faults, one at a time, and measures the standstill after
each: the longest time without an acceptance by the provider, which begins before the next action.

An action blocks until all servers of the cluster run again, so it runs in its own thread. Where an HA manager must
first detect a fault, the action waits for `NOTICE_SECONDS`.
"""

from __future__ import annotations

import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

from dispatcher.broker.topology import Topology
from dispatcher.cli.output import print_data
from dispatcher.cli.table import Table
from dispatcher.dev.acceptance_ledger import read_ledger
from tests.acceptance.outages import StoppableServers
from tests.chaos.cluster import Cluster, private
from tests.chaos.outages import Outages
from tests.chaos.plan import Ground, StormPlan

DECK: Final[Mapping[str, int]] = {
    "kill worker": 3,
    "kill relay": 2,
    "kill producer": 2,
    "freeze worker": 1,
    "end worker": 1,
    "cut sessions": 1,
    "inject duplicates": 1,
}
"""The actions on our own processes, which happen between and during the cluster's faults, with pauses of
`PAUSE_SECONDS`."""
DECK_OF_HOSTS: Final[Mapping[str, int]] = {**DECK, "kill parent": 1, "kill host": 1}
"""The same actions for a storm with a second host. A host that starts while a node is frozen may take a while."""
PAUSE_SECONDS: Final = (4.0, 12.0)
CALM_SECONDS: Final = 6.0
LAST_SECONDS: Final = 40.0
MAX_STANDSTILL_SECONDS: Final = 15.0
NOTICE_SECONDS: Final = 3.0
FROZEN_SECONDS: Final = 25.0
"""How long a server is frozen: longer than RabbitMQ takes to detect a frozen node (`net_ticktime`), and longer than our
heartbeat interval."""

ClusterAction = Callable[[Cluster, str, Random], float | None]
"""Takes the cluster and the send queue. Returns the time at which the quorum was restored; None if the quorum was not
lost."""
Pick = Callable[[Cluster, str, Random], str]
"""Takes the cluster and the send queue. Returns the name of a node: the leader of the queue, or another one."""


def kill_node(pick: Pick) -> ClusterAction:
    return lambda cluster, queue, random: _end_node(cluster, queue, pick(cluster, queue, random), signal.SIGKILL)


def freeze_node(pick: Pick) -> ClusterAction:
    """An action that freezes, thaws and restarts a node. The other nodes remove the frozen node from the cluster. After
    the thaw, the node does not notice this and stays partitioned until it is restarted."""

    def freeze(cluster: Cluster, queue: str, random: Random) -> None:
        name = pick(cluster, queue, random)
        cluster.freeze(name)
        time.sleep(FROZEN_SECONDS)
        cluster.thaw(name)
        time.sleep(NOTICE_SECONDS)
        _end_node(cluster, queue, name, signal.SIGKILL)

    return freeze


def restart_nodes(cluster: Cluster, queue: str, random: Random) -> None:
    for name in random.sample(list(cluster.nodes), len(cluster.nodes)):
        _end_node(cluster, queue, name, signal.SIGTERM)


def _end_node(cluster: Cluster, queue: str, name: str, number: signal.Signals) -> None:
    cluster.end(name, number)
    time.sleep(NOTICE_SECONDS)
    cluster.restart(name)
    _await_whole(cluster, queue)


def lose_quorum(cluster: Cluster, queue: str, random: Random) -> float:
    names = random.sample(list(cluster.nodes), 2)
    for name in names:
        cluster.end(name)
    time.sleep(NOTICE_SECONDS)
    for name in names:
        cluster.restart(name)
    cluster.await_quorum()
    quorum_since = time.time()
    _await_whole(cluster, queue)
    return quorum_since


def replace_primary(*, is_frozen: bool = False, number: signal.Signals = signal.SIGKILL) -> ClusterAction:
    """An action that ends the primary. The standby is promoted, and the old primary becomes the new standby. SIGINT is
    a clean shutdown, as in an upgrade, which the HA manager need not detect."""

    def replace(cluster: Cluster, queue: str, random: Random) -> None:
        if is_frozen:
            cluster.freeze(cluster.primary)
            time.sleep(NOTICE_SECONDS)
        cluster.end(cluster.primary, number)
        if number is signal.SIGKILL and not is_frozen:
            time.sleep(NOTICE_SECONDS)
        cluster.promote()
        cluster.rebuild_standby()

    return replace


def stall_primary(cluster: Cluster, queue: str, random: Random) -> None:
    cluster.freeze(cluster.primary)
    time.sleep(random.uniform(1, 2 * NOTICE_SECONDS))
    cluster.thaw(cluster.primary)


def miss_standby(leave: Callable[[Cluster, str], None], come_back: Callable[[Cluster, str], None]) -> ClusterAction:
    def miss(cluster: Cluster, queue: str, random: Random) -> None:
        leave(cluster, cluster.standby)
        time.sleep(NOTICE_SECONDS)
        cluster.distrust_standby()
        time.sleep(random.uniform(1, NOTICE_SECONDS))
        come_back(cluster, cluster.standby)
        cluster.trust_standby()

    return miss


def _leader(cluster: Cluster, queue: str, random: Random) -> str:
    return cluster.leader_of(queue)


def _follower(cluster: Cluster, queue: str, random: Random) -> str:
    leader = cluster.leader_of(queue)
    return random.choice([name for name in cluster.nodes if name != leader])


def _await_whole(cluster: Cluster, queue: str) -> None:
    cluster.await_nodes()
    cluster.await_replicas(queue)


CLUSTER_ACTIONS: Final[Mapping[str, ClusterAction]] = {
    "kill leading node": kill_node(_leader),
    "kill following node": kill_node(_follower),
    "restart nodes in turn": restart_nodes,
    "freeze leading node": freeze_node(_leader),
    "freeze following node": freeze_node(_follower),
    "lose quorum": lose_quorum,
    "kill primary": replace_primary(),
    "freeze primary": replace_primary(is_frozen=True),
    "stall primary": stall_primary,
    "switch over": replace_primary(number=signal.SIGINT),
    "kill standby": miss_standby(Cluster.end, Cluster.restart),
    "freeze standby": miss_standby(Cluster.freeze, Cluster.thaw),
}


@dataclass(frozen=True, slots=True)
class ClusterFault:
    """An action and its time, in Unix seconds; `whole_at`: when all servers of the cluster were running again."""

    name: str
    began_at: float
    whole_at: float | None = None
    quorum_since: float | None = None


@dataclass(frozen=True, slots=True)
class Standstill:
    """The longest time without an acceptance after a fault. If the quorum was lost, `seconds_after_quorum` is measured
    only after the quorum was restored."""

    fault: ClusterFault
    seconds: float
    seconds_after_quorum: float

    @property
    def is_too_long(self) -> bool:
        return self.seconds_after_quorum > MAX_STANDSTILL_SECONDS


class FaultSchedule(Outages):
    """Runs the actions in a random order that the seed determines. Every action runs once before any action runs again.
    `faults` are those that have started."""

    def __init__(
        self,
        cluster: Cluster,
        queue: str,
        *,
        seed: int,
        seconds: float,
        names: Sequence[str] | None,
        tell: Callable[[str], None],
    ) -> None:
        """The first `step` starts the schedule. If `names` are given, it runs exactly these actions, once each. Some
        actions disturb the leader of the queue."""
        super().__init__(StoppableServers(cluster.servers), ())
        self.faults: list[ClusterFault] = []
        self.ended_at = 0.0
        self._cluster = cluster
        self._queue = queue
        self._seconds = seconds
        self._random = Random(f"the faults of {seed}")
        self._order = list(names) if names else self._random.sample(list(CLUSTER_ACTIONS), len(CLUSTER_ACTIONS))
        self._repeats = names is None
        self._tell = tell
        self._next_at: float | None = None
        self._last_at = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fault")
        self._action: Future[float | None] | None = None

    def is_away(self, name: str) -> bool:  # noqa: ARG002 - a fault may affect all servers
        return self._action is not None

    @property
    def is_over(self) -> bool:
        return self._action is None

    def heal(self) -> None:
        self._last_at = 0.0
        self.ended_at = time.time()

    def step(self) -> None:
        """Record the end of a finished action, and start the next action if it is due. Raises the exception of a failed
        action."""
        now = time.monotonic()
        if self._next_at is None:
            self._next_at, self._last_at = now + CALM_SECONDS, now + self._seconds - LAST_SECONDS
        if self._action is not None and self._action.done():
            quorum_since = self._action.result()
            self.faults[-1] = replace(self.faults[-1], whole_at=time.time(), quorum_since=quorum_since)
            self._action = None
            self._next_at = now + CALM_SECONDS
            self._tell(f"whole again after {time.time() - self.faults[-1].began_at:.0f} s: {self.faults[-1].name}")
        if self._action is None and self._next_at <= now < self._last_at and self._order:
            self._begin(self._order.pop(0))

    def _begin(self, name: str) -> None:
        if self._repeats:
            self._order.append(name)
        self._tell(name)
        self.faults.append(ClusterFault(name, time.time()))
        self._action = self._pool.submit(CLUSTER_ACTIONS[name], self._cluster, self._queue, self._random)


def standstills(faults: Sequence[ClusterFault], accepted_at: Sequence[float], ended_at: float) -> list[Standstill]:
    """The standstill after each fault, from the sorted times at which the provider accepted an email."""
    ends = [*(fault.began_at for fault in faults[1:]), ended_at]
    return [
        Standstill(
            fault,
            _longest(accepted_at, fault.began_at, end, ended_at),
            _longest(accepted_at, fault.quorum_since or fault.began_at, end, ended_at),
        )
        for fault, end in zip(faults, ends, strict=True)
    ]


def _longest(accepted_at: Sequence[float], since: float, until: float, ended_at: float) -> float:
    """The longest time without an acceptance that begins between `since` and `until`. It may end after `until`."""
    first, last = bisect_right(accepted_at, since), bisect_right(accepted_at, until)
    moments = [since, *accepted_at[first : last + 1]]
    if last == len(accepted_at):
        moments.append(ended_at)
    return max((min(late, ended_at) - early for early, late in pairwise(moments)), default=0.0)


@contextmanager
def cluster_ground(
    plan: StormPlan, place: Path, progress: Callable[[str], None], names: Sequence[str] | None = None
) -> Iterator[Ground]:
    topology = Topology("chaos", "chaos.send", "chaos.dlq")
    with private(Cluster, place / "servers", progress) as cluster:
        faults = FaultSchedule(
            cluster, topology.queue, seed=plan.seed, seconds=plan.seconds, names=names, tell=progress
        )
        stoppable = StoppableServers(cluster.servers)
        yield Ground(stoppable, (), cluster.servers.database_url, topology, shares_broker=False, outages=faults)


def measured(faults: Outages | None, place: Path) -> list[Standstill]:
    """The standstill after each fault of a finished storm, from the ledger of the provider's double. Nothing if the
    storm was not on a cluster."""
    if not isinstance(faults, FaultSchedule):
        return []
    accepted_at = sorted(entry.accepted_at for entry in read_ledger(place / "double" / "ledger.jsonl").entries)
    return standstills(faults.faults, accepted_at, faults.ended_at)


def print_standstills(found: Sequence[Standstill]) -> None:
    table = Table("fault", "s without an acceptance", "since the quorum was back", "s until whole")
    for each in found:
        fault = each.fault
        after_quorum = round(each.seconds_after_quorum, 1) if fault.quorum_since else ""
        whole_after = round((fault.whole_at or fault.began_at) - fault.began_at, 1)
        table.add(fault.name, round(each.seconds, 1), after_quorum, whole_after)
    if found:
        table.show()
    for each in found:
        if each.is_too_long:
            print_data(f"WRONG: nothing was accepted for {each.seconds_after_quorum:.1f} s after: {each.fault.name}")
