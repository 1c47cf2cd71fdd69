"""Dispatchers with one safety mechanism switched off. A storm that does not detect such a mutant proves nothing.

python -m tests.chaos.mutants NAME      runs `dispatcher run`, patched in this process and thus in its children
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.chaos.plan import StormPlan


@dataclass(frozen=True, slots=True)
class Mutant:
    """A switched-off safety mechanism.

    Attributes:
        switch_off: Patches the product in this process.
        deck: The actions against which the mechanism protects, each with its number of cards in the adversary's deck.
        setting: Further settings of the storm that help to detect the mutant.
        expected: The violation that the oracle must report.
    """

    switch_off: Callable[[], None]
    deck: Mapping[str, int]
    expected: str
    setting: Mapping[str, Any] = field(default_factory=dict)

    def apply_to(self, plan: StormPlan) -> StormPlan:
        command = (sys.executable, "-m", "tests.chaos.mutants", self.name)
        return replace(plan, command=command, deck=self.deck, **self.setting)

    @property
    def name(self) -> str:
        return next(name for name, mutant in MUTANTS.items() if mutant is self)


def _without_ledger() -> None:
    from dispatcher.host.ledger import Ledger

    def leaving(self: Any, *_: object, **__: object) -> int:
        slot: int = self._free.popleft()
        return slot

    def answered(*_: object, **__: object) -> None:
        pass

    Ledger.mark_on_wire = leaving  # type: ignore[method-assign]
    Ledger.mark_answered = answered  # type: ignore[method-assign]


def _alter(changes: Mapping[str, Mapping[str, str]]) -> None:
    """Replaces parts of statements, by the statement's name. Fails if a statement no longer contains a part."""
    from dispatcher.store import queries

    sections = dict(queries._sections())
    for name, parts in changes.items():
        for part, instead in parts.items():
            assert part in sections[name], f"{name} has a different condition"
            sections[name] = sections[name].replace(part, instead)
    vars(queries)["_sections"] = lambda: sections


_UNFENCED: Final = {
    "record": {"and e.lease_token = r.lease_token)": ")"},
    "renew": {
        "(e.email_id, e.lease_token, e.status) in": "(e.email_id, e.status) in",
        "select w.email_id, w.lease_token, 'sending'": "select w.email_id, 'sending'",
    },
    "release": {"e.lease_token = w.lease_token and ": ""},
}


def _with_trusted_clock() -> None:
    """The relay uses only PostgreSQL's clock for the end of a lease, without checking a steady clock."""
    from dispatcher.recovery.unrenewed import UnrenewedLeases

    def has_expired(_: Any, lease: Any, **__: object) -> bool:
        return bool(lease.has_run_out)

    UnrenewedLeases.has_expired = has_expired  # type: ignore[assignment, method-assign]


MUTANTS: Final[Mapping[str, Mutant]] = {
    "ledger-off": Mutant(_without_ledger, {"kill worker": 4, "kill host": 1}, "accepted more than once"),
    "fencing-off": Mutant(
        partial(_alter, _UNFENCED),
        {"freeze worker": 1},
        "accepted more than once",
        # The provider is slow, so a frozen worker has leased emails that it has not begun to send. Other workers lease
        # these emails immediately, and are still sending them when the frozen worker wakes.
        {"latency_ms": 1200, "connections": 4, "hosts": 1, "workers": 4, "rate": 10.0, "pause_seconds": (1.2, 2.2)},
    ),
    "clock-trusted": Mutant(
        _with_trusted_clock,
        {"step clock": 1},
        "leases recovered without need",
        # The provider is slow, so workers have leases at every change of the clock.
        {"latency_ms": 1200, "rate": 30.0, "pause_seconds": (1.0, 2.0)},
    ),
    "cancel-ignored": Mutant(
        partial(_alter, {"lease": {"e.status = 'pending'": "e.status in ('pending', 'cancelled')"}}),
        {"cancel": 2, "inject duplicates": 2},
        'sent after "cancelled"',
        # More emails wait, so more of them are cancelled.
        {"latency_ms": 300, "connections": 2, "rate": 60.0},
    ),
}
"""The mutants by name. For each of them, `./run chaos --mutant NAME` must exit with code 1."""


def main() -> int:
    from dispatcher.cli.main import main as dispatcher

    MUTANTS[sys.argv[1]].switch_off()
    return dispatcher(["run"])


if __name__ == "__main__":
    sys.exit(main())
