"""The real statements do to every row what the protocol says, in any order; each fence in them is needed for that.

Not among the mutants is what another clause of the same statement covers: `locked_until < now()` in `lease`, say, where
only what is pending can be leased and nothing pending is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.store.altered import Mutant
from tests.store.books import Books
from tests.store.machine import Machine, Sessions

_WANTED: Final = (
    "(e.email_id, e.message_key, e.status) in (\n                select w.email_id, w.message_key, 'pending'"
)
_OURS: Final = "(e.email_id, e.lease_token, e.status) in (\n            select w.email_id, w.lease_token, 'sending'"
_BY_ANY_TOKEN: Final = "(e.email_id, e.status) in (\n            select w.email_id, 'sending'"
_WHATEVER_ITS_STATUS: Final = "(e.email_id, e.lease_token) in (\n            select w.email_id, w.lease_token"
_SEEN: Final = (
    "(email_id, lease_token, locked_until, status) in (\n"
    "                select w.email_id, w.lease_token, w.expired_at, 'sending'"
)
_EXPIRED: Final = (
    "(e.email_id, e.lease_token, e.locked_until, e.status) in (\n"
    "            select w.email_id, w.lease_token, w.expired_at, 'sending'"
)

MUTANTS: Final = {
    "lease_by_another_key": Mutant(
        "lease", _WANTED, "(e.email_id, e.status) in (\n                select w.email_id, 'pending'"
    ),
    "lease_of_what_is_finished": Mutant(
        "lease", _WANTED, "(e.email_id, e.message_key) in (\n                select w.email_id, w.message_key"
    ),
    "lease_of_what_has_expired": Mutant(
        "lease",
        "w.message_key, 'pending'",
        "w.message_key, case when e.status = 'sending' then e.status else 'pending' end",
    ),
    "lease_under_the_same_token": Mutant("lease", "e.lease_token + 1", "e.lease_token"),
    "lease_that_leaves_the_due_mark": Mutant("lease", "publish_due_at = null", "publish_due_at = e.publish_due_at"),
    "standing_of_anybodys_lease": Mutant("find_standing", " and locked_by = %(worker)s", " and %(worker)s <> ''"),
    "renew_by_any_token": Mutant("renew", _OURS, _BY_ANY_TOKEN),
    "renew_of_what_was_given_back": Mutant("renew", _OURS, _WHATEVER_ITS_STATUS),
    "renew_that_shortens": Mutant("renew", "greatest(", "least("),
    "renew_that_keeps_the_end": Mutant("renew", "e.locked_until + interval '1 microsecond'", "e.locked_until"),
    "release_by_any_token": Mutant("release", "e.lease_token = w.lease_token and ", ""),
    "release_twice": Mutant("release", " and e.status = 'sending') is true", ") is true"),
    "release_that_burns_the_attempt": Mutant("release", "e.attempt_count - 1", "e.attempt_count"),
    "record_by_any_token": Mutant(
        "record", "(e.status = 'sending' and e.lease_token = r.lease_token)", "(e.status = 'sending')"
    ),
    "record_of_what_was_given_back": Mutant(
        "record", "(e.status = 'sending' and e.lease_token = r.lease_token)", "(e.lease_token = r.lease_token)"
    ),
    "record_without_late_evidence": Mutant("record", "(r.status = 'sent' and e.status <> 'sent')", "false"),
    "record_of_evidence_twice": Mutant("record", "(r.status = 'sent' and e.status <> 'sent')", "r.status = 'sent'"),
    "record_for_another_under_any_token": Mutant(
        "record", "e.lease_token = r.lease_token and e.locked_until = r.expired_at", "e.locked_until = r.expired_at"
    ),
    "record_for_another_at_any_end": Mutant(
        "record", "e.lease_token = r.lease_token and e.locked_until = r.expired_at", "e.lease_token = r.lease_token"
    ),
    "record_for_another_in_vain": Mutant(
        "record", "where expired_at is null\n        or email_id in (select email_id from closed)", ""
    ),
    "record_that_confirms_no_rescue": Mutant("record", "        rescued_token = null,\n"),
    "record_of_a_rescue_in_doubt": Mutant(
        "record", "when r.outcome = 'uncertain' then 'held'", "when false then 'held'"
    ),
    "record_of_a_rescue_that_keeps_a_lease": Mutant(
        "record", "when r.status = 'sending' then 'pending'", "when false then ''"
    ),
    "recovery_by_any_token": Mutant(
        "recover_rescued",
        "(e.email_id, e.rescued_token, e.status) in (\n                select w.email_id, w.lease_token, 'held'",
        "(e.email_id, e.status) in (\n                select w.email_id, 'held'",
    ),
    "recovery_of_what_is_not_held": Mutant(
        "recover_rescued",
        "(e.email_id, e.rescued_token, e.status) in (\n                select w.email_id, w.lease_token, 'held'",
        "(e.email_id, e.rescued_token) in (\n                select w.email_id, w.lease_token",
    ),
    "recovery_that_forgets_doubt": Mutant("recover_rescued", "e.rescued_in_doubt", "false"),
    "recovery_of_what_was_discarded": Mutant("recover_rescued", "and e.dead_letter_discarded_at is null", ""),
    "record_after_a_rescue_that_was_discarded": Mutant("record", "and e.dead_letter_discarded_at is null", ""),
    "recovery_that_burns_the_attempt": Mutant("recover_rescued", "e.attempt_base + 1", "e.attempt_base"),
    "standing_of_anybodys_rescue": Mutant("find_standing", " and rescued_from = %(worker)s"),
    "record_that_completes_failures": Mutant("record", "c.status = 'sent'", "true"),
    "record_that_forgets_doubt": Mutant("record", "e.was_uncertain or r.outcome", "r.outcome"),
    "record_without_dead_letters_of_held": Mutant("record", "r.status in ('failed', 'held')", "r.status = 'failed'"),
    "published_since_another_instant": Mutant(
        "mark_published",
        "(email_id, publish_due_at) in (\n                select t.email_id, t.due_at",
        "(email_id) in (\n                select t.email_id",
    ),
    "dead_letter_since_the_look": Mutant(
        "mark_dead_lettered",
        "(email_id, dead_letter_due_at) in (\n            select t.email_id, t.due_at",
        "(email_id) in (\n            select t.email_id",
    ),
    "rescue_under_any_token": Mutant(
        "rescue_expired",
        _SEEN,
        "(email_id, locked_until, status) in (\n                select w.email_id, w.expired_at, 'sending'",
    ),
    "rescue_of_what_was_renewed": Mutant(
        "rescue_expired",
        _SEEN,
        "(email_id, lease_token, status) in (\n                select w.email_id, w.lease_token, 'sending'",
    ),
    "rescue_of_what_has_not_expired": Mutant(
        "rescue_expired", "locked_until < now()", "now() < now() + interval '1 s'"
    ),
    "rescue_without_grace": Mutant("rescue_expired", "%(grace_seconds)s *", "0 * %(grace_seconds)s *"),
    "rescue_where_the_host_lives": Mutant(
        "find_expiring",
        "(locked_by = any(%(workers)s)) = %(is_theirs)s",
        "%(workers)s::text[] is not null and %(is_theirs)s is not null",
    ),
    "rescue_under_the_same_token": Mutant("rescue_expired", "e.lease_token + 1", "e.lease_token"),
    "rescue_that_resends_for_ever": Mutant(
        "rescue_expired", "attempt_count - attempt_base < %(max_attempts)s", "%(max_attempts)s > 0"
    ),
    "rescue_that_counts_what_was_replayed": Mutant("rescue_expired", "attempt_count - attempt_base", "attempt_count"),
    "rescue_against_its_policy": Mutant(
        "rescue_expired", "coalesce(on_uncertain, %(on_uncertain)s)", "%(on_uncertain)s"
    ),
    "rescue_that_forgets_doubt": Mutant("rescue_expired", "        was_uncertain = true,\n"),
    "expired_before_its_end": Mutant("find_expiring", "locked_until < clock_timestamp(), ", "true, "),
    "expiring_at_any_time": Mutant("find_expiring", "%(within_seconds)s *", "(1e9 + %(within_seconds)s) *"),
    "expired_released_by_any_token": Mutant(
        "release_found",
        _EXPIRED,
        "(e.email_id, e.locked_until, e.status) in (\n            select w.email_id, w.expired_at, 'sending'",
    ),
    "expired_released_at_any_end": Mutant("release_found", _EXPIRED, _OURS),
    "expired_released_under_the_same_token": Mutant("release_found", "e.lease_token + 1", "e.lease_token"),
    "dead_workers_and_others_leases": Mutant("find_leases", "locked_by = %(worker)s", "%(worker)s <> ''"),
    "blame_by_any_token": Mutant(
        "note_crashes",
        "(email_id, lease_token, status, locked_by) in (\n                select w.email_id, w.lease_token,",
        "(email_id, status, locked_by) in (\n                select w.email_id,",
    ),
    "blame_of_a_living_worker": Mutant("note_crashes", "'sending', %(worker)s::text", "'sending', locked_by"),
    "blame_under_the_same_token": Mutant("note_crashes", "e.lease_token + 1", "e.lease_token"),
    "vanished_just_now": Mutant("find_vanished_ids", "%(age_seconds)s *", "0 * %(age_seconds)s *"),
    "confirm_of_what_is_not_held": Mutant("confirm_held", "\n        and status = 'held'"),
    "confirm_that_leaves_the_letter": Mutant(
        "confirm_held", "dead_letter_due_at = null", "dead_letter_due_at = dead_letter_due_at"
    ),
    "release_of_what_is_not_held": Mutant("release_held", "        and e.status = 'held'\n"),
    "replay_of_what_may_have_arrived": Mutant("replay_next", "s.may_have_arrived and not i.include_held", "false"),
    "replay_of_what_came_in_doubt": Mutant("replay_next", "e.status = 'held' or e.was_uncertain", "e.status = 'held'"),
    "replay_that_counts_old_attempts": Mutant("replay_next", "        attempt_base = e.attempt_count,\n"),
    "letter_of_an_older_failure": Mutant(
        "replay_letters",
        "(e.email_id, e.attempt_count) in (\n            select w.email_id, w.attempts",
        "(e.email_id) in (\n            select w.email_id",
    ),
    "letter_of_what_is_not_dead": Mutant("replay_letters", "\n        and e.status in ('failed', 'held')"),
    "letter_of_what_may_have_arrived": Mutant(
        "replay_letters", "may_have_arrived or not has_content", "not has_content"
    ),
    "letter_of_what_came_in_doubt": Mutant(
        "replay_letters", "e.status = 'held' or e.was_uncertain", "e.status = 'held'"
    ),
    "discard_of_what_is_not_dead": Mutant("discard_dead", "        and status in ('failed', 'held')\n"),
    "discard_twice": Mutant("discard_dead", "\n        and dead_letter_discarded_at is null"),
    "announced_again_since": Mutant(
        "announce_again",
        "(e.email_id, e.attempt_count) in (\n            select w.email_id, w.attempt_count",
        "(e.email_id) in (\n            select w.email_id",
    ),
    "announced_again_while_it_lives": Mutant("announce_again", "    and e.status in ('failed', 'held')\n"),
    "announced_again_though_discarded": Mutant("announce_again", "    and e.dead_letter_discarded_at is null\n"),
}


@pytest.fixture
def open_sessions(tables_url: str, books: Books) -> Iterator[Callable[[Mutant | None], Sessions]]:
    opened: list[Sessions] = []

    def open_them(mutant: Mutant | None = None) -> Sessions:
        opened.append(Sessions(tables_url, books, mutant))
        return opened[-1]

    yield open_them
    for sessions in opened:
        sessions.close()


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


def test_the_statements_do_to_every_row_what_the_protocol_says(
    open_sessions: Callable[[Mutant | None], Sessions],
) -> None:
    driven(open_sessions(None))


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_one_of_todays_statements(name: str) -> None:
    before, after = MUTANTS[name].texts

    assert before != after


@pytest.mark.slow
def test_the_statements_do_so_for_long(open_sessions: Callable[[Mutant | None], Sessions]) -> None:
    driven(open_sessions(None), runs=500, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_statement_without_its_fence_is_caught(name: str, open_sessions: Callable[[Mutant | None], Sessions]) -> None:
    sessions = open_sessions(MUTANTS[name])
    with pytest.raises(AssertionError):
        driven(sessions, runs=400, shrinks=False)
