"""What the OpenAPI document says about the status of emails."""

from __future__ import annotations

from typing import Any, Final, get_args

from dispatcher.api.face import row_schemas
from dispatcher.api.operation import TENANT_PARAMETER, Operation, path_parameter
from dispatcher.domain.email_history import EmailStatus
from dispatcher.domain.event import EventKind
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.waiting import WaitReason

_SCHEMAS: Final[dict[str, Any]] = row_schemas([EmailStatus])
_SCHEMAS["Attempt"]["properties"]["outcome"]["enum"] = [kind.__name__.lower() for kind in get_args(Outcome)]
_SCHEMAS["ProviderEvent"]["properties"]["kind"]["enum"] = list(EventKind)
_SCHEMAS["WaitStatus"]["properties"]["reason"]["enum"] = list(WaitReason)
GET: Final = Operation(
    name="get_email",
    summary="Get an email's status",
    description="Status, timeline, attempts, providers' events, and why an unsent email waits; never the body. "
    "`envelope` has the sender, the recipients and the subject if the key has the scope `content`.",
    response_schema="EmailStatus",
    parameters=(path_parameter("email_id", {"type": "string", "format": "uuid"}, "The email's id."), TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
    schemas=_SCHEMAS,
)
GET_BY_KEY: Final = Operation(
    name="get_email_by_key",
    summary="Get an email's status by its key",
    description="Percent-encode the key as UTF-8. A slash in the key may stay unencoded.",
    response_schema="EmailStatus",
    parameters=(
        path_parameter("message_key", {"type": "string", "minLength": 1, "maxLength": 255}, "The email's message key."),
        TENANT_PARAMETER,
    ),
    problems=("not-found", "invalid-parameter"),
)
