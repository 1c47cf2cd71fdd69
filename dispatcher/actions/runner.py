"""Runs an action: the same for the command line, HTTP and the operators' page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from dispatcher.actions.action import Action, Change, Reach, Refused
from dispatcher.actions.batch import SAMPLE, Batch, Group, Judged
from dispatcher.domain.api_key import Scope
from dispatcher.errors import StoreBusy
from dispatcher.ops.acts import Act
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Who:
    """Who acts.

    Attributes:
        actor: The name in the audit log; None: this process's user and host.
        tenant_id: The only tenant that this actor sees; None: all.
        scopes: What the actor may do; None: everything.
    """

    actor: str | None = None
    tenant_id: str | None = None
    scopes: frozenset[Scope] | None = None


def check(action: type[Action[Any]], who: Who) -> None:
    """Checks that somebody may use an action.

    Raises:
        Refused: `insufficient-scope`, or `all-tenants-only`.
    """
    if who.scopes is not None and action.scope not in who.scopes:
        raise Refused("scope", "insufficient-scope", f"This needs the scope {action.scope}.", None)
    if action.reach is Reach.ALL_TENANTS and who.tenant_id is not None:
        raise Refused(
            "reach", "insufficient-scope", "This changes what all tenants share.", "Use a key of all tenants."
        )


async def run(source: Source, action: Action[R], who: Who) -> R:
    """Carries out an action. The statement writes the audit record in the same commit.

    Raises:
        Refused: the actor may not, or the action's own refusals.
    """
    check(type(action), who)
    parameters = {**action.values(), **action.constants}
    if isinstance(action, Change):
        act = Act.of(who.actor, action.reason or f"dispatcher {action.name}")
        parameters |= {"actor": act.actor, "reason": act.reason}
    rows = await fetch(source, action.query, parameters or None, into=action.row)
    if action.metric is not None:
        from dispatcher.telemetry import metrics

        getattr(metrics, action.metric).inc(len(rows))
    if action.is_list:
        return rows  # type: ignore[return-value]
    if not rows:
        raise action.refused()
    result: R = rows[0]
    return result


async def preview(source: Source, action: Batch, *, most: int | None = None) -> list[Group]:
    """The emails that a batch selects, by status; counts at most `most`."""
    parameters = {**action.selection(), "sample": SAMPLE, "most": most}
    return await fetch(source, action.count, parameters, into=Group)


async def select(source: Source, action: Batch, *, most: int | None = None) -> list[UUID]:
    """The ids of the emails that a batch selects, oldest first."""
    return [row[0] for row in await fetch(source, action.find, {**action.selection(), "most": most})]


async def run_batch(source: Source, action: Batch, who: Who, ids: Sequence[UUID]) -> AsyncIterator[list[Judged]]:
    """Changes emails in batches, each in one commit; yields the verdicts of each batch, in the order of the ids."""
    act = Act.of(who.actor, action.reason)
    for first in range(0, len(ids), action.batch_rows):
        judged = await _change(source, action, act, list(dict.fromkeys(ids[first : first + action.batch_rows])))
        if action.counter is not None:
            from dispatcher.telemetry import metrics

            metric, verdict = action.counter
            getattr(metrics, metric).add(sum(each.verdict == verdict for each in judged), verdict)
        yield judged


async def _change(source: Source, action: Batch, act: Act, ids: Sequence[UUID]) -> list[Judged]:
    """Changes the emails whose rows are not locked: if one is locked, the statement changes nothing, so this splits."""
    parameters = {
        **ids_within(ids),
        **action.change(),
        "tenant_id": action.tenant_id,
        "actor": act.actor,
        "reason": act.reason,
    }
    try:
        found = {each.email_id: each for each in await fetch(source, action.query, parameters, into=Judged)}
    except StoreBusy:
        if len(ids) == 1:
            return [Judged(ids[0], "locked", None)]
        half = len(ids) // 2
        return await _change(source, action, act, ids[:half]) + await _change(source, action, act, ids[half:])
    return [found.get(each) or Judged(each, "unknown", None) for each in ids]
