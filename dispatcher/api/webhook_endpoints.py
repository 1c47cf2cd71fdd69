"""The endpoints for webhooks. Each tenant sees and changes only its own webhooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.operator_endpoints import DECISION, INSTANT, Check, act_of, json_response, operator_request
from dispatcher.api.problems import FieldError, Problem
from dispatcher.api.status_endpoints import TENANT, parameters
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.outgoing_event import TYPES, OutgoingKind, kind_of
from dispatcher.ops import webhooks
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession
from dispatcher.store.webhooks import Webhook, list_webhooks

_LARGEST_ID: Final = 2**63 - 1


def _is_kinds(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= len(TYPES) and all(item in TYPES for item in value)


_NEW: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "url": (lambda value: isinstance(value, str), "must be a URL"),
    "events": (_is_kinds, f"must be a list of one or more of: {', '.join(TYPES)}"),
    "recipients": (lambda value: isinstance(value, bool), "must be true or false"),
}
_REPLAY: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "since": INSTANT,
}


@dataclass(frozen=True, slots=True)
class WebhookEndpoints:
    """Adds, lists, tests and removes a tenant's webhooks."""

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions
    settings: Settings

    async def create(self, request: Request) -> Response:
        """Adds a webhook. Only this response contains the webhook's secret."""
        required = ("reason", "url")
        async with operator_request(self.access, self.bodies, request, _NEW, required) as (caller, given):
            try:
                url = webhooks.checked_url(given["url"], allow_private=self.settings.webhooks_allow_private)
            except ValueError as error:
                raise Problem("invalid-body", errors=[FieldError("pointer", "#/url", str(error))]) from None
            tenant = caller.tenant(given.get("tenant_id"))
            kinds = {kind_of(item) for item in given["events"]} if "events" in given else set(OutgoingKind)
            async with self.sessions.of(caller.share) as connection:
                try:
                    made = await webhooks.add(
                        connection,
                        url,
                        tenant_id=tenant,
                        kinds=kinds,
                        with_recipients=given.get("recipients", False),
                        act=act_of(caller, given["reason"]),
                    )
                except webhooks.TooManyWebhooks as error:
                    raise Problem("too-many-webhooks", error.message) from None
                found = await _found(connection, made.webhook_id, tenant)
        path = f"/v1/webhooks/{made.webhook_id}"
        return json_response({**document(found), "secret": made.secret}, 201, {"Location": path})

    async def list(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                found = await list_webhooks(connection, tenant_id=tenant)
        return json_response({"webhooks": [document(webhook) for webhook in found]})

    async def get(self, request: Request) -> Response:
        async with self._own(request) as (_, webhook, _act):
            return json_response(document(webhook))

    async def remove(self, request: Request) -> Response:
        async with self._own(request, "removed over HTTP") as (connection, webhook, act):
            await webhooks.remove(connection, webhook.webhook_id, act)
            return json_response(document(webhook))

    async def test(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                webhook = await _found(connection, _number(request), tenant)
                target = await webhooks.find_test_target(connection, webhook.webhook_id)
            result = await webhooks.post_test(target, self.settings)  # holds no session while the receiver answers
        return json_response({"is_accepted": result.is_accepted, "detail": result.detail})

    async def rotate(self, request: Request) -> Response:
        """Gives a webhook a new secret. Only this response contains the new secret."""
        async with self._changed(request, DECISION) as (connection, webhook, act, _):
            secret = await webhooks.rotate(connection, webhook.webhook_id, act)
            return json_response({**document(webhook), "secret": secret})

    async def enable(self, request: Request) -> Response:
        async with self._changed(request, DECISION) as (connection, webhook, act, _):
            await webhooks.enable(connection, webhook.webhook_id, act)
            return json_response(document(await _found(connection, webhook.webhook_id, webhook.tenant_id)))

    async def replay(self, request: Request) -> Response:
        async with self._changed(request, _REPLAY, "since") as (connection, webhook, act, given):
            await webhooks.replay(connection, webhook.webhook_id, parse_instant(given["since"]), act)
            return json_response(document(await _found(connection, webhook.webhook_id, webhook.tenant_id)))

    @asynccontextmanager
    async def _own(
        self, request: Request, reason: str = "over HTTP"
    ) -> AsyncIterator[tuple[AsyncSession, Webhook, Act]]:
        """Serves a request without a body. `reason`: for the audit log, because the request contains none."""
        async with self.access.admit(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with self.sessions.of(caller.share) as connection:
                yield connection, await _found(connection, _number(request), tenant), act_of(caller, reason)

    @asynccontextmanager
    async def _changed(
        self, request: Request, known: Mapping[str, tuple[Check, str]], *more: str
    ) -> AsyncIterator[tuple[AsyncSession, Webhook, Act, Mapping[str, Any]]]:
        """Serves a request with a body, which has `reason` and the fields `more` (see `operator_request`)."""
        async with (
            operator_request(self.access, self.bodies, request, known, ("reason", *more)) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            webhook = await _found(connection, _number(request), caller.tenant(given.get("tenant_id")))
            yield connection, webhook, act_of(caller, given["reason"]), given


def _number(request: Request) -> int:
    text = request.path_params["webhook_id"]
    is_number = text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST_ID
    return int(text) if is_number else 0


async def _found(session: AsyncSession, webhook_id: int, tenant: str | None) -> Webhook:
    found = await list_webhooks(session, tenant_id=tenant, webhook_id=webhook_id)
    if not found:
        raise Problem("not-found", "The tenant has no webhook with this id.")
    return found[0]


def document(webhook: Webhook) -> dict[str, Any]:
    """The JSON object for a webhook, without its secrets."""
    fields = asdict(webhook)
    del fields["kinds"]
    return {
        "id": fields.pop("webhook_id"),
        "events": [kind.type for kind in OutgoingKind if kind.value in webhook.kinds],
        "recipients": fields.pop("with_recipients"),
        **fields,
    }
