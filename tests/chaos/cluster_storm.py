"""A storm on a cluster: `./run chaos --cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dispatcher.broker.topology import Topology
from dispatcher.cli.output import print_data
from dispatcher.cli.table import Table
from dispatcher.dev.acceptance_ledger import read_ledger
from tests.acceptance.outages import StoppableServers
from tests.chaos.cluster import Cluster, private
from tests.chaos.faults import FaultSchedule, Standstill, standstills
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


@contextmanager
def cluster_ground(
    plan: StormPlan, place: Path, progress: Callable[[str], None], names: Sequence[str] | None = None
) -> Iterator[Ground]:
    """Run a cluster for this storm, with a schedule of faults: exactly `names`, or drawn by the seed."""
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


def to_json(found: Standstill) -> dict[str, Any]:
    return {
        "fault": found.fault.name,
        "standstill_seconds": round(found.seconds, 1),
        "standstill_seconds_after_quorum": round(found.seconds_after_quorum, 1),
        "whole_after_seconds": round((found.fault.whole_at or found.fault.began_at) - found.fault.began_at, 1),
    }


def print_standstills(found: Sequence[Standstill]) -> None:
    table = Table("fault", "s without an acceptance", "since the quorum was back", "s until whole")
    for each in found:
        _, seconds, after_quorum, whole_after = to_json(each).values()
        table.add(each.fault.name, seconds, after_quorum if each.fault.quorum_since else "", whole_after)
    if found:
        table.show()
    for each in found:
        if each.is_too_long:
            print_data(f"WRONG: nothing was accepted for {each.seconds_after_quorum:.1f} s after: {each.fault.name}")
