"""Shows the outcome of a storm, as a table and as JSON."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.cli.output import print_data
from dispatcher.cli.table import Table
from tests.chaos.actions import KILLS
from tests.chaos.plan import StormPlan
from tests.chaos.storm import StormOutcome

EXAMPLES: Final = 3
JUDGED: Final = (
    *("lost", "duplicates", "sent_after_cancelled", "too_late_wrongly", "uncertain"),
    *("held_on_wire", "held_at_edge", "held_without_ledger", "held_unexplained"),
)


def to_json(plan: StormPlan, outcome: StormOutcome) -> dict[str, Any]:
    """The outcome as one flat object, with `kills` and `actions` by kind."""
    verdict = outcome.verdict
    kills = {name: outcome.actions[name] for name in KILLS if outcome.actions.get(name)}
    return {
        **{name: getattr(plan, name) for name in ("seed", "policy", "provider", "channel", "hosts", "bundle")},
        **plan.settings,
        **{domain: " ".join(options) for domain, options in plan.ceilings.items()},
        **({"recipients_per_transaction": n} if (n := plan.recipients_per_transaction) else {}),
        "minutes": round(plan.seconds / 60, 2),
        "enqueued": verdict.enqueued,
        **{status: verdict.counts.get(status, 0) for status in ("sent", "failed", "held", "cancelled")},
        **{name: getattr(verdict, name) for name in JUDGED},
        **({"held_accepted": verdict.held_accepted, "settled": verdict.settled} if plan.events else {}),
        "kills": sum(kills.values()),
        "kills_by_kind": kills,
        "actions": dict(sorted(outcome.actions.items())),
        "seconds": round(outcome.seconds, 1),
        "violations": {name: len(found) for name, found in verdict.violations.items()},
        "good": verdict.is_good,
    }


def print_outcome(plan: StormPlan, outcome: StormOutcome) -> None:
    fields = to_json(plan, outcome)
    table = Table("name", "value")
    for name, value in fields.items():
        if name not in ("actions", "kills_by_kind", "violations", "good"):
            table.add(name, value)
    table.show()
    print_data("actions: " + ", ".join(f"{name} {times}" for name, times in fields["actions"].items()))
    for name, found in outcome.verdict.violations.items():
        print_data(f"WRONG: {name}: {len(found)}, such as {'; '.join(found[:EXAMPLES])}")
    print_data("The promise was kept." if outcome.verdict.is_good else "The promise was broken.")
