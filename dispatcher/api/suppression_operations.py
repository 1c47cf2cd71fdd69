"""What the OpenAPI document says about suppressed recipients."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.operation import (
    BODY_PROBLEMS,
    ID,
    INSTANT,
    REASON,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    query_parameter,
    reference,
)
from dispatcher.api.status_endpoints import TENANT_ID
from dispatcher.api.suppression_endpoints import MAX_NOTE_CHARACTERS, MAX_RECIPIENTS, MAX_STOPPED, PARAMETERS
from dispatcher.domain.suppression import SuppressionReason

LIST_SUPPRESSIONS: Final = Operation(
    name="list_suppressions",
    summary="List suppressed recipients",
    description="Newest first, masked: the addresses are not stored. Entries that have expired are listed, too.",
    response_schema="Suppressions",
    parameters=(*(query_parameter(name, parameter) for name, parameter in PARAMETERS.items()), TENANT_PARAMETER),
    problems=("invalid-parameter",),
)
ADD_SUPPRESSIONS: Final = Operation(
    name="add_suppressions",
    summary="Suppress recipients",
    description="Addresses and domains get no email of the tenant any more. A domain does not include its subdomains. "
    "An existing entry that lasts at least as long is not changed. The audit log records the reason.",
    response_schema="AddedSuppressions",
    request_schema="NewSuppressions",
    example={"recipients": ["ann@example.org", "example.net"], "reason": "closed account"},
    problems=(*BODY_PROBLEMS, "invalid-body"),
)
REMOVE_SUPPRESSIONS: Final = Operation(
    name="remove_suppressions",
    summary="Remove suppressed recipients",
    description="The recipients get the tenant's next emails again. `stopped_email_ids` are failed emails that the "
    "entries had stopped, oldest first: `POST /v1/replays` with these ids sends each of them once.",
    response_schema="RemovedSuppressions",
    request_schema="OldSuppressions",
    example={"recipients": ["ann@example.org"], "reason": "mailbox works again"},
    problems=(*BODY_PROBLEMS, "invalid-body"),
)
_SUPPRESSION_KIND: Final = {"type": "string", "enum": list(SuppressionReason)}
_SUPPRESSED: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_RECIPIENTS,
    "items": {"type": "string"},
    "description": "Addresses, and domains such as `example.org`.",
}
SCHEMAS: Final[dict[str, Any]] = {
    "Suppression": object_schema(
        {
            "id": {"type": "integer"},
            "tenant_id": {"type": "string"},
            "recipient": {"type": "string", "description": "Masked, such as `j•••@example.com`; or a domain."},
            "is_domain": {"type": "boolean"},
            "kind": _SUPPRESSION_KIND,
            "source_email_id": {**nullable("string", "uuid"), "description": "The email whose event made the entry."},
            "note": nullable("string"),
            "created_at": INSTANT,
            "expires_at": nullable("string", "date-time"),
        }
    ),
    "Suppressions": object_schema(
        {"suppressions": {"type": "array", "items": reference("Suppression")}, "next": nullable("integer")}
    ),
    "NewSuppressions": object_schema(
        {
            "recipients": _SUPPRESSED,
            "reason": REASON,
            "kind": {**_SUPPRESSION_KIND, "default": "manual"},
            "note": {"type": "string", "maxLength": MAX_NOTE_CHARACTERS, "description": "For operators."},
            "expires_at": {**INSTANT, "description": "When the entry ends. Default: never."},
            "tenant_id": TENANT_ID,
        },
        *("kind", "note", "expires_at", "tenant_id"),
    ),
    "AddedSuppressions": object_schema(
        {"added": {"type": "integer", "description": "Entries that are new or changed."}}
    ),
    "OldSuppressions": object_schema(
        {"recipients": _SUPPRESSED, "reason": REASON, "tenant_id": TENANT_ID}, "tenant_id"
    ),
    "RemovedSuppressions": object_schema(
        {
            "removed": {"type": "integer"},
            "stopped_count": {"type": "integer"},
            "stopped_email_ids": {"type": "array", "items": ID, "maxItems": MAX_STOPPED},
        }
    ),
}
