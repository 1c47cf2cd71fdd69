"""Splits a batch if PostgreSQL refuses a statement because of one of its rows.

A batched statement fails as a whole if PostgreSQL cannot read or write one row, for example because of a damaged TOAST
value, an unreadable disk block, a trigger that raises an error, or a value out of range. The statement is then executed
for each half of the batch. A half that fails is split again, until each refused row is found. A batch of n rows with
one refused row takes about 2 log2(n) more statements.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import UUID

from dispatcher.errors import StatementRefused

T = TypeVar("T")
R = TypeVar("R")


async def bisect_batch(
    items: Sequence[T], execute: Callable[[Sequence[T]], Awaitable[R]]
) -> tuple[list[R], list[tuple[T, StatementRefused]]]:
    """Executes a batched statement, and bisects the batch if PostgreSQL refuses the statement (StatementRefused).

    `execute` is called first with all items (at least one). Returns the results of the calls that succeeded, in the
    order of the items; and each refused item with its error.
    """
    try:
        return [await execute(items)], []
    except StatementRefused as error:
        if len(items) == 1:
            return [], [(items[0], error)]
    middle = len(items) // 2
    answers, culprits = await bisect_batch(items[:middle], execute)
    more_answers, more_culprits = await bisect_batch(items[middle:], execute)
    return answers + more_answers, culprits + more_culprits


def report_refused(email_id: UUID, reason: str) -> None:
    """Logs and counts an email that a batch leaves out."""
    from dispatcher.telemetry import metrics  # imported here, because few commands need it
    from dispatcher.telemetry.log import get_log

    metrics.STATEMENTS_REFUSED.add(1, "email")
    get_log().error("email.statement_failed", email_id=str(email_id), reason=reason)
