"""The endpoints for replays, and what requests of operators have in common."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.actions.action import Action, read
from dispatcher.actions.dlq import CreateReplay, DecideReplay
from dispatcher.actions.runner import of_tenant
from dispatcher.api.access import AccessControl, Caller
from dispatcher.api.body_reader import BodyReader, run_off_loop
from dispatcher.api.face import problems, who
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.large_json import parse
from dispatcher.api.operation import MAX_REASON_CHARACTERS
from dispatcher.api.operator_jobs import OperatorJobs
from dispatcher.api.problems import FieldError, Problem
from dispatcher.api.status_endpoints import TENANT, parameters
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.failures import Replay
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.kinds import NOT_BLANK
from dispatcher.domain.kinds import TENANT as TENANT_KIND
from dispatcher.errors import InvalidEmail
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession
from dispatcher.store.replays import find_replay

MAX_BODY_BYTES: Final = 256 * 1024
"""The largest body. A thousand ids need 40 KB."""
A = TypeVar("A", bound=Action[Any])
Check = Callable[[object], bool]


def _is_tenant(value: object) -> bool:
    try:
        return bool(tenant(value))
    except InvalidEmail:
        return False


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REASON_CHARACTERS and bool(re.fullmatch(NOT_BLANK, value))


def _is_instant(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_instant(value))
    except ValueError:
        return False


_REASON_RULE: Final = f"must be 1 to {MAX_REASON_CHARACTERS} printable characters that say why"
INSTANT: Final[tuple[Check, str]] = (_is_instant, "must be a time in ISO 8601, such as 2026-11-21T10:00:00Z")
DECISION: Final[Mapping[str, tuple[Check, str]]] = {
    "reason": (_is_reason, _REASON_RULE),
    "tenant_id": (_is_tenant, TENANT_KIND.rule),
}
"""The fields that most requests of operators have; see `operator_request`."""


@dataclass(frozen=True, slots=True)
class OperatorEndpoints:
    """Creates, shows, stops and resumes replays, which `jobs` runs in the background."""

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions
    jobs: OperatorJobs

    async def create_replay(self, request: Request) -> Response:
        """Selects emails, and starts to replay them in the background."""
        async with self._asked(request, CreateReplay) as (caller, asked, connection):
            replay = await replaying.create(
                connection,
                asked.selected(),
                act_of(caller, asked.reason),
                include_held=asked.include_held,
                per_second=asked.per_second,
                force=asked.force,
            )
        self.jobs.start_replay(replay)
        return json_response(self._document(caller, replay), 202, {"Location": f"/v1/replays/{replay.id}"})

    async def get_replay(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            given = {**parameters(request, {"tenant_id": TENANT}), **request.path_params}
            with problems("parameter"):
                asked = of_tenant(read(DecideReplay, {}, given), who(caller))
                async with self.sessions.of(caller.share) as connection:
                    return json_response(self._document(caller, await _found(connection, asked)))

    async def stop_replay(self, request: Request) -> Response:
        """Stops a replay after its current email. Idempotent."""
        async with self._asked(request, DecideReplay) as (caller, asked, connection):
            await _found(connection, asked)
            replay = await replaying.stop(connection, asked.replay_id, act_of(caller, asked.reason))
        return json_response(self._document(caller, replay))

    async def resume_replay(self, request: Request) -> Response:
        """Continues a stopped or interrupted replay in this process. Has no effect on a running or done replay."""
        async with self._asked(request, DecideReplay) as (caller, asked, connection):
            await _found(connection, asked)
            act = act_of(caller, asked.reason)
            replay = await replaying.resume(connection, asked.replay_id, actor=act.actor, reason=act.reason)
        self.jobs.start_replay(replay)
        return json_response(self._document(caller, replay), 202)

    @asynccontextmanager
    async def _asked(self, request: Request, action: type[A]) -> AsyncIterator[tuple[Caller, A, AsyncSession]]:
        """Yields the caller, the action that path and body describe, and a session."""
        caller = await self.access.authenticate(request, Scope.OPERATE)
        async with self.bodies.read(request, caller.name) as body:
            given = await run_off_loop(len(body), lambda: parse(body))
            if not isinstance(given, dict):
                raise Problem("invalid-body", errors=[FieldError("pointer", "#", "must be an object")])
            with problems("pointer", request.path_params):
                asked = read(action, given, request.path_params, is_reason_required=True)
                asked = of_tenant(asked, who(caller))
                async with self.sessions.of(caller.share) as connection:
                    yield caller, asked, connection

    def _document(self, caller: Caller, replay: Replay) -> Replay:
        """The replay as the caller may see it. A tenant does not see the name, the reason and the filters of another
        operator."""
        tenant_id = None if caller.key is None else caller.key.tenant_id
        seen = self.jobs.seen(replay)
        is_visible = tenant_id is None or self.access.is_own_act(replay.actor, tenant_id)
        return seen if is_visible else replace(seen, actor=None, reason=None, selection={})


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


async def _found(connection: AsyncSession, asked: DecideReplay) -> Replay:
    replay = await find_replay(connection, asked.replay_id)
    if replay is None or replay.selection.get("tenant_id") != asked.tenant_id:
        raise asked.refused()
    return replay


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
