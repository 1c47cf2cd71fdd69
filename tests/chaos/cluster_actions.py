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


def kill_leader(cluster: Cluster, queue: str, random: Random) -> None:
    """Send SIGKILL to the node that leads the send queue."""
    _end_node(cluster, queue, cluster.leader_of(queue), signal.SIGKILL)


def kill_follower(cluster: Cluster, queue: str, random: Random) -> None:
    """Send SIGKILL to a node that does not lead the send queue."""
    _end_node(cluster, queue, _follower(cluster, queue, random), signal.SIGKILL)


def restart_nodes(cluster: Cluster, queue: str, random: Random) -> None:
    """Send SIGTERM to each node in turn, as an upgrade does. A node runs again before the next node stops."""
    for name in random.sample(list(cluster.nodes), len(cluster.nodes)):
        _end_node(cluster, queue, name, signal.SIGTERM)


def _end_node(cluster: Cluster, queue: str, name: str, number: signal.Signals) -> None:
    cluster.end(name, number)
    time.sleep(NOTICE_SECONDS)
    cluster.restart(name)
    _await_whole(cluster, queue)


def freeze_leader(cluster: Cluster, queue: str, random: Random) -> None:
    """Freeze the node that leads the send queue, and thaw it."""
    _freeze_node(cluster, queue, cluster.leader_of(queue))


def freeze_follower(cluster: Cluster, queue: str, random: Random) -> None:
    """Freeze a node that does not lead the send queue, and thaw it."""
    _freeze_node(cluster, queue, _follower(cluster, queue, random))


def _freeze_node(cluster: Cluster, queue: str, name: str) -> None:
    """Freeze, thaw and restart a node. The other nodes remove the frozen node from the cluster. After the thaw, the
    node does not notice this and stays partitioned until it is restarted."""
    cluster.freeze(name)
    time.sleep(FROZEN_SECONDS)
    cluster.thaw(name)
    time.sleep(NOTICE_SECONDS)
    _end_node(cluster, queue, name, signal.SIGKILL)


def lose_quorum(cluster: Cluster, queue: str, random: Random) -> float:
    """Send SIGKILL to two of three nodes, and restart both."""
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


def kill_primary(cluster: Cluster, queue: str, random: Random) -> None:
    """Send SIGKILL to the primary. The standby is promoted, and the old primary becomes the new standby."""
    cluster.end(cluster.primary)
    time.sleep(NOTICE_SECONDS)
    cluster.promote()
    cluster.rebuild_standby()


def freeze_primary(cluster: Cluster, queue: str, random: Random) -> None:
    """Freeze the primary, and fence it with SIGKILL. Then continue as in `kill_primary`."""
    cluster.freeze(cluster.primary)
    time.sleep(NOTICE_SECONDS)
    cluster.end(cluster.primary)
    cluster.promote()
    cluster.rebuild_standby()


def stall_primary(cluster: Cluster, queue: str, random: Random) -> None:
    """Freeze the primary, and thaw it before the standby is promoted."""
    cluster.freeze(cluster.primary)
    time.sleep(random.uniform(1, 2 * NOTICE_SECONDS))
    cluster.thaw(cluster.primary)


def switch_over(cluster: Cluster, queue: str, random: Random) -> None:
    """Shut down the primary cleanly and promote the standby, as in an upgrade."""
    cluster.end(cluster.primary, signal.SIGINT)
    cluster.promote()
    cluster.rebuild_standby()


def kill_standby(cluster: Cluster, queue: str, random: Random) -> None:
    """Send SIGKILL to the standby. Commits hang until the primary no longer waits for the standby, which then
    restarts."""
    cluster.end(cluster.standby)
    time.sleep(NOTICE_SECONDS)
    cluster.distrust_standby()
    time.sleep(random.uniform(1, NOTICE_SECONDS))
    cluster.restart(cluster.standby)
    cluster.trust_standby()


def freeze_standby(cluster: Cluster, queue: str, random: Random) -> None:
    """Freeze and thaw the standby. Otherwise like `kill_standby`."""
    cluster.freeze(cluster.standby)
    time.sleep(NOTICE_SECONDS)
    cluster.distrust_standby()
    time.sleep(random.uniform(1, NOTICE_SECONDS))
    cluster.thaw(cluster.standby)
    cluster.trust_standby()


def _follower(cluster: Cluster, queue: str, random: Random) -> str:
    leader = cluster.leader_of(queue)
    return random.choice([name for name in cluster.nodes if name != leader])


def _await_whole(cluster: Cluster, queue: str) -> None:
    cluster.await_nodes()
    cluster.await_replicas(queue)


CLUSTER_ACTIONS: Final[Mapping[str, ClusterAction]] = {
    "kill leading node": kill_leader,
    "kill following node": kill_follower,
    "restart nodes in turn": restart_nodes,
    "freeze leading node": freeze_leader,
    "freeze following node": freeze_follower,
    "lose quorum": lose_quorum,
    "kill primary": kill_primary,
    "freeze primary": freeze_primary,
    "stall primary": stall_primary,
    "switch over": switch_over,
    "kill standby": kill_standby,
    "freeze standby": freeze_standby,
}
"""Every action by name."""
