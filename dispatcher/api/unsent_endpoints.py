"""The endpoints that cancel and reschedule emails which are not sent yet: one by its id, or many by a filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.operator_endpoints import AGES, DECISION, IDS, TEXT, Check, act_of, json_response, operator_request
from dispatcher.api.problems import FieldError, Problem
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_json import instant_of
from dispatcher.domain.email_rules import instant
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from dispatcher.ops import unsent
from dispatcher.ops.acts import Act
from dispatcher.ops.unsent import Change, Changed, ChangeMany
from dispatcher.store.unsent import UnsentFilter, count_unsent, find_unsent_ids
from dispatcher.telemetry import metrics

MAX_EMAILS: Final = 10_000
"""The most emails that one request with a filter changes. Changing this many emails takes a second or two."""

MakeChange = Callable[[Mapping[str, Any], Act, str], ChangeMany]


def _instant(text: object) -> datetime:
    return instant("send_at", instant_of("send_at", text))


def _is_instant(value: object) -> bool:
    with suppress(InvalidEmail):
        return bool(_instant(value))
    return False


_SEND_AT: Final[Mapping[str, tuple[Check, str]]] = {
    "send_at": (
        _is_instant,
        "must be a date and time with a zone, such as 2026-12-24T18:00:00+01:00, at most 366 days ahead",
    )
}
_FILTER: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "status": (lambda value: value in ("pending", "waiting"), "must be pending or waiting"),
    "lane": TEXT,
    "channel": TEXT,
    "correlation_id": TEXT,
    "email_ids": IDS,
    **AGES,
    "all": (lambda value: value is True, "must be true, or left out"),
    "dry_run": (lambda value: isinstance(value, bool), "must be true or false"),
}
_NO_FILTER: Final = frozenset({*DECISION, "send_at", "dry_run"})
"""The fields of a request that are not part of its filter, so that they select no emails."""


def _cancel(_given: Mapping[str, Any], act: Act, tenant_id: str) -> ChangeMany:
    return lambda connection, email_ids: unsent.cancel(connection, email_ids, act, tenant_id=tenant_id)


def _reschedule(given: Mapping[str, Any], act: Act, tenant_id: str) -> ChangeMany:
    send_at = _instant(given["send_at"])
    return lambda connection, email_ids: unsent.reschedule(connection, email_ids, send_at, act, tenant_id=tenant_id)


@dataclass(frozen=True, slots=True)
class UnsentEndpoints:
    """Cancels and reschedules emails.

    A key with the scope `send` or `operate` may change emails of its tenant one by one. To change many emails with a
    filter, the key needs the scope `operate`.
    """

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions

    async def cancel(self, request: Request) -> Response:
        """Cancels an email that is pending or waiting. Idempotent."""
        return await self._change_one(request, _cancel, {})

    async def reschedule(self, request: Request) -> Response:
        return await self._change_one(request, _reschedule, _SEND_AT)

    async def cancel_selected(self, request: Request) -> Response:
        return await self._change_selected(request, _cancel, {})

    async def reschedule_selected(self, request: Request) -> Response:
        return await self._change_selected(request, _reschedule, _SEND_AT)

    async def _change_one(self, request: Request, make: MakeChange, more: Mapping[str, tuple[Check, str]]) -> Response:
        known = {**DECISION, **more}
        scopes = (Scope.SEND, Scope.OPERATE)
        async with (
            operator_request(self.access, self.bodies, request, known, ("reason", *more), scopes) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            tenant_id = caller.tenant(given.get("tenant_id"))
            change = make(given, act_of(caller, given["reason"]), tenant_id)
            (changed,) = await change(connection, [request.path_params["email_id"]])
            _count([changed])
        return json_response({"id": changed.email_id, "status": _status_after(changed)})

    async def _change_selected(
        self, request: Request, make: MakeChange, more: Mapping[str, tuple[Check, str]]
    ) -> Response:
        known = {**_FILTER, **more}
        async with (
            operator_request(self.access, self.bodies, request, known, ("reason", *more)) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            if not (given.get("dry_run", False) or given.keys() - _NO_FILTER):
                detail = "has no filter, so it selects every unsent email of the tenant; set `all` if that is intended"
                raise Problem("invalid-body", errors=[FieldError("pointer", "#", detail)])
            selected = _selected(given, caller.tenant(given.get("tenant_id")))
            found = await count_unsent(connection, selected, sample=unsent.SAMPLE, most=MAX_EMAILS + 1)
            total = sum(number for number, _ in found.values())
            results: Counter[str] = Counter()
            if not given.get("dry_run", False):
                change = make(given, act_of(caller, given["reason"]), selected.tenant_id or "")
                ids = await find_unsent_ids(connection, selected, most=MAX_EMAILS)
                async for batch in unsent.change_all(connection, ids, change):
                    _count(batch)
                    results.update(each.change.value for each in batch)
        return json_response(
            {
                "selected": {status.value: min(number, MAX_EMAILS) for status, (number, _) in found.items()},
                "samples": {status.value: ids for status, (_, ids) in found.items()},
                "has_more": total > MAX_EMAILS,
                "results": results,
            }
        )


def _count(results: Sequence[Changed]) -> None:
    metrics.CANCELLED.add(sum(each.change is Change.CANCELLED for each in results), "cancelled")


def _status_after(changed: Changed) -> Status:
    """The email's status after the change.

    Raises:
        Problem: the email was not changed.
    """
    match changed.change:
        case Change.CANCELLED | Change.ALREADY_CANCELLED:
            return Status.CANCELLED
        case Change.RESCHEDULED:
            return Status.WAITING
        case Change.EXPIRES_FIRST:
            error = FieldError("pointer", "#/send_at", "must be before the email expires")
            raise Problem("invalid-body", errors=[error])
        case Change.LOCKED:
            raise Problem("overloaded", "Another transaction has locked the email's row.", retry_after=1)
        case Change.UNKNOWN:
            raise Problem("not-found", "The tenant has no email with this id.")
        case Change.TOO_LATE:
            detail = f"Nothing was changed: the email's status is {changed.status}."
            raise Problem("too-late", detail, email_status=changed.status)


def _selected(given: Mapping[str, Any], tenant_id: str) -> UnsentFilter:
    ids = given.get("email_ids")
    return UnsentFilter(
        status=Status(given["status"]) if "status" in given else None,
        tenant_id=tenant_id,
        lane=given.get("lane"),
        channel=given.get("channel"),
        correlation_id=given.get("correlation_id"),
        older_than_seconds=given.get("older_than_seconds"),
        newer_than_seconds=given.get("newer_than_seconds"),
        email_ids=None if ids is None else tuple(UUID(item) for item in ids),
    )
