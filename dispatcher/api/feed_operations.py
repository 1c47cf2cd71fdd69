"""What the OpenAPI document says about the feed of events."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.feed_endpoints import PARAMETERS
from dispatcher.api.operation import (
    ID,
    INSTANT,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    query_parameter,
    reference,
)
from dispatcher.domain.event import TYPES, Bounce

EVENT_TYPES: Final = {"type": "string", "enum": list(TYPES)}
_SCHEMAS: Final[dict[str, Any]] = {
    "FeedEvent": object_schema(
        {
            "id": {**ID, "description": "The event's id, the same in each response and each webhook request."},
            "cursor": {
                "type": "string",
                "description": "Pass this cursor as `after` to get the events after this event.",
            },
            "type": EVENT_TYPES,
            "timestamp": INSTANT,
            "data": object_schema(
                {
                    "email_id": ID,
                    "tenant_id": {"type": "string"},
                    "message_key": {"type": "string"},
                    "correlation_id": nullable("string"),
                    "provider": nullable("string"),
                    "reason": nullable("string"),
                    "code": nullable("string"),
                    "bounce": {"enum": [*Bounce, None]},
                    "happened_at": INSTANT,
                }
            ),
        }
    ),
    "Events": object_schema(
        {
            "events": {"type": "array", "items": reference("FeedEvent")},
            "next": {"type": "string", "description": "The cursor for the next request, even if there is no event."},
            "has_more": {"type": "boolean", "description": "Whether the next request may return events now."},
        }
    ),
}
LIST_EVENTS: Final = Operation(
    name="list_events",
    summary="Poll what became of emails",
    description="The tenant's events after a cursor, oldest first: sent, failed, held, delivered, bounced, "
    "complained about, suppressed, cancelled. No event is skipped, however late its transaction commits. Poll again "
    "with `next`. The first request starts the recording of events. Events are kept for "
    "DISPATCHER_RETAIN_EVENTS_DAYS.",
    response_schema="Events",
    parameters=(*(query_parameter(name, parameter) for name, parameter in PARAMETERS.items()), TENANT_PARAMETER),
    problems=("invalid-parameter",),
    schemas=_SCHEMAS,
)
