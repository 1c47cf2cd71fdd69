"""Runs an action: the same for the command line, HTTP and the operators' page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from dispatcher.actions.action import Action, Change, Paged, Reach, Refused
from dispatcher.actions.batch import SAMPLE, Batch, Group, Judged
from dispatcher.domain.api_key import Scope
from dispatcher.domain.text import DEFAULT_TENANT
from dispatcher.domain.values import dataclass
from dispatcher.errors import StoreBusy
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch

if TYPE_CHECKING:
    from dispatcher.domain.message import Message

R = TypeVar("R")


class Face(StrEnum):
    """The faces of an action."""

    COMMAND = "command"
    HTTP = "http"
    OPEN_HTTP = "open http"
    """HTTP without a key."""
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class Who:
    """Who acts.

    Attributes:
        actor: The name in the audit log; None: this process's user and host.
        tenant_id: The only tenant that this actor sees; None: all.
        scopes: What the actor may do; None: everything.
        sees_content: Whether lists show senders, recipients and subjects.
        is_test: Whether a test key acts, which changes no other emails than tests.
        admit: Raises an error if the actor may not enqueue an email; None: the actor may.
    """

    face: Face
    actor: str | None = None
    tenant_id: str | None = None
    scopes: frozenset[Scope] | None = None
    sees_content: bool = False
    is_test: bool = False
    admit: Callable[[Message], Awaitable[None]] | None = None


_UNNAMED: Final[dict[tuple[Face, Reach], str | None]] = {
    (Face.COMMAND, Reach.ONE_TENANT): DEFAULT_TENANT,
    (Face.COMMAND, Reach.ANY_TENANT): None,
    (Face.PAGE, Reach.ONE_TENANT): DEFAULT_TENANT,
    (Face.PAGE, Reach.ANY_TENANT): None,
    (Face.OPEN_HTTP, Reach.ONE_TENANT): DEFAULT_TENANT,
    (Face.OPEN_HTTP, Reach.ANY_TENANT): DEFAULT_TENANT,
    **{(face, Reach.SEEN_TENANTS): None for face in Face},
    # HTTP with a key of all tenants, otherwise: the request must name a tenant.
}
"""The tenant if an actor who sees all tenants names none; None: all tenants."""


def tenant_of(action: type[Action[Any]], who: Who, given: str | None) -> str | None:
    """The tenant that an action is about; None: all tenants.

    | key's tenant | given   | the tenant                                          |
    | ------------ | ------- | --------------------------------------------------- |
    | one          | none    | the key's                                           |
    | one          | another | refused: `tenant-forbidden`                         |
    | all          | one     | the given one                                       |
    | all          | none    | by face and reach: all, `default`, or refused (HTTP) |

    Raises:
        Refused: `tenant-missing` or `tenant-forbidden`.
    """
    if who.tenant_id is not None:
        if given not in (None, who.tenant_id):
            words = "Leave out tenant_id, or use a key of the tenant that tenant_id names."
            raise Refused("tenant", "tenant-forbidden", words, None)
        return who.tenant_id
    if given is None and (who.face, action.reach) not in _UNNAMED:
        raise Refused("tenant", "tenant-missing", "Add tenant_id, or use a key of one tenant.", None)
    return given or _UNNAMED[who.face, action.reach]


def check(action: type[Action[Any]], who: Who, *others: Scope) -> None:
    """Checks that an actor may use an action. Each scope of `others` is enough, too.

    Raises:
        Refused: `insufficient-scope`.
    """
    if who.scopes is not None and not who.scopes & {action.scope, *others}:
        raise Refused("scope", "insufficient-scope", f"This needs the scope {action.scope}.", None)
    if action.reach is Reach.ALL_TENANTS and who.tenant_id is not None:
        raise Refused(
            "reach", "insufficient-scope", "This concerns what all tenants share.", "Use a key of all tenants."
        )


def of_tenant(action: R, who: Who) -> R:
    """The action with the tenant that it is about (see `tenant_of`)."""
    assert isinstance(action, Action)
    if action.reach is Reach.ALL_TENANTS:
        return action
    return action.but(tenant_id=tenant_of(type(action), who, action.values()["tenant_id"]))


async def run(source: Source, action: Action[R], who: Who, settings: object = None) -> R:
    """Carries out an action. The statement writes the audit record in the same commit.

    Raises:
        Refused: the actor may not, or the action's own refusals.
        Mistakes: a field does not fit the settings.
    """
    check(type(action), who)
    action = of_tenant(action, who)
    action.check(settings)
    parameters: dict[str, Any] = {**action.values(), **action.constants, "sees_content": who.sees_content}
    if isinstance(action, Change):
        from dispatcher.ops.acts import Act  # here, because a list needs no scrubbing

        act = Act.of(who.actor, action.reason or f"dispatcher {action.name}")
        parameters |= {"actor": act.actor, "reason": act.reason, "admit": who.admit}
    if isinstance(action, Paged):
        parameters |= action.position()
    rows = await action.run(source, {**parameters, **await action.prepare(source, settings)})
    if who.tenant_id is not None:
        rows = action.for_tenant(rows)
    if isinstance(action, Paged):
        return action.page(rows, action.limit)  # type: ignore[return-value]
    if action.is_list:
        return rows  # type: ignore[return-value]
    if not rows:
        raise action.refused()
    if isinstance(action, Change):
        await action.after_commit(settings)
    result: R = rows[0]
    return result


async def preview(source: Source, action: Batch, *, most: int | None = None) -> list[Group]:
    """The emails that a batch selects, by status; counts at most `most`."""
    parameters = {**action.selection(), "sample": SAMPLE, "most": most}
    return await fetch(source, action.count, parameters, into=Group)


async def select(source: Source, action: Batch, *, most: int | None = None) -> list[UUID]:
    """The ids of the emails that a batch selects, oldest first."""
    return [row[0] for row in await fetch(source, action.find, {**action.selection(), "most": most})]


async def run_batch(
    source: Source, action: Batch, who: Who, ids: Sequence[UUID], settings: object = None
) -> AsyncIterator[list[Judged]]:
    """Changes emails in batches, each in one commit; yields the verdicts of each batch, in the order of the ids."""
    from dispatcher.ops.acts import Act

    action.check(settings)
    act = Act.of(who.actor, action.reason)
    named = {"actor": act.actor, "reason": act.reason, "is_test": who.is_test}
    parameters = {**action.change(), **await action.prepare(source, settings), **named}
    for first in range(0, len(ids), action.batch_rows):
        batch = list(dict.fromkeys(ids[first : first + action.batch_rows]))
        yield await _change(source, action, parameters, batch)
    await action.after_commit(settings)


async def _change(source: Source, action: Batch, parameters: dict[str, Any], ids: Sequence[UUID]) -> list[Judged]:
    """Changes the emails whose rows are not locked: if one is locked, the statement changes nothing, so this splits."""
    try:
        given = {**ids_within(ids), "tenant_id": action.tenant_id, **parameters}
        found = {each.email_id: each for each in await fetch(source, action.query, given, into=Judged)}
    except StoreBusy:
        if len(ids) == 1:
            return [Judged(ids[0], "locked", None)]
        half = len(ids) // 2
        first = await _change(source, action, parameters, ids[:half])
        return first + await _change(source, action, parameters, ids[half:])
    return [found.get(each) or Judged(each, "unknown", None) for each in ids]
