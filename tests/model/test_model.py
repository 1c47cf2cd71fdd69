"""The protocol keeps its guarantees in every reachable state. If any single rule is removed, the protocol breaks a
guarantee."""

from __future__ import annotations

from typing import Final

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


def searched(
    policy: OnUncertain,
    faults: frozenset[Fault],
    *,
    keys: bool = False,
    redelivers: bool = False,
    most_states: int | None = None,
) -> Found:
    rules = Rules(policy=policy, faults=faults, keys=keys, redelivers=redelivers)
    found = search(rules, most_states=most_states)
    names = ", ".join(sorted(fault.name.lower() for fault in faults))
    print(f"policy {policy}, faults: {names}: {found.states} states, {found.steps} steps")
    return found


@pytest.fixture(scope="module")
def all_found() -> list[Found]:
    """The results of searches that each allow only some faults. The slow test allows all faults together."""
    worlds = [
        (OnUncertain.HOLD, DEATHS),
        (OnUncertain.RESEND, LOST_OWNERS),
        (OnUncertain.HOLD, COPIES),
        (OnUncertain.HOLD, REFUSALS),
        (OnUncertain.HOLD, EVENTS),
        (OnUncertain.RESEND, EVENTS),
    ]
    return [searched(policy, faults) for policy, faults in worlds]


@pytest.fixture(scope="module")
def timing_found() -> list[Found]:
    """The results of searches in which emails are cancelled, rescheduled, put aside, redelivered, or expire."""
    worlds = [(OnUncertain.HOLD, TIMING), (OnUncertain.RESEND, CHANGES), (OnUncertain.HOLD, CEILINGS)]
    all_found = [searched(policy, faults) for policy, faults in worlds]
    return [*all_found, searched(OnUncertain.HOLD, frozenset({Fault.RELAY}), redelivers=True, most_states=12_000)]


def test_no_attempt_begins_after_a_cancellation_or_an_expiry_and_no_waiting_email_is_stuck(
    timing_found: list[Found],
) -> None:
    for found in timing_found:
        assert found.counterexample is None, str(found.counterexample)
        assert found.states > 5_000
    assert all(Status.CANCELLED in found.ends for found in timing_found[:2])


def test_nothing_is_lost_duplicated_or_stuck_in_any_state(all_found: list[Found]) -> None:
    for found in all_found:
        assert found.counterexample is None, str(found.counterexample)
        assert found.states > 5_000
        assert {Status.SENT, Status.FAILED, Status.HELD} == set(found.ends)


def test_a_provider_with_idempotency_keys_beside_another_duplicates_nothing() -> None:
    found = searched(OnUncertain.HOLD, frozenset(), keys=True)

    assert found.counterexample is None, str(found.counterexample)
    assert found.states > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
@pytest.mark.parametrize("faults", [DEATHS, REFUSALS, frozenset({Fault.OPERATOR}), COPIES])
def test_idempotency_keys_duplicate_nothing_with_many_faults(policy: OnUncertain, faults: frozenset[Fault]) -> None:
    found = searched(policy, faults, keys=True)

    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
def test_nothing_is_lost_duplicated_or_stuck_with_all_faults_at_once(policy: OnUncertain) -> None:
    found = searched(policy, ALL_FAULTS)

    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
@pytest.mark.parametrize("fault", [Fault.OPERATOR, Fault.HOST])
def test_no_send_begins_after_an_event(policy: OnUncertain, fault: Fault) -> None:
    found = searched(policy, EVENTS | {fault})

    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
@pytest.mark.parametrize("faults", [DEATHS, LOST_OWNERS, EVENTS, frozenset({Fault.LATE}), frozenset({Fault.OPERATOR})])
def test_no_attempt_begins_after_a_cancellation_or_an_expiry_with_many_faults(
    policy: OnUncertain, faults: frozenset[Fault]
) -> None:
    for timing in (CHANGES, frozenset({Fault.CANCEL, Fault.EXPIRY})):
        found = searched(policy, timing | faults)

        assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
def test_redelivered_emails_are_neither_lost_nor_duplicated_nor_stuck(policy: OnUncertain) -> None:
    for faults in (TIMING, DEATHS):
        found = searched(policy, faults, redelivers=True)

        assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
def test_an_email_that_a_promotion_made_uncertain_is_neither_cancelled_nor_rescheduled(policy: OnUncertain) -> None:
    found = searched(policy, PROMOTED | CHANGES)

    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OnUncertain)
def test_a_promotion_that_lost_commits_duplicates_nothing_if_nothing_else_goes_wrong(policy: OnUncertain) -> None:
    found = searched(policy, PROMOTED)

    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_any_one_rule_a_guarantee_is_broken(mutant: str) -> None:
    found = search(MUTANTS[mutant])

    assert found.counterexample is not None
    print(found.counterexample)
    assert len(str(found.counterexample).splitlines()) == 1 + len(found.counterexample.trace)


def test_the_model_makes_exactly_the_status_transitions_of_the_domain_table(
    all_found: list[Found], timing_found: list[Found]
) -> None:
    replayed = searched(OnUncertain.HOLD, frozenset({Fault.OPERATOR}), most_states=5_000)

    promoted = searched(OnUncertain.HOLD, PROMOTED, most_states=5_000)
    assert promoted.counterexample is None, str(promoted.counterexample)
    moves = replayed.moves.union(promoted.moves, *(found.moves for found in (*all_found, *timing_found)))
    assert moves == {(before, transition, after) for (before, transition), after in TRANSITIONS.items()}
