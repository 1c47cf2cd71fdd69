"""Derives HTTP operations from actions on many emails (see `dispatcher.actions.batch`): on one, and on a selection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.actions import all_actions
from dispatcher.actions.action import example, read
from dispatcher.actions.batch import LOCKED, UNKNOWN, Batch, Judged, Outcome
from dispatcher.actions.runner import Who, of_tenant, preview, run_batch, select
from dispatcher.admission.problems import FieldError, Problem
from dispatcher.api.face import (
    ActionEndpoints,
    Endpoint,
    bodies_with,
    body_of,
    json_response,
    problems,
    row_schemas,
    who,
)
from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    ID,
    Operation,
    object_schema,
    of_operation,
    operation_name,
    path_parameter,
)
from dispatcher.domain.api_key import Scope
from dispatcher.domain.kinds import SEND_AT
from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession

BATCHES: Final = [each for each in all_actions() if issubclass(each, Batch)]
STATUS: Final = {"type": "string", "enum": list(Status)}
_EMAIL_ID: Final = path_parameter("email_id", {"type": "string", "format": "uuid"}, "The email's id.")


def _routes(of: ActionEndpoints, action: type[Batch]) -> Iterator[tuple[str, str, Endpoint, Operation]]:
    """The operation on one email, and the operation on a selection."""
    summary, rest = action.summary()
    one = operation_name(action)
    if action.http_one:
        method, path = action.http_one.split()
        yield (
            method,
            path,
            _one(of, action),
            Operation(
                name=f"{one}_email",
                summary=f"{action.verb().capitalize()} an email",
                description=of_operation(f"{summary}. {rest}"),
                response_schema="ChangedEmail",
                request_schema=f"{action.__name__}One",
                example=_known(action, example(action), is_one=True),
                parameters=(_EMAIL_ID,),
                problems=(*sorted({each.code for each in action.verdicts if each.code}), *DECISION_PROBLEMS),
            ),
        )
    method, path = action.http.split()
    yield (
        method,
        path,
        _selected(of, action),
        Operation(
            name=f"{one}_emails",
            summary=f"{action.verb().capitalize()} emails by a filter",
            description=f"Changes at most {action.most_over_http:,} emails; repeat while `has_more` is true.",
            response_schema="Outcome",
            request_schema=action.__name__,
            example=_known(action, example(action, action.examples[-1]), is_one=False),
            problems=(*BODY_PROBLEMS, "invalid-body"),
        ),
    )


def _known(action: type[Batch], given: Mapping[str, Any], *, is_one: bool) -> dict[str, Any]:
    left_out = {*action.filters, "email_ids", "all", "dry_run"} if is_one else set()
    return {name: value for name, value in given.items() if name in action.fields and name not in left_out}


@asynccontextmanager
async def _asked(
    of: ActionEndpoints, action: type[Batch], request: Request, *others: Scope, is_one: bool
) -> AsyncIterator[tuple[Batch, Who, AsyncSession]]:
    caller = await of.access.authenticate(request, action.scope, *others)
    actor = who(caller)
    async with of.body(request, caller) as given:
        with problems("pointer"):
            known = _known(action, dict.fromkeys(action.fields), is_one=is_one)
            asked = read(action, given, {}, is_reason_required=True, only=known.keys())
            asked = of_tenant(asked, actor)
            async with of.sessions.of(caller.share) as connection:
                yield asked, actor, connection


def _one(of: ActionEndpoints, action: type[Batch]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        async with _asked(of, action, request, *action.one_scopes, is_one=True) as (asked, actor, connection):
            async for (judged,) in run_batch(connection, asked, actor, [request.path_params["email_id"]], of.settings):
                changed = {"id": judged.email_id, "status": _after(action, judged)}
                return json_response(changed if judged.send_at is None else {**changed, "send_at": judged.send_at})
        raise AssertionError

    return endpoint


def _selected(of: ActionEndpoints, action: type[Batch]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        async with _asked(of, action, request, is_one=False) as (asked, actor, connection):
            if not (asked.dry_run or asked.is_selecting()):
                detail = "has no filter, so it selects every email of the tenant; set `all` if that is intended"
                raise Problem("invalid-body", errors=[FieldError("pointer", "#", detail)])
            most = action.most_over_http
            groups = await preview(connection, asked, most=most + 1)
            judged: list[Judged] = []
            if not asked.dry_run:
                ids = await select(connection, asked, most=most)
                async for batch in run_batch(connection, asked, actor, ids, of.settings):
                    judged += batch
        return json_response(action.outcome(groups, len(set(asked.email_ids or ())), judged, most=most))

    return endpoint


def _after(action: type[Batch], judged: Judged) -> Status:
    verdict = action.verdict(judged.verdict)
    if verdict.after is not None:
        return verdict.after
    detail = verdict.detail.format(status=judged.status)
    if verdict.at:
        raise Problem(verdict.code, errors=[FieldError("pointer", f"#/{verdict.at}", detail)])
    is_late = verdict not in (LOCKED, UNKNOWN)
    raise Problem(
        verdict.code,
        detail,
        retry_after=1 if verdict is LOCKED else None,
        email_status=judged.status if is_late else None,
    )


def _schemas(action: type[Batch]) -> dict[str, Any]:
    whole = body_of(action)
    names = _known(action, action.fields, is_one=True)
    properties = {name: each for name, each in whole["properties"].items() if name in names}
    one = {**whole, "properties": properties}
    return {
        action.__name__: {**whole, "anyOf": bodies_with(action, (*action.selectors(), "dry_run"))},
        f"{action.__name__}One": one,
        "ChangedEmail": object_schema({"id": ID, "status": STATUS, "send_at": dict(SEND_AT.schema)}, "send_at"),
        **row_schemas([Outcome]),
    }


def routes(of: ActionEndpoints) -> Iterator[tuple[str, str, Endpoint, Operation]]:
    for action in BATCHES:
        yield from _routes(of, action)


def schemas() -> dict[str, Any]:
    return {name: schema for action in BATCHES for name, schema in _schemas(action).items()}
