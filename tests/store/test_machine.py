"""In any order, the real statements change each row as the protocol says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dispatcher.domain.status import Status
from tests.store.books import Books
from tests.store.machine import Machine, Sessions


@pytest.fixture
def sessions(tables_url: str, books: Books) -> Iterator[Sessions]:
    with closing(Sessions(tables_url, books)) as opened:
        yield opened


@pytest.mark.parametrize(("runs", "steps"), [(50, 10), pytest.param(500, 30, marks=pytest.mark.slow)])
def test_the_statements_change_every_row_as_the_protocol_says(sessions: Sessions, runs: int, steps: int) -> None:
    class Driven(Machine):
        def __init__(self) -> None:
            super().__init__(sessions)

    # A setting that is not given here is that of the suite's profile.
    options: dict[str, Any] = {"report_multiple_bugs": False, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(Driven, settings=settings(max_examples=runs, stateful_step_count=steps, **options))


RARELY_REACHED: Final[Mapping[str, Callable[[Machine], object]]] = {
    "a held email expires": lambda run: run.expire(0, Status.HELD, False, Machine._renew, Status.SENT, True, False),
    "its owner returns after a doubt": (
        lambda run: run.owner_returns(0, True, None, Machine._release, Status.SENT, Machine._release, False, False)
    ),
    "its owner returns after a discard": (
        lambda run: run.owner_returns(0, False, None, Machine._release, Status.SENT, Machine._release, False, True)
    ),
    "its owner records a deferral after a recovery": (
        lambda run: run.owner_returns(0, False, None, Machine._record, Status.SENDING, Machine._record, False, False)
    ),
}
"""Steps that random runs rarely reach."""


@pytest.mark.parametrize("steps", RARELY_REACHED.values(), ids=RARELY_REACHED)
def test_rare_steps_change_every_row_as_the_protocol_says(
    sessions: Sessions, steps: Callable[[Machine], object]
) -> None:
    machine = Machine(sessions)
    machine.begin(None)

    steps(machine)

    machine.tables_are_as_known()
