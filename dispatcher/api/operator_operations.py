"""What the OpenAPI document says about replays."""

from __future__ import annotations

from typing import Final

from dispatcher.actions.dlq import CreateReplay, DecideReplay
from dispatcher.api.face import body_of, row_schemas
from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    TENANT_PARAMETER,
    Operation,
    path_parameter,
)
from dispatcher.domain.failures import Replay

_REPLAY_ID: Final = path_parameter("replay_id", {"type": "integer", "minimum": 1}, "The replay's id.")
CREATE_REPLAY: Final = Operation(
    name="create_replay",
    summary="Send failed emails again",
    description=CreateReplay.summary()[1],
    status=202,
    response_schema="Replay",
    request_schema="CreateReplay",
    example={"error_type": "refused", "reason": "The domain is verified now."},
    problems=(*BODY_PROBLEMS, "invalid-body"),
    schemas={**row_schemas([Replay]), "CreateReplay": body_of(CreateReplay), "DecideReplay": body_of(DecideReplay)},
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
    description="`is_active` is true while a process runs the replay. If `state` is `interrupted`, resume it.",
    response_schema="Replay",
    parameters=(_REPLAY_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
STOP_REPLAY: Final = Operation(
    name="stop_replay",
    summary="Stop a replay",
    description="Stops after the current email. Emails that were already replayed are still sent. Idempotent.",
    response_schema="Replay",
    request_schema="DecideReplay",
    example={"reason": "The provider throttles us."},
    parameters=(_REPLAY_ID,),
    problems=DECISION_PROBLEMS,
)
RESUME_REPLAY: Final = Operation(
    name="resume_replay",
    summary="Resume a replay",
    description="Continues a stopped or interrupted replay with its next email. Has no effect on a running or done "
    "replay.",
    status=202,
    response_schema="Replay",
    request_schema="DecideReplay",
    example={"reason": "The process was restarted."},
    parameters=(_REPLAY_ID,),
    problems=DECISION_PROBLEMS,
)
