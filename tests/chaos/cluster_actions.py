"""The adversary's actions on a cluster. Each action returns when all servers of the cluster run again.

If an HA manager must first detect a fault (an ended primary, a hung standby), the action waits for `NOTICE_SECONDS`. An
action that breaks RabbitMQ's quorum returns the time at which the quorum was restored; until then no dispatcher can
publish or consume.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from tests.chaos.cluster import Cluster

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
    """Send SIGTERM to each node in turn, as an upgrade does. A node runs again before the next node stops."""
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
    """An action that ends the primary. The standby is promoted, and the old primary becomes the new standby.

    Args:
        is_frozen: Whether the primary is first frozen for a while.
        number: The signal; SIGINT is a clean shutdown, as in an upgrade, which the HA manager need not detect.
    """

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
    """Freeze the primary, and thaw it before the standby is promoted."""
    cluster.freeze(cluster.primary)
    time.sleep(random.uniform(1, 2 * NOTICE_SECONDS))
    cluster.thaw(cluster.primary)


def miss_standby(leave: Callable[[Cluster, str], None], come_back: Callable[[Cluster, str], None]) -> ClusterAction:
    """An action that takes the standby away for a while. Commits hang until the primary no longer waits for the
    standby."""

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
"""Every action by name."""
