"""The demo's books: what balances, and each difference that is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final
from uuid import UUID

import pytest

from dispatcher.dev.demo_books import Evidence, balance
from dispatcher.dev.demo_emails import Fate
from dispatcher.domain.status import Status

SENT, FAILED, HELD, RETRIED, NEW = (UUID(int=number) for number in range(1, 6))

HONEST: Final = Evidence(
    fates={SENT: Fate.ACCEPTED, FAILED: Fate.REFUSED, HELD: Fate.ACCEPTED, RETRIED: Fate.GREYLISTED},
    rolled_back=frozenset({UUID(int=99)}),
    standing={SENT: Status.SENT, FAILED: Status.FAILED, HELD: Status.HELD, RETRIED: Status.SENT},
    counted={Status.SENT: 2, Status.FAILED: 1, Status.HELD: 1},
    times={str(SENT): 1, str(RETRIED): 1},
    dlq=3,
    poison=1,
)


def with_standing(standing: dict[UUID, Status]) -> Evidence:
    """The honest evidence but for what these rows say, with the totals that belong to it."""
    rows = {**HONEST.standing, **standing}
    counts = Counter(rows[email_id] for email_id in HONEST.fates)
    return replace(HONEST, standing=rows, counted=counts, dlq=counts[Status.FAILED] + counts[Status.HELD] + 1)


def test_books_of_honest_witnesses_balance() -> None:
    books = balance(HONEST)

    assert books.differences == ()
    assert (books.emails, books.sent, books.failed, books.held, books.pending) == (4, 2, 1, 1, 0)
    assert (books.delivered, books.duplicates, books.lost, books.dlq) == (2, 0, 0, 3)


def test_a_held_email_may_have_been_delivered() -> None:
    books = balance(replace(HONEST, times={**HONEST.times, str(HELD): 1}))

    assert books.differences == ()
    assert (books.delivered, books.held_delivered) == (3, 1)


def test_an_email_without_a_row_is_lost() -> None:
    evidence = replace(HONEST, fates={**HONEST.fates, NEW: Fate.ACCEPTED})

    books = balance(evidence)

    assert books.lost == 1
    assert books.differences == (f"1 enqueued, but without a row: {NEW}",)


def test_an_email_that_is_sent_and_never_arrived_is_lost() -> None:
    books = balance(replace(HONEST, times={str(RETRIED): 1}))

    assert books.lost == 1
    assert books.differences == (f"1 sent, but not in the server's ledger: {SENT}",)


@pytest.mark.parametrize("email_id", [SENT, HELD])
def test_an_email_that_arrived_twice_is_a_duplicate(email_id: UUID) -> None:
    books = balance(replace(HONEST, times={**HONEST.times, str(email_id): 2}))

    assert books.duplicates == 1
    assert books.differences == (f"1 accepted by the server more than once: {email_id}",)


@pytest.mark.parametrize("status", [Status.PENDING, Status.SENDING])
def test_an_email_that_is_not_finished_is_pending(status: Status) -> None:
    books = balance(with_standing({HELD: status}))

    assert (books.pending, books.lost) == (1, 0)
    assert books.differences == (f"1 not finished: {HELD}",)


def test_a_failed_email_that_arrived_is_named() -> None:
    books = balance(replace(HONEST, times={**HONEST.times, str(FAILED): 1}))

    assert books.differences == (f"1 failed, but in the server's ledger: {FAILED}",)


def test_an_email_that_failed_without_need_is_named() -> None:
    evidence = with_standing({SENT: Status.FAILED})

    books = balance(replace(evidence, times={str(RETRIED): 1}))

    assert books.differences == (f"1 failed, though the server would have accepted: {SENT}",)


def test_a_refused_email_that_is_held_is_named() -> None:
    assert balance(with_standing({FAILED: Status.HELD})).differences == (
        f"1 refused by the server, but not failed: {FAILED}",
    )


def test_a_delivery_of_nobodys_email_is_named() -> None:
    books = balance(replace(HONEST, times={**HONEST.times, "": 1}))

    assert books.differences == ("1 in the server's ledger, but not ours: ",)


def test_a_row_of_a_rolled_back_transaction_is_named() -> None:
    (rolled_back,) = HONEST.rolled_back

    books = balance(replace(HONEST, standing={**HONEST.standing, rolled_back: Status.PENDING}))

    assert books.differences == (f"1 rolled back, but with a row: {rolled_back}",)


def test_a_row_that_nobody_enqueued_is_named() -> None:
    books = balance(replace(HONEST, standing={**HONEST.standing, NEW: Status.PENDING}))

    assert books.differences == (f"1 with a row, but never enqueued: {NEW}",)


def test_a_missing_dead_letter_is_named() -> None:
    books = balance(replace(HONEST, dlq=2))

    assert books.differences == ("the DLQ holds 2 messages; failed, held and poison make 3",)


def test_a_count_of_ours_that_is_wrong_is_named() -> None:
    books = balance(replace(HONEST, counted={**HONEST.counted, Status.SENT: 3}))

    assert books.differences == ("`dispatcher status` counts 3 sent; the rows say 2",)


def test_many_emails_are_named_by_their_first() -> None:
    fates = dict.fromkeys((UUID(int=number) for number in range(11, 16)), Fate.ACCEPTED)

    (difference,) = balance(replace(HONEST, fates={**HONEST.fates, **fates})).differences

    assert difference == f"5 enqueued, but without a row: {UUID(int=11)}, {UUID(int=12)}, {UUID(int=13)}, …"
