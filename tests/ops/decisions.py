"""Operators' decisions about emails, without a face."""

from __future__ import annotations

from uuid import UUID

from dispatcher.actions.batch import Batch
from dispatcher.actions.runner import Face, Who, run_batch
from dispatcher.store.statements import Source


async def decide(source: Source, decision: Batch, *email_ids: UUID, actor: str = "ann@ops-1") -> list[str]:
    """Carries out a decision; returns a verdict per email."""
    return [
        each.verdict
        async for judged in run_batch(source, decision, Who(Face.COMMAND, actor), email_ids)
        for each in judged
    ]
