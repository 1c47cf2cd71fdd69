"""Shows the outcome of a storm."""

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


def print_outcome(plan: StormPlan, outcome: StormOutcome) -> None:
    verdict, actions = outcome.verdict, outcome.actions
    fields: dict[str, Any] = {
        **{name: getattr(plan, name) for name in ("seed", "policy", "provider", "channel", "hosts", "bundle")},
        **plan.settings,
        **{domain: " ".join(options) for domain, options in plan.ceilings.items()},
        **({"recipients_per_transaction": n} if (n := plan.recipients_per_transaction) else {}),
        "minutes": round(plan.seconds / 60, 2),
        "enqueued": verdict.enqueued,
        **{status: verdict.counts.get(status, 0) for status in ("sent", "failed", "held", "cancelled")},
        **{name: getattr(verdict, name) for name in JUDGED},
        **({"held_accepted": verdict.held_accepted, "settled": verdict.settled} if plan.events else {}),
        "kills": sum(actions.get(name, 0) for name in KILLS),
        "seconds": round(outcome.seconds, 1),
    }
    table = Table("name", "value")
    for name, value in fields.items():
        table.add(name, value)
    table.show()
    print_data("actions: " + ", ".join(f"{name} {times}" for name, times in sorted(actions.items())))
    for name, found in verdict.violations.items():
        print_data(f"WRONG: {name}: {len(found)}, such as {'; '.join(found[:EXAMPLES])}")
    print_data("The promise was kept." if verdict.is_good else "The promise was broken.")
