"""The protocol keeps its guarantees in every reachable state. If any single rule is removed, the protocol breaks a
guarantee."""

from __future__ import annotations

from typing import Any, Final

import pytest

from dispatcher.domain.status import TRANSITIONS, OnUncertain, Status
from tests.model.mutants import MUTANTS
from tests.model.protocol import ALL_FAULTS, Fault, Rules
from tests.model.search import Found, search

DEATHS: Final = frozenset({Fault.DEATH, Fault.HOST, Fault.RELAY, Fault.REPLY})
LOST_OWNERS: Final = frozenset({Fault.HOST, Fault.RELAY})
COPIES: Final = frozenset({Fault.COPY})
EVENTS: Final = frozenset({Fault.EVENT})
REFUSALS: Final = frozenset({Fault.REFUSAL, Fault.RELAY})
PROMOTED: Final = frozenset({Fault.PROMOTION})
CHANGES: Final = frozenset({Fault.CANCEL, Fault.RESCHEDULE})
TIMING: Final = CHANGES | {Fault.EXPIRY}
CEILINGS: Final = frozenset({Fault.CEILING, Fault.RELAY, Fault.CANCEL})


def searched(policy: OnUncertain, faults: frozenset[Fault], most_states: int | None = None, **rules: Any) -> Found:
    found = search(Rules(policy=policy, faults=faults, **rules), most_states=most_states)
    names = ", ".join(sorted(fault.name.lower() for fault in faults))
    print(f"policy {policy}, faults: {names}: {found.states} states, {found.steps} steps")
    assert found.counterexample is None, str(found.counterexample)
    return found


@pytest.fixture(scope="module")
def all_found() -> list[Found]:
    """The results of searches that each allow only some faults."""
    held = [searched(OnUncertain.HOLD, faults) for faults in (DEATHS, COPIES, REFUSALS, EVENTS)]
    return [*held, searched(OnUncertain.RESEND, EVENTS)]


@pytest.fixture(scope="module")
def timing_found() -> list[Found]:
    """The results of searches in which emails are cancelled, rescheduled, put aside, redelivered, or expire."""
    worlds = [(OnUncertain.HOLD, TIMING), (OnUncertain.RESEND, CHANGES), (OnUncertain.HOLD, CEILINGS)]
    all_found = [searched(policy, faults) for policy, faults in worlds]
    return [*all_found, searched(OnUncertain.HOLD, frozenset({Fault.RELAY}), 12_000, redelivers=True)]


def test_no_attempt_begins_after_a_cancellation_or_an_expiry_and_no_waiting_email_is_stuck(
    timing_found: list[Found],
) -> None:
    assert all(found.states > 5_000 for found in timing_found)
    assert all(Status.CANCELLED in found.ends for found in timing_found[:2])


def test_nothing_is_lost_duplicated_or_stuck_in_any_state(all_found: list[Found]) -> None:
    for found in all_found:
        assert found.states > 5_000
        assert {Status.SENT, Status.FAILED, Status.HELD} == set(found.ends)


@pytest.mark.slow  # searches of millions of states
@pytest.mark.parametrize("policy", OnUncertain)
@pytest.mark.parametrize(
    ("faults", "rules"),
    [
        # There are more than fifteen million states, which need ten GB; `python -m tests.model` searches them all.
        pytest.param(ALL_FAULTS, {"most_states": 1_000_000}, id="all faults, a million states"),
        pytest.param(LOST_OWNERS, {}, id="lost owners"),
        *(
            pytest.param(faults, {"keys": True}, id=f"idempotency keys and {name}")
            for name, faults in {
                "no fault": frozenset[Fault](),
                "deaths": DEATHS,
                "refusals": REFUSALS,
                "an operator": frozenset({Fault.OPERATOR}),
                "copies": COPIES,
            }.items()
        ),
        pytest.param(EVENTS | {Fault.OPERATOR}, {}, id="events and an operator"),
        pytest.param(EVENTS | {Fault.HOST}, {}, id="events and a lost host"),
        *(
            pytest.param(
                timing | faults, {}, id=f"{name} and {'an expiry' if Fault.EXPIRY in timing else 'a new time'}"
            )
            for timing in (CHANGES, frozenset({Fault.CANCEL, Fault.EXPIRY}))
            for name, faults in {
                "deaths": DEATHS,
                "lost owners": LOST_OWNERS,
                "events": EVENTS,
                "late statements": frozenset({Fault.LATE}),
                "an operator": frozenset({Fault.OPERATOR}),
            }.items()
        ),
        pytest.param(TIMING, {"redelivers": True}, id="redelivery and changes"),
        pytest.param(DEATHS, {"redelivers": True}, id="redelivery and deaths"),
        pytest.param(PROMOTED | CHANGES, {}, id="lost commits and changes"),
        pytest.param(PROMOTED, {}, id="lost commits"),
    ],
)
def test_the_guarantees_hold_with_many_faults(
    policy: OnUncertain, faults: frozenset[Fault], rules: dict[str, Any]
) -> None:
    assert searched(policy, faults, **rules).states > 1_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_any_one_rule_a_guarantee_is_broken(mutant: str) -> None:
    found = search(MUTANTS[mutant])

    assert found.counterexample is not None
    assert len(str(found.counterexample).splitlines()) == 1 + len(found.counterexample.trace)


def test_the_model_makes_exactly_the_status_transitions_of_the_domain_table(
    all_found: list[Found], timing_found: list[Found]
) -> None:
    replayed, promoted = (
        searched(OnUncertain.HOLD, faults, 5_000) for faults in (frozenset({Fault.OPERATOR}), PROMOTED)
    )

    moves = replayed.moves.union(promoted.moves, *(found.moves for found in (*all_found, *timing_found)))
    assert moves == {(before, transition, after) for (before, transition), after in TRANSITIONS.items()}
