"""The adversary's actions on a cluster. Each returns when the cluster is complete again.

Whatever an HA manager must detect first (an ended primary, a hung standby), it detects after `NOTICE_SECONDS`. An
action that breaks RabbitMQ's quorum returns when the quorum was restored; until then no dispatcher can do anything.
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
"""Longer than RabbitMQ takes to detect a frozen node (`net_ticktime`), and longer than our heartbeats."""

ClusterAction = Callable[[Cluster, str, Random], float | None]
"""Takes the cluster and its send queue; returns when the quorum was restored, if it was lost."""


def kill_leader(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGKILL to the node that leads the send queue."""
    _end_node(cluster, queue, cluster.leader_of(queue), signal.SIGKILL)


def kill_follower(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGKILL to another node."""
    _end_node(cluster, queue, _follower(cluster, queue, random), signal.SIGKILL)


def restart_nodes(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGTERM to one node after the other, as an upgrade does; each is back before the next one stops."""
    for name in random.sample(list(cluster.nodes), len(cluster.nodes)):
        _end_node(cluster, queue, name, signal.SIGTERM)


def _end_node(cluster: Cluster, queue: str, name: str, number: signal.Signals) -> None:
    cluster.end(name, number)
    time.sleep(NOTICE_SECONDS)
    cluster.restart(name)
    _await_whole(cluster, queue)


def freeze_leader(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGSTOP and SIGCONT to the node that leads the send queue."""
    _freeze_node(cluster, queue, cluster.leader_of(queue))


def freeze_follower(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGSTOP and SIGCONT to another node."""
    _freeze_node(cluster, queue, _follower(cluster, queue, random))


def _freeze_node(cluster: Cluster, queue: str, name: str) -> None:
    """The other nodes remove it meanwhile. It does not notice, and stays partitioned until it is restarted."""
    cluster.freeze(name)
    time.sleep(FROZEN_SECONDS)
    cluster.thaw(name)
    time.sleep(NOTICE_SECONDS)
    _end_node(cluster, queue, name, signal.SIGKILL)


def lose_quorum(cluster: Cluster, queue: str, random: Random) -> float:
    """SIGKILL to two of three nodes, then a restart."""
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
    """SIGKILL to the primary. The standby is promoted, and the old primary becomes its standby."""
    cluster.end(cluster.primary)
    time.sleep(NOTICE_SECONDS)
    cluster.promote()
    cluster.rebuild_standby()


def freeze_primary(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGSTOP to the primary. It is fenced with SIGKILL, then as in `kill_primary`."""
    cluster.freeze(cluster.primary)
    time.sleep(NOTICE_SECONDS)
    cluster.end(cluster.primary)
    cluster.promote()
    cluster.rebuild_standby()


def stall_primary(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGSTOP to the primary, and SIGCONT before the standby is promoted."""
    cluster.freeze(cluster.primary)
    time.sleep(random.uniform(1, 2 * NOTICE_SECONDS))
    cluster.thaw(cluster.primary)


def switch_over(cluster: Cluster, queue: str, random: Random) -> None:
    """The primary shuts down cleanly and the standby is promoted, as in an upgrade."""
    cluster.end(cluster.primary, signal.SIGINT)
    cluster.promote()
    cluster.rebuild_standby()


def kill_standby(cluster: Cluster, queue: str, random: Random) -> None:
    """SIGKILL to the standby. Commits hang until they stop waiting for it; then it restarts and catches up."""
    cluster.end(cluster.standby)
    time.sleep(NOTICE_SECONDS)
    cluster.distrust_standby()
    time.sleep(random.uniform(1, NOTICE_SECONDS))
    cluster.restart(cluster.standby)
    cluster.trust_standby()


def freeze_standby(cluster: Cluster, queue: str, random: Random) -> None:
    """As `kill_standby`, with SIGSTOP and SIGCONT."""
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
