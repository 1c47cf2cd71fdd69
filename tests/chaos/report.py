"""A storm's outcome, for people and for programs."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.cli.output import print_data
from dispatcher.cli.table import Table
from tests.chaos.deeds import KILLS
from tests.chaos.storm import Outcome, Plan

EXAMPLES: Final = 3


def to_json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Everything as one flat object, `kills` and `deeds` by kind."""
    verdict = outcome.verdict
    kills = {name: outcome.deeds[name] for name in KILLS if outcome.deeds.get(name)}
    return {
        "seed": plan.seed,
        "policy": plan.policy,
        "provider": plan.provider,
        "hosts": plan.hosts,
        "bundle": plan.bundle,
        "minutes": round(plan.seconds / 60, 2),
        "enqueued": verdict.enqueued,
        **{status: verdict.counts.get(status, 0) for status in ("sent", "failed", "held")},
        "lost": verdict.lost,
        "duplicates": verdict.duplicates,
        "uncertain": verdict.uncertain,
        "held_on_wire": verdict.held_on_wire,
        "held_at_edge": verdict.held_at_edge,
        "held_without_ledger": verdict.held_without_ledger,
        "held_unexplained": verdict.held_unexplained,
        "kills": sum(kills.values()),
        "kills_by_kind": kills,
        "deeds": dict(sorted(outcome.deeds.items())),
        "seconds": round(outcome.seconds, 1),
        "violations": {name: len(found) for name, found in verdict.violations.items()},
        "good": verdict.is_good,
    }


def print_outcome(plan: Plan, outcome: Outcome) -> None:
    """The same as a table, with examples of what is wrong."""
    told = to_json(plan, outcome)
    table = Table("what", "figure")
    for name, value in told.items():
        if name not in ("deeds", "kills_by_kind", "violations", "good"):
            table.add(name, value)
    table.show()
    print_data("deeds: " + ", ".join(f"{name} {times}" for name, times in told["deeds"].items()))
    for name, found in outcome.verdict.violations.items():
        print_data(f"WRONG: {name}: {len(found)}, such as {'; '.join(found[:EXAMPLES])}")
    print_data("The books balance." if outcome.verdict.is_good else "The books do not balance.")
