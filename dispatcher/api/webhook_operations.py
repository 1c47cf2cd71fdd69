"""What the OpenAPI document says about webhooks."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.feed_operations import EVENT_TYPES
from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    INSTANT,
    REASON,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    path_parameter,
    reference,
)
from dispatcher.api.status_endpoints import TENANT_ID
from dispatcher.domain.outgoing_event import TYPES
from dispatcher.domain.webhook import WebhookState
from dispatcher.ops.webhooks import MAX_URL_CHARACTERS

_WEBHOOK_ID: Final = path_parameter("webhook_id", {"type": "integer", "minimum": 1}, "The webhook's id.")
CREATE_WEBHOOK: Final = Operation(
    name="create_webhook",
    summary="Add a webhook",
    description="The tenant's events are posted to the URL from now on, signed according to Standard Webhooks. Only "
    "this response contains the secret.",
    status=201,
    response_schema="NewWebhook",
    request_schema="WebhookRequest",
    example={"url": "https://shop.example.com/hooks", "events": ["email.bounced"], "reason": "the shop's mail page"},
    problems=("too-many-webhooks", *BODY_PROBLEMS, "invalid-body"),
    headers={"Location": {"schema": {"type": "string"}, "description": "The path of the webhook.", "required": True}},
)
LIST_WEBHOOKS: Final = Operation(
    name="list_webhooks",
    summary="List webhooks",
    description="The tenant's webhooks, with their state.",
    response_schema="Webhooks",
    parameters=(TENANT_PARAMETER,),
    problems=("invalid-parameter",),
)
GET_WEBHOOK: Final = Operation(
    name="get_webhook",
    summary="Get a webhook",
    description="The webhook's state, and how many of its events wait for delivery.",
    response_schema="Webhook",
    parameters=(_WEBHOOK_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
REMOVE_WEBHOOK: Final = Operation(
    name="remove_webhook",
    summary="Remove a webhook",
    description="Drops the events that the webhook has not delivered yet. Returns the removed webhook.",
    response_schema="Webhook",
    parameters=(_WEBHOOK_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
TEST_WEBHOOK: Final = Operation(
    name="test_webhook",
    summary="Post a test event",
    description="Posts an event of the type `webhook.test`, even if the webhook is disabled. Returns the receiver's "
    "answer.",
    response_schema="WebhookTest",
    parameters=(_WEBHOOK_ID, TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
ROTATE_WEBHOOK: Final = Operation(
    name="rotate_webhook",
    summary="Give a webhook a new secret",
    description="For 24 hours, events are signed with both secrets. Only this response contains the new secret.",
    response_schema="NewWebhook",
    request_schema="Decision",
    example={"reason": "a developer left"},
    parameters=(_WEBHOOK_ID,),
    problems=DECISION_PROBLEMS,
)
ENABLE_WEBHOOK: Final = Operation(
    name="enable_webhook",
    summary="Enable a webhook",
    description="Makes a disabled or failing webhook active, and posts its waiting events now.",
    response_schema="Webhook",
    request_schema="Decision",
    example={"reason": "the receiver works again"},
    parameters=(_WEBHOOK_ID,),
    problems=DECISION_PROBLEMS,
)
REPLAY_WEBHOOK: Final = Operation(
    name="replay_webhook",
    summary="Deliver events again",
    description="Delivers all events since the time `since` again, with the same ids.",
    response_schema="Webhook",
    request_schema="WebhookReplay",
    example={"since": "2026-11-21T10:00:00Z", "reason": "the receiver lost them"},
    parameters=(_WEBHOOK_ID,),
    problems=DECISION_PROBLEMS,
)
_WEBHOOK_FIELDS: Final[dict[str, Any]] = {
    "id": {"type": "integer"},
    "url": {"type": "string"},
    "tenant_id": nullable("string"),
    "events": {"type": "array", "items": EVENT_TYPES},
    "recipients": {"type": "boolean"},
    "state": {"type": "string", "enum": list(WebhookState)},
    "failing_since": nullable("string", "date-time"),
    "next_attempt_at": INSTANT,
    "last_error": nullable("string"),
    "delivered_at": nullable("string", "date-time"),
    "created_at": INSTANT,
    "lag_seconds": nullable("number"),
    "retries": {"type": "integer", "description": "Refused events that wait for another attempt."},
    "given_up": {"type": "integer", "description": "Events that were refused at every attempt."},
}
SCHEMAS: Final[dict[str, Any]] = {
    "Webhook": object_schema(_WEBHOOK_FIELDS),
    "NewWebhook": object_schema({**_WEBHOOK_FIELDS, "secret": {"type": "string", "pattern": "^whsec_"}}),
    "Webhooks": object_schema({"webhooks": {"type": "array", "items": reference("Webhook")}}),
    "WebhookRequest": object_schema(
        {
            "url": {
                "type": "string",
                "maxLength": MAX_URL_CHARACTERS,
                "description": "An https URL without a user name.",
            },
            "reason": REASON,
            "tenant_id": TENANT_ID,
            "events": {"type": "array", "minItems": 1, "maxItems": len(TYPES), "items": EVENT_TYPES},
            "recipients": {"type": "boolean", "default": False, "description": "Include recipients' addresses."},
        },
        *("tenant_id", "events", "recipients"),
    ),
    "WebhookReplay": object_schema({"since": INSTANT, "reason": REASON, "tenant_id": TENANT_ID}, "tenant_id"),
    "WebhookTest": object_schema({"is_accepted": {"type": "boolean"}, "detail": {"type": "string"}}),
}
