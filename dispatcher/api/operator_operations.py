"""What the OpenAPI document says about held emails and replays."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    ID,
    INSTANT,
    REASON,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    path_parameter,
)
from dispatcher.api.operator_endpoints import MAX_IDS, MAX_PER_SECOND, MAX_SECONDS
from dispatcher.api.status_endpoints import FILTER_TEXT, TENANT_ID
from dispatcher.domain.outcome import Reason
from dispatcher.ops.replaying import MIN_PER_SECOND
from dispatcher.store.replays import ReplayState

_HELD_ID: Final = path_parameter("email_id", {"type": "string", "format": "uuid"}, "The email's id.")
_REPLAY_ID: Final = path_parameter("replay_id", {"type": "integer", "minimum": 1}, "The replay's id.")
CONFIRM: Final = Operation(
    name="confirm_held",
    summary="Confirm that a held email arrived",
    description="Sets the email's status to `sent`. The audit log records the reason.",
    response_schema="Verdict",
    request_schema="Decision",
    example={"reason": "The provider's dashboard shows it as delivered."},
    parameters=(_HELD_ID,),
    problems=("not-held", *DECISION_PROBLEMS),
)
RELEASE: Final = Operation(
    name="release_held",
    summary="Send a held email again",
    description="Sets the email's status to `pending`, due now. The recipient may get the email twice. The audit log "
    "records the reason.",
    response_schema="Verdict",
    request_schema="Decision",
    example={"reason": "The provider's dashboard does not list it."},
    parameters=(_HELD_ID,),
    problems=("not-held", *DECISION_PROBLEMS),
)
CREATE_REPLAY: Final = Operation(
    name="create_replay",
    summary="Send failed emails again",
    description="Selects the emails now, then replays them at `per_second`. Skips emails that are `sent` by then. "
    "Replays held emails only with `include_held`.",
    status=202,
    response_schema="Replay",
    request_schema="NewReplay",
    example={"error_type": "refused", "reason": "The domain is verified now."},
    problems=(*BODY_PROBLEMS, "invalid-body"),
    headers={
        "Location": {
            "schema": {"type": "string"},
            "description": "The path at which the replay's progress is reported.",
            "required": True,
        }
    },
)
GET_REPLAY: Final = Operation(
    name="get_replay",
    summary="Get a replay's progress",
    description="`is_active` is true while a process runs the replay. If `state` is `running` and `is_active` "
    "is false, the replay was interrupted: resume it.",
    response_schema="Replay",
    parameters=(_REPLAY_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
STOP_REPLAY: Final = Operation(
    name="stop_replay",
    summary="Stop a replay",
    description="Stops after the current email. Emails that were already replayed are still sent. Idempotent.",
    response_schema="Replay",
    parameters=(_REPLAY_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
RESUME_REPLAY: Final = Operation(
    name="resume_replay",
    summary="Resume a replay",
    description="Continues a stopped or interrupted replay with its next email. Has no effect on a running or done "
    "replay.",
    status=202,
    response_schema="Replay",
    request_schema="Decision",
    example={"reason": "The process was restarted."},
    parameters=(_REPLAY_ID,),
    problems=DECISION_PROBLEMS,
)
SCHEMAS: Final[dict[str, Any]] = {
    "Verdict": object_schema({"id": ID, "verdict": {"type": "string", "enum": ["confirmed", "released"]}}),
    "NewReplay": {
        "type": "object",
        "additionalProperties": False,
        "required": ["reason"],
        "properties": {
            "reason": REASON,
            "tenant_id": TENANT_ID,
            "error_type": {"type": "string", "enum": list(Reason)},
            "provider": FILTER_TEXT,
            "channel": FILTER_TEXT,
            "status": {"type": "string", "enum": ["failed", "held"]},
            "email_ids": {"type": "array", "minItems": 1, "maxItems": MAX_IDS, "items": ID},
            "older_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
            "newer_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
            "include_held": {"type": "boolean"},
            "per_second": {"type": "number", "minimum": MIN_PER_SECOND, "maximum": MAX_PER_SECOND},
            "force": {
                "type": "boolean",
                "default": False,
                "description": "Keep this replay's own `per_second` even if a running replay shares emails with it.",
            },
        },
    },
    "Replay": object_schema(
        {
            "id": {"type": "integer"},
            "state": {"type": "string", "enum": [state.value for state in ReplayState]},
            "is_active": {"type": "boolean"},
            "total": {"type": "integer"},
            "waiting": {"type": "integer"},
            "outcomes": {"type": "object", "additionalProperties": {"type": "integer"}},
            "include_held": {"type": "boolean"},
            "per_second": nullable("number"),
            "paced_with": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "Running replays with some of the same emails. All these replays share one rate, the "
                "lowest `per_second` among them.",
            },
            "reason": nullable("string") | {"description": "Null if it was not given with a key of your tenant."},
            "created_at": INSTANT,
            "changed_at": INSTANT,
        }
    ),
}
