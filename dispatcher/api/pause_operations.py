"""What the OpenAPI document says about pauses."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    INSTANT,
    REASON,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    reference,
)
from dispatcher.api.status_endpoints import TENANT_ID
from dispatcher.ops.pausing import MAX_SECONDS

LIST_PAUSES: Final = Operation(
    name="list_pauses",
    summary="Show the tenant's pause",
    description="Has one entry while the tenant is paused, otherwise none.",
    response_schema="Pauses",
    parameters=(TENANT_PARAMETER,),
    problems=("invalid-parameter",),
)
CREATE_PAUSE: Final = Operation(
    name="create_pause",
    summary="Pause the tenant",
    description="Within two seconds, all hosts stop sending the tenant's emails. The pause does not stop emails that "
    "are already on the wire to a provider. Emails can still be enqueued, and wait. If the tenant is already "
    "paused, the request changes the end and the reason of the pause. The audit log records the reason.",
    response_schema="Pause",
    request_schema="NewPause",
    example={"reason": "complaints about the newsletter", "for_seconds": 7200},
    problems=(*BODY_PROBLEMS, "invalid-body"),
)
REMOVE_PAUSE: Final = Operation(
    name="remove_pause",
    summary="Resume the tenant",
    description="Within two seconds, all hosts resume sending the tenant's emails. Returns the pause that has ended.",
    response_schema="Pause",
    request_schema="Decision",
    example={"reason": "the list is clean now"},
    problems=DECISION_PROBLEMS,
)
SCHEMAS: Final[dict[str, Any]] = {
    "Pause": object_schema(
        {
            "tenant_id": {"type": "string"},
            "until": {
                **nullable("string", "date-time"),
                "description": "When the pause ends by itself; null: it lasts until it is resumed.",
            },
            "reason": {"type": "string"},
            "actor": {"type": "string"},
            "began_at": INSTANT,
        }
    ),
    "Pauses": object_schema({"pauses": {"type": "array", "items": reference("Pause")}}),
    "NewPause": object_schema(
        {
            "reason": REASON,
            "for_seconds": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": MAX_SECONDS,
                "description": "How long the pause lasts. Default: until `DELETE /v1/pauses`.",
            },
            "tenant_id": TENANT_ID,
        },
        *("for_seconds", "tenant_id"),
    ),
}
