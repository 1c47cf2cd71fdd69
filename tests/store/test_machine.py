"""In any order, the real statements change each row as the protocol says. Each condition in a statement is necessary.

A condition has no mutant if a different clause of the statement makes it redundant. An example is `locked_until <
now()` in `lease`: only pending emails can be leased, and no pending email has a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dispatcher.actions.held import Confirm
from dispatcher.domain.status import Status
from tests.store.books import Books
from tests.store.machine import Machine, Mutant, Sessions

_OURS: Final = "(e.email_id, e.lease_token, e.status) in (\nselect w.email_id, w.lease_token, 'sending'"
_BY_ANY_TOKEN: Final = "(e.email_id, e.status) in (\nselect w.email_id, 'sending'"
_WHATEVER_ITS_STATUS: Final = "(e.email_id, e.lease_token) in (\nselect w.email_id, w.lease_token"
_SEEN: Final = (
    "(email_id, lease_token, locked_until, status) in (\nselect w.email_id, w.lease_token, w.expired_at, 'sending'"
)
_EXPIRED: Final = (
    "(e.email_id, e.lease_token, e.locked_until, e.status) in (\n"
    "select w.email_id, w.lease_token, w.expired_at, 'sending'"
)

MUTANTS: Final = {
    "lease_with_another_key": Mutant("lease", "and e.message_key = ", "and '' is distinct from "),
    "lease_of_a_finished_email": Mutant("lease", "e.status = 'pending'\n", "e.status <> 'waiting'\n"),
    "lease_of_an_expired_email": Mutant("lease", "e.status = 'pending'\n", "e.status in ('pending', 'sending')\n"),
    "lease_with_the_same_token": Mutant("lease", "e.lease_token + 1", "e.lease_token"),
    "lease_that_keeps_the_due_mark": Mutant("lease", "publish_due_at = null", "publish_due_at = e.publish_due_at"),
    "state_with_another_workers_lease": Mutant("find_unleased", "and locked_by = %(worker)s", "and %(worker)s <> ''"),
    "lease_of_a_cancelled_email": Mutant("lease", "e.status = 'pending'\n", "e.status in ('pending', 'cancelled')\n"),
    "lease_after_the_expiry": Mutant("lease", "and (e.expires_at is null or e.expires_at > clock_timestamp())\n"),
    "cancel_of_a_leased_email": Mutant(
        "cancel_emails", "status in ('pending', 'waiting')\n", "status in ('pending', 'waiting', 'sending')\n"
    ),
    "cancel_of_a_dead_email": Mutant(
        "cancel_emails", "status in ('pending', 'waiting')\n", "status in ('pending', 'waiting', 'held', 'failed')\n"
    ),
    "cancel_of_a_proven_email": Mutant("cancel_emails", "and proven_by is null\n"),
    "cancel_that_keeps_the_due_mark": Mutant("cancel_emails", "publish_due_at = null,\ndead_letter", "dead_letter"),
    "reschedule_of_a_leased_email": Mutant(
        "reschedule_emails", "status in ('pending', 'waiting')\n", "status in ('pending', 'waiting', 'sending')\n"
    ),
    "reschedule_of_a_proven_email": Mutant("reschedule_emails", "and proven_by is null\n"),
    "reschedule_beyond_the_expiry": Mutant(
        "reschedule_emails", "where is_unsent and not expires_first", "where is_unsent"
    ),
    "reschedule_that_keeps_the_due_mark": Mutant(
        "reschedule_emails", "published_at = null,\npublish_due_at = null\n", "published_at = null\n"
    ),
    "wake_that_is_not_due": Mutant("wake", "publish_due_at = clock_timestamp()", "publish_due_at = null"),
    "expiry_that_keeps_the_due_mark": Mutant("cancel_expired", "publish_due_at = null,\n"),
    "replay_after_the_expiry": Mutant("replay_next", "when s.is_expired then 'expired'\n"),
    "settlement_that_leaves_cancelled_emails": Mutant("find_proven", "'held', 'cancelled'", "'held'"),
    "lease_of_a_proven_email": Mutant("lease", "and e.proven_by is null\n"),
    "record_that_retries_a_proven_email": Mutant("record", "\nand (r.status <> 'sending' or e.proven_by is null)"),
    "event_that_marks_a_sent_email": Mutant("store_events", "e.status <> 'sent' and ", ""),
    "event_that_marks_no_email": Mutant("store_events", "e.status <> 'sent' and ", "false and "),
    "settlement_of_a_dropped_email_as_sent": Mutant("settle_proven", "not v.has_left and ", "false and "),
    "settlement_of_a_delivered_email_as_dropped": Mutant("settle_proven", "not v.has_left and ", ""),
    "settlement_that_keeps_the_dead_letter": Mutant(
        "settle_proven",
        "when not j.is_dropped then null\nwhen j.previous_status = 'held' and",
        "when not j.is_dropped then e.dead_letter_due_at\nwhen j.previous_status = 'held' and",
    ),
    "renewal_with_any_token": Mutant("renew", _OURS, _BY_ANY_TOKEN),
    "renewal_of_a_released_email": Mutant("renew", _OURS, _WHATEVER_ITS_STATUS),
    "renewal_of_a_proven_email": Mutant("renew", "where proven_by is null", "where true"),
    "renewal_that_shortens_a_lease": Mutant("renew", "greatest(", "least("),
    "renewal_that_keeps_the_end": Mutant("renew", "e.locked_until + interval '1 microsecond'", "e.locked_until"),
    "release_with_any_token": Mutant("release", "e.lease_token = w.lease_token and ", ""),
    "release_twice": Mutant("release", "and e.status = 'sending') is true", ") is true"),
    "release_that_counts_the_attempt": Mutant("release", "e.attempt_count - 1", "e.attempt_count"),
    "record_with_any_token": Mutant(
        "record", "(e.status = 'sending' and e.lease_token = r.lease_token)", "(e.status = 'sending')"
    ),
    "record_of_a_released_email": Mutant(
        "record", "(e.status = 'sending' and e.lease_token = r.lease_token)", "(e.lease_token = r.lease_token)"
    ),
    "record_without_late_evidence": Mutant("record", "(r.status = 'sent' and e.status <> 'sent')", "false"),
    "record_that_counts_evidence_twice": Mutant(
        "record", "(r.status = 'sent' and e.status <> 'sent')", "r.status = 'sent'"
    ),
    "acceptance_that_counts_evidence_twice": Mutant("record_accepted", "\nand (status <> 'sent') is true"),
    "acceptance_that_keeps_the_due_mark": Mutant("record_accepted", "publish_due_at = null,\n"),
    "acceptance_that_keeps_the_dead_letter": Mutant(
        "record_accepted", "publish_due_at = null,\ndead_letter_due_at = null\n", "publish_due_at = null\n"
    ),
    "acceptance_that_keeps_the_lease": Mutant("record_accepted", "locked_by = null,\n"),
    "acceptance_with_the_number_of_a_later_attempt": Mutant(
        "record_accepted",
        "attempt_count = (%(attempt_numbers)s::integer[])[width_bucket(email_id, %(email_ids)b::uuid[])]",
        "true",
    ),
    "acceptance_that_loses_a_second_attempt": Mutant("record_accepted", "where has_attempt) <", "where has_attempt) >"),
    "record_for_another_worker_with_any_token": Mutant(
        "record", "e.lease_token = r.lease_token and e.locked_until = r.expired_at", "e.locked_until = r.expired_at"
    ),
    "record_for_another_worker_with_any_end": Mutant(
        "record", "e.lease_token = r.lease_token and e.locked_until = r.expired_at", "e.lease_token = r.lease_token"
    ),
    "record_for_another_worker_that_stores_a_lost_attempt": Mutant(
        "record", "where expired_at is null\nor email_id in (select email_id from closed)", ""
    ),
    "record_that_confirms_no_recovery": Mutant("record", "rescued_token = null,\n"),
    "record_after_a_recovery_that_loses_doubt": Mutant(
        "record", "when r.outcome = 'uncertain' then 'held'", "when false then 'held'"
    ),
    "revert_with_any_token": Mutant(
        "revert_recovery",
        "(e.email_id, e.rescued_token, e.status) in (\nselect w.email_id, w.lease_token, 'held'",
        "(e.email_id, e.status) in (\nselect w.email_id, 'held'",
    ),
    "revert_of_an_email_that_is_not_held": Mutant(
        "revert_recovery",
        "(e.email_id, e.rescued_token, e.status) in (\nselect w.email_id, w.lease_token, 'held'",
        "(e.email_id, e.rescued_token) in (\nselect w.email_id, w.lease_token",
    ),
    "record_after_a_recovery_of_a_discarded_email": Mutant("record", "and e.dead_letter_discarded_at is null", ""),
    "revert_that_counts_the_attempt": Mutant("revert_recovery", "e.attempt_base + 1", "e.attempt_base"),
    "state_with_another_workers_recovery": Mutant("find_unleased", "and rescued_from = %(worker)s"),
    "record_that_loses_doubt": Mutant("record", "e.was_uncertain or r.outcome", "r.outcome"),
    "record_without_dead_letters_of_held": Mutant(
        "record", "r.status in ('failed', 'held') then clock_timestamp()", "r.status = 'failed' then clock_timestamp()"
    ),
    "record_with_a_dead_letter_of_a_suppressed_email": Mutant("record", "when r.error_type = 'suppressed' then null\n"),
    "published_with_another_due_mark": Mutant(
        "mark_published",
        "where email_id = any(%(email_ids)s) and email_id between %(lowest_id)s and %(highest_id)s\n"
        "and ((email_id, publish_due_at) in (select t.email_id, t.due_at",
        "where email_id = any(%(email_ids)s)\nand ((email_id) in (select t.email_id",
    ),
    "dead_letter_with_another_due_mark": Mutant(
        "mark_dead_lettered",
        "(email_id, dead_letter_due_at) in (select t.email_id, t.due_at",
        "(email_id) in (select t.email_id",
    ),
    "recovery_with_any_token": Mutant(
        "recover_expired", _SEEN, "(email_id, locked_until, status) in (\nselect w.email_id, w.expired_at, 'sending'"
    ),
    "recovery_of_a_renewed_lease": Mutant(
        "recover_expired", _SEEN, "(email_id, lease_token, status) in (\nselect w.email_id, w.lease_token, 'sending'"
    ),
    "recovery_of_a_lease_that_has_not_expired": Mutant(
        "recover_expired", "locked_until < now()", "now() < now() + interval '1 s'"
    ),
    "recovery_without_grace": Mutant("recover_expired", "%(grace_seconds)s *", "0 * %(grace_seconds)s *"),
    "recovery_of_leases_of_this_host": Mutant(
        "find_expiring",
        "(locked_by = any(%(workers)s)) = %(is_theirs)s",
        "%(workers)s::text[] is not null and %(is_theirs)s is not null",
    ),
    "recovery_with_the_same_token": Mutant("recover_expired", "e.lease_token + 1", "e.lease_token"),
    "recovery_that_resends_for_ever": Mutant(
        "recover_expired",
        "attempt_count - attempt_base < coalesce(max_attempts, %(max_attempts)s)",
        "%(max_attempts)s > 0",
    ),
    "recovery_that_counts_attempts_before_a_replay": Mutant(
        "recover_expired", "attempt_count - attempt_base", "attempt_count"
    ),
    "recovery_against_the_emails_policy": Mutant(
        "recover_expired", "coalesce(on_uncertain, %(on_uncertain)s)", "%(on_uncertain)s"
    ),
    "recovery_that_loses_doubt": Mutant("recover_expired", "was_uncertain = true,\n"),
    "lease_found_expired_before_its_end": Mutant("find_expiring", "locked_until < clock_timestamp(),", "true,"),
    "lease_found_expiring_at_any_time": Mutant("find_expiring", "%(within_seconds)s *", "(1e9 + %(within_seconds)s) *"),
    "expired_lease_released_with_any_token": Mutant(
        "release_found",
        _EXPIRED,
        "(e.email_id, e.locked_until, e.status) in (\nselect w.email_id, w.expired_at, 'sending'",
    ),
    "expired_lease_released_with_any_end": Mutant("release_found", _EXPIRED, _OURS),
    "expired_lease_released_with_the_same_token": Mutant("release_found", "e.lease_token + 1", "e.lease_token"),
    "crash_with_any_token": Mutant(
        "note_crashes",
        "(email_id, lease_token, status, locked_by) in (\nselect w.email_id, w.lease_token,",
        "(email_id, status, locked_by) in (\nselect w.email_id,",
    ),
    "crash_of_another_worker": Mutant("note_crashes", "'sending', %(worker)s::text", "'sending', locked_by"),
    "crash_with_the_same_token": Mutant("note_crashes", "e.lease_token + 1", "e.lease_token"),
    "lost_immediately_after_publishing": Mutant("find_lost_message_ids", "%(age_seconds)s *", "0 * %(age_seconds)s *"),
    "confirmation_of_an_email_that_is_not_held": Mutant(
        "confirm_held", "select email_id from found where status = 'held'", "select email_id from found"
    ),
    "release_of_an_email_that_is_not_held": Mutant(
        "release_held", "when s.status = 'failed' and i.is_of_held then 'failed'\n"
    ),
    "replay_of_an_email_that_may_have_arrived": Mutant(
        "replay_next", "s.may_have_arrived and not i.include_held", "false"
    ),
    "replay_of_a_failed_uncertain_email": Mutant(
        "replay_next", "e.status = 'held' or e.was_uncertain", "e.status = 'held'"
    ),
    "replay_that_counts_old_attempts": Mutant("replay_next", "attempt_base = e.attempt_count,\n"),
    "discard_of_an_email_that_is_not_dead": Mutant(
        "discard_dead", "when status not in ('failed', 'held') then 'not_dead'\n"
    ),
    "discard_twice": Mutant("discard_dead", "when dead_letter_discarded_at is not null then 'already_discarded'\n"),
    "republished_although_not_dead": Mutant("republish_dead_letters", "and status in ('failed', 'held')\n"),
    "republished_although_discarded": Mutant("republish_dead_letters", "and dead_letter_discarded_at is null\n"),
}


@pytest.fixture
def open_sessions(tables_url: str, books: Books) -> Iterator[Callable[[Mutant | None], Sessions]]:
    with ExitStack() as opened:
        yield lambda mutant: opened.enter_context(closing(Sessions(tables_url, books, mutant)))


def driven(sessions: Sessions, *, runs: int = 50, steps: int = 10, shrinks: bool = True) -> None:
    class Driven(Machine):
        def __init__(self) -> None:
            super().__init__(sessions)

    phases = set(Phase) if shrinks else {Phase.generate}
    run_state_machine_as_test(
        Driven,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            phases=tuple(phases),
            report_multiple_bugs=False,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_statements_change_every_row_as_the_protocol_says(
    open_sessions: Callable[[Mutant | None], Sessions],
) -> None:
    driven(open_sessions(None))


def test_every_mutant_changes_an_existing_statement() -> None:
    assert [name for name, mutant in MUTANTS.items() if len(set(mutant.texts)) < 2] == []


@pytest.mark.slow
def test_the_statements_do_so_in_long_runs(open_sessions: Callable[[Mutant | None], Sessions]) -> None:
    driven(open_sessions(None), runs=500, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_statement_without_one_of_its_conditions_is_caught(
    name: str, open_sessions: Callable[[Mutant | None], Sessions]
) -> None:
    sessions = open_sessions(MUTANTS[name])
    with pytest.raises(AssertionError):
        driven(sessions, runs=400, shrinks=False)


RARELY_REACHED: Final[Mapping[str, tuple[Mutant, Callable[[Machine], object]]]] = {
    "expiry_that_keeps_the_dead_letter": (
        Mutant("cancel_expired", "dead_letter_due_at = null", "dead_letter_due_at = e.dead_letter_due_at"),
        lambda run: run.expire(0, Status.HELD, False, Machine._renew, Status.SENT, True, False),
    ),
    "expiry_that_leaves_held_emails": (
        Mutant("find_expired", "status in ('pending', 'waiting', 'held')", "status in ('pending', 'waiting')"),
        lambda run: run.expire(0, Status.HELD, False, Machine._renew, Status.SENT, True, False),
    ),
    "revert_that_loses_doubt": (
        Mutant("revert_recovery", "e.rescued_in_doubt", "false"),
        lambda run: run.owner_returns(0, True, None, Machine._release, Status.SENT, Machine._release, False, False),
    ),
    "revert_of_a_discarded_email": (
        Mutant("revert_recovery", "and e.dead_letter_discarded_at is null", ""),
        lambda run: run.owner_returns(0, False, None, Machine._release, Status.SENT, Machine._release, False, True),
    ),
    "record_after_a_recovery_that_keeps_a_lease": (
        Mutant("record", "when r.status = 'sending' then 'pending'", "when false then ''"),
        lambda run: run.owner_returns(0, False, None, Machine._record, Status.SENDING, Machine._record, False, False),
    ),
    "dead_letter_of_a_suppressed_email_is_missed": (
        Mutant("find_dead_lettered", "and error_type is distinct from 'suppressed'\n"),
        lambda run: (run.suppress_every_recipient(0), run.lose_a_dead_letter(0, Status.FAILED, False, False, 0)),
    ),
    "confirmation_that_keeps_the_dead_letter": (
        Mutant("confirm_held", "dead_letter_due_at = null", "dead_letter_due_at = dead_letter_due_at"),
        lambda run: run.decide_on_a_held_email(0, Status.HELD, Confirm),
    ),
    "republished_after_a_change": (
        Mutant(
            "republish_dead_letters",
            "(e.email_id, e.attempt_count) in (\nselect w.email_id, w.attempt_count",
            "(e.email_id) in (\nselect w.email_id",
        ),
        lambda run: run.lose_a_dead_letter(0, Status.FAILED, False, True, 1),
    ),
}
"""Mutants that random runs rarely reach, each with the steps that do."""


@pytest.mark.parametrize("name", RARELY_REACHED)
def test_a_rarely_reached_condition_is_necessary(name: str, open_sessions: Callable[[Mutant | None], Sessions]) -> None:
    mutant, steps = RARELY_REACHED[name]

    def play(sessions: Sessions) -> None:
        machine = Machine(sessions)
        machine.begin(None)
        steps(machine)
        machine.tables_are_as_known()

    play(open_sessions(None))
    with pytest.raises(AssertionError):
        play(open_sessions(mutant))
