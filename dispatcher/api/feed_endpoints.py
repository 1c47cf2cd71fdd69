"""The feed of events, and the test event of a webhook. All else about both is in `dispatcher.actions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.actions.action import read
from dispatcher.actions.runner import run
from dispatcher.actions.webhooks import WEBHOOK_ID, FindTarget
from dispatcher.api.face import ActionEndpoints, json_response, problems, query, who
from dispatcher.api.operation import TENANT_PARAMETER, Operation, object_schema, path_parameter
from dispatcher.domain.api_key import Scope
from dispatcher.ops.webhooks import post_test


class FeedEndpoints(ActionEndpoints):
    """Reads the feed. Its documents are the same as those that webhooks post."""

    json_options: ClassVar = orjson.OPT_UTC_Z


TEST_WEBHOOK: Final = Operation(
    name="test_webhook",
    summary="Post a test event",
    description="Posts an event of the type `webhook.test`, even if the webhook is disabled. Returns the receiver's "
    "answer.",
    response_schema="WebhookTest",
    parameters=(path_parameter("webhook_id", dict(WEBHOOK_ID.schema), "The webhook."), TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
    schemas={"WebhookTest": object_schema({"is_accepted": {"type": "boolean"}, "detail": {"type": "string"}})},
)


@dataclass(frozen=True, slots=True)
class WebhookEndpoints:
    """Posts a test event. Holds no database session while the receiver answers."""

    actions: ActionEndpoints

    async def test(self, request: Request) -> Response:
        """Returns the receiver's answer."""
        async with self.actions.access.admit(request, Scope.OPERATE) as caller:
            with problems("parameter"):
                asked = read(FindTarget, {}, {**query(request), **request.path_params})
                async with self.actions.sessions.of(caller.share) as connection:
                    target = await run(connection, asked, who(caller))
            result = await post_test(target, self.actions.settings)
        return json_response(result)
