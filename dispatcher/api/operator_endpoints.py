"""The endpoints for operators: confirm and release held emails, and replay failed emails. `ops/` does the work."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeGuard
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl, Caller
from dispatcher.api.body_reader import BodyReader, run_off_loop
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.large_json import parse
from dispatcher.api.operator_jobs import OperatorJobs
from dispatcher.api.problems import FieldError, Problem
from dispatcher.api.status_endpoints import MAX_FILTER_CHARACTERS, NOT_BLANK, TENANT, is_printable, parameters
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from dispatcher.ops import replaying, verdicts
from dispatcher.ops.acts import Act
from dispatcher.ops.verdicts import Verdict
from dispatcher.store.connections import AsyncSession
from dispatcher.store.emails import find_email
from dispatcher.store.failures import Selection
from dispatcher.store.replays import Replay, ReplayState
from dispatcher.store.statements import Source

MAX_BODY_BYTES: Final = 256 * 1024
"""The largest body. A thousand ids need 40 KB."""
MAX_REASON_CHARACTERS: Final = 500
MAX_IDS: Final = 1000
MAX_PER_SECOND: Final = 10_000
MAX_SECONDS: Final = 10 * 366 * 86_400
_LARGEST_ID: Final = 2**63 - 1

Check = Callable[[object], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_FILTER_CHARACTERS and is_printable(value)


def _is_tenant(value: object) -> bool:
    try:
        return bool(tenant(value))
    except InvalidEmail:
        return False


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REASON_CHARACTERS and bool(re.fullmatch(NOT_BLANK, value))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_age(value: object) -> bool:
    return _is_number(value) and 0 < value <= MAX_SECONDS


def _is_pace(value: object) -> bool:
    return _is_number(value) and replaying.MIN_PER_SECOND <= value <= MAX_PER_SECOND


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MAX_IDS and all(_id(item) is not None for item in value)


def _id(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _is_instant(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_instant(value))
    except ValueError:
        return False


_REASON_RULE: Final = f"must be 1 to {MAX_REASON_CHARACTERS} printable characters that say why"
_TENANT_RULE: Final = f"must be 1 to {MAX_TENANT_CHARACTERS} of A-Z a-z 0-9 . _ : - and begin with a letter or digit"
INSTANT: Final[tuple[Check, str]] = (_is_instant, "must be a time in ISO 8601, such as 2026-11-21T10:00:00Z")
DECISION: Final[Mapping[str, tuple[Check, str]]] = {
    "reason": (_is_reason, _REASON_RULE),
    "tenant_id": (_is_tenant, _TENANT_RULE),
}
"""The fields that most requests of operators have; see `operator_request`."""
TEXT: Final[tuple[Check, str]] = (_is_text, f"must be 1 to {MAX_FILTER_CHARACTERS} printable characters")
IDS: Final[tuple[Check, str]] = (_is_ids, f"must be a list of 1 to {MAX_IDS:,} email ids (UUIDs)")
AGES: Final[Mapping[str, tuple[Check, str]]] = dict.fromkeys(
    ("older_than_seconds", "newer_than_seconds"), (_is_age, f"must be a number above 0, up to {MAX_SECONDS:,}")
)
_REPLAY: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "error_type": (lambda value: value in tuple(Reason), f"must be one of: {', '.join(Reason)}"),
    "provider": TEXT,
    "channel": TEXT,
    "status": (lambda value: value in ("failed", "held"), "must be failed or held"),
    "email_ids": IDS,
    **AGES,
    "include_held": (lambda value: isinstance(value, bool), "must be true or false"),
    "per_second": (_is_pace, f"must be a number from {replaying.MIN_PER_SECOND} to {MAX_PER_SECOND:,}"),
    "force": (lambda value: isinstance(value, bool), "must be true or false"),
}
_NOT_HELD: Final[Mapping[Verdict, str]] = {
    Verdict.ALREADY_SENT: "Nothing was changed: the email's status is sent.",
    Verdict.UNDER_WAY: "Nothing was changed: the email's status is pending, waiting or sending.",
    Verdict.CANCELLED: "Nothing was changed: the email's status is cancelled.",
    Verdict.EXPIRED: "Nothing was changed: the email has expired, and is never sent again.",
    Verdict.FAILED: "Nothing was changed: the email's status is failed. Replay the email instead.",
    Verdict.CONTENT_PRUNED: "Nothing was changed: the email's content has been deleted, so it cannot be sent again.",
    Verdict.UNKNOWN: "Nothing was changed: the email no longer exists.",
}
"""Why an email was neither confirmed nor released, by the verdict."""


@dataclass(frozen=True, slots=True)
class OperatorEndpoints:
    """Confirms and releases held emails, and manages replays. `jobs` runs the replays in the background."""

    access: AccessControl
    bodies: BodyReader
    source: Source
    sessions: FairSessions
    jobs: OperatorJobs

    async def confirm(self, request: Request) -> Response:
        return await self._decide(request, verdicts.confirm)

    async def release(self, request: Request) -> Response:
        """Sets a held email to `pending`, so that it is sent again."""
        return await self._decide(request, verdicts.release)

    async def create_replay(self, request: Request) -> Response:
        """Selects emails, and starts to replay them in the background."""
        async with (
            operator_request(self.access, self.bodies, request, _REPLAY) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            act = act_of(caller, given["reason"])
            selection = _selection(given, caller.tenant(given.get("tenant_id")))
            replay = await replaying.create(
                connection,
                selection,
                act,
                include_held=given.get("include_held", False),
                per_second=given.get("per_second", replaying.DEFAULT_PER_SECOND),
                force=given.get("force", False),
            )
        self.jobs.start_replay(replay)
        return json_response(self._document(caller, replay), 202, {"Location": f"/v1/replays/{replay.replay_id}"})

    async def get_replay(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                return json_response(self._document(caller, await _found(connection, request, tenant)))

    async def stop_replay(self, request: Request) -> Response:
        """Stops a replay after its current email. Idempotent."""
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                replay = await _found(connection, request, tenant)
                stopped = await replaying.stop(connection, replay.replay_id, act_of(caller, "stopped over HTTP"))
        return json_response(self._document(caller, stopped or replay))

    async def resume_replay(self, request: Request) -> Response:
        """Continues a stopped or interrupted replay in this process. Has no effect on a running or done replay."""
        async with (
            operator_request(self.access, self.bodies, request, DECISION) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            replay = await _found(connection, request, caller.tenant(given.get("tenant_id")))
            act = act_of(caller, given["reason"])
            resumed = await replaying.resume(connection, replay.replay_id, actor=act.actor, reason=act.reason)
        if resumed is not None and resumed.state is ReplayState.RUNNING:
            self.jobs.start_replay(replay)
        return json_response(self._document(caller, resumed or replay), 202)

    def _document(self, caller: Caller, replay: Replay) -> dict[str, Any]:
        """The JSON object that describes a replay. A tenant does not see the reason of another operator."""
        tenant_id = None if caller.key is None else caller.key.tenant_id
        shows_reason = tenant_id is None or self.access.is_own_act(replay.actor, tenant_id)
        return {
            "id": replay.replay_id,
            "state": replay.state.value,
            "is_active": replay.is_active,
            "total": replay.total,
            "waiting": replay.waiting,
            "outcomes": {outcome.value: count for outcome, count in replay.outcomes.items()},
            "include_held": replay.include_held,
            "per_second": replay.per_second,
            "paced_with": list(replay.paced_with),
            "reason": replay.reason if shows_reason else None,
            "created_at": replay.created_at,
            "changed_at": replay.changed_at,
        }

    async def _decide(
        self, request: Request, decide: Callable[[AsyncSession, UUID, Act], Awaitable[Verdict]]
    ) -> Response:
        async with operator_request(self.access, self.bodies, request, DECISION) as (caller, given):
            email_id: UUID = request.path_params["email_id"]
            tenant_id = caller.tenant(given.get("tenant_id"))
            if await find_email(self.source, email_id, tenant_id=tenant_id) is None:
                raise Problem("not-found", "The tenant has no email with this id.")
            async with self.sessions.of(caller.share) as connection:
                verdict = await decide(connection, email_id, act_of(caller, given["reason"]))
        if verdict not in (Verdict.CONFIRMED, Verdict.RELEASED):
            raise Problem("not-held", _NOT_HELD[verdict])
        self.jobs.remove_dead_letters([email_id])
        return json_response({"id": email_id, "verdict": verdict.value})


@asynccontextmanager
async def operator_request(
    access: AccessControl,
    bodies: BodyReader,
    request: Request,
    known: Mapping[str, tuple[Check, str]],
    required: Sequence[str] = ("reason",),
    scopes: Sequence[Scope] = (Scope.OPERATE,),
) -> AsyncIterator[tuple[Caller, Mapping[str, Any]]]:
    """Yields the caller and the body's validated fields. Occupies a request slot during the block.

    Args:
        known: For each allowed field, its check, and the error message if the check fails.
        required: The fields that must be present.
        scopes: The caller's key needs one of these scopes.

    Raises:
        Problem: the codes of `authenticate` and of `BodyReader.receive`, `malformed-json` or `invalid-body`.
    """
    caller = await access.authenticate(request, *scopes)
    async with bodies.read(request, caller.name) as body:
        given = await run_off_loop(len(body), lambda: parse(body))
        if not isinstance(given, dict):
            raise Problem("invalid-body", errors=[FieldError("pointer", "#", "must be an object")])
        errors = [FieldError("pointer", f"#/{name}", "is required") for name in required if name not in given]
        if given.keys() - known.keys():
            errors.append(FieldError("pointer", "#", f"has an unknown field; allowed: {', '.join(known)}"))
        errors += [
            FieldError("pointer", f"#/{name}", why)
            for name, (fits, why) in known.items()
            if name in given and not fits(given[name])
        ]
        if errors:
            raise Problem("invalid-body", errors=errors)
        yield caller, given


def act_of(caller: Caller, reason: str) -> Act:
    """Returns who acts (the API key) and why, for the audit log."""
    actor = "api" if caller.key is None else f"api key ed_{caller.key.key_id} ({caller.key.name})"
    return Act.of(actor, reason)


def _selection(given: Mapping[str, Any], tenant: str) -> Selection:
    """The filter for the emails to replay, from the request's fields. It selects only emails of this tenant."""
    ids = given.get("email_ids")
    return Selection(
        status=Status(given["status"]) if "status" in given else None,
        error_type=given.get("error_type"),
        provider=given.get("provider"),
        channel=given.get("channel"),
        tenant_id=tenant,
        older_than_seconds=given.get("older_than_seconds"),
        newer_than_seconds=given.get("newer_than_seconds"),
        email_ids=None if ids is None else tuple(UUID(item) for item in ids),
    )


async def _found(connection: AsyncSession, request: Request, tenant: str) -> Replay:
    text = request.path_params["replay_id"]
    replay = None
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST_ID:
        replay = await replaying.find(connection, int(text))
    if replay is None or replay.selection.get("tenant_id") != tenant:
        raise Problem("not-found", "The tenant has no replay with this id.")
    return replay


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
