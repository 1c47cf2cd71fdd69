"""Splits a batch if PostgreSQL refuses a statement because of one of its rows.

A batched statement fails as a whole if one row cannot be read or written: a damaged TOAST value, a bad block, a trigger
that raises, a value out of range. The statement is executed for each half, and for halves of these, until only the
culprits are left. A batch of n rows with one culprit takes about 2 log2(n) more statements.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dispatcher.errors import StatementRefused

T = TypeVar("T")
R = TypeVar("R")


async def apart(
    items: Sequence[T], execute: Callable[[Sequence[T]], Awaitable[R]]
) -> tuple[list[R], list[tuple[T, StatementRefused]]]:
    """Executes a batched statement, for ever smaller parts of the batch where PostgreSQL refuses it.

    Args:
        items: At least one.
        execute: Executes the statement for some of them. It is called again after it raised StatementRefused.

    Returns:
        What `execute` returned for each part, in order; and each culprit with the reason.
    """
    try:
        return [await execute(items)], []
    except StatementRefused as error:
        if len(items) == 1:
            return [], [(items[0], error)]
    middle = len(items) // 2
    answers, culprits = await apart(items[:middle], execute)
    more_answers, more_culprits = await apart(items[middle:], execute)
    return answers + more_answers, culprits + more_culprits
