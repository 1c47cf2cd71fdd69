"""The endpoints that pause and resume the caller's tenant. `ops/pausing.py` does the work.

A request pauses only one tenant. To pause everything, a lane or a provider, operators use the command
`dispatcher pause`, or the operators' page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.operator_endpoints import DECISION, Check, act_of, json_response, operator_request
from dispatcher.api.problems import Problem
from dispatcher.api.status_endpoints import TENANT, parameters
from dispatcher.domain.api_key import Scope
from dispatcher.domain.controls import Pause, PauseScope
from dispatcher.ops import pausing
from dispatcher.store.controls import list_pauses


def _is_length(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= pausing.MAX_SECONDS


_NEW: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "for_seconds": (_is_length, f"must be a number above 0, up to {pausing.MAX_SECONDS:,}"),
}


@dataclass(frozen=True, slots=True)
class PauseEndpoints:
    """Pauses and resumes the caller's tenant."""

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions

    async def list(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                pauses = await list_pauses(connection)
        return json_response({"pauses": [document(each) for each in pausing.seen_by(pauses, tenant)]})

    async def create(self, request: Request) -> Response:
        async with (
            operator_request(self.access, self.bodies, request, _NEW, ("reason",)) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            act, tenant = act_of(caller, given["reason"]), caller.tenant(given.get("tenant_id"))
            seconds = given.get("for_seconds")
            begun = await pausing.pause(connection, PauseScope.TENANT, tenant, act, seconds=seconds)
        return json_response(document(begun))

    async def remove(self, request: Request) -> Response:
        async with (
            operator_request(self.access, self.bodies, request, DECISION, ("reason",)) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            act, tenant = act_of(caller, given["reason"]), caller.tenant(given.get("tenant_id"))
            try:
                ended = await pausing.resume(connection, PauseScope.TENANT, tenant, act)
            except pausing.NotPaused:
                raise Problem("not-found", "The tenant is not paused.") from None
        return json_response(document(ended))


def document(pause: Pause) -> dict[str, Any]:
    """The JSON object of a tenant's pause."""
    fields = asdict(pause)
    del fields["scope"]
    return {"tenant_id": fields.pop("name"), **fields, "actor": pause.login}
