"""Manage webhooks, which post events about emails to an application: sent, failed, held, delivered, bounced,
complained, suppressed, cancelled; and by request delayed, rejected, opened, clicked, unsubscribed.

An event may be posted more than once, each time with the same `webhook-id`. Each post is signed according to Standard
Webhooks. The monitor of `dispatcher run` posts the events. Instead of a webhook, an application can poll for events
with GET /v1/events of the HTTP API. See docs/webhooks.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from dispatcher.actions.action import Action, Change, Listing, Mistake, Mistakes, Paged, Reach, Refusal, field
from dispatcher.actions.feed import EVENT_TYPES
from dispatcher.domain.controls import login_of
from dispatcher.domain.event import DEFAULT_KINDS, TYPES, OutgoingKind
from dispatcher.domain.kinds import FLAG, SINCE, TENANT, text, whole
from dispatcher.domain.webhook import (
    MAX_URL_CHARACTERS,
    MAX_WEBHOOKS,
    PREVIOUS_SECRET_HOURS,
    NewWebhook,
    RefusedDelivery,
    Webhook,
    WebhookTarget,
    new_secret,
)

W = TypeVar("W")
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The earliest instant of a replay, because ids of events contain no earlier time."""
_SAVE: Final = "Save this secret now: it is not shown again. The receiver needs it to verify signatures."


URL: Final = text(
    MAX_URL_CHARACTERS,
    r'^https?://[!-"$-.0->A-~]+(?:[/?][!-"$-~]*)?$',  # no user, no fragment
    "must be a URL that begins with https:// and has no user, password or #fragment",
    "URL",
)
ALL_TENANTS: Final = replace(FLAG, schema={"type": "boolean", "const": False})
"""A flag of the command. Over HTTP, a request is always about one tenant."""
WEBHOOK_ID: Final = whole(1, 2**63 - 1)


class AboutWebhooks(Action[W], reach=Reach.ANY_TENANT):
    """Is about the webhooks of one tenant, or of all."""

    tenant_id: str | None = field(TENANT, "Only webhooks of this tenant.", default=None)


class ListWebhooks(
    AboutWebhooks[Any], Listing[Webhook], name="webhooks list", http="GET /v1/webhooks", query="list_webhooks"
):
    """List the webhooks: state, lag, retries, last error. The list never shows secrets.

    "retries" is the number of refused events that wait to be posted again. "given up" is the number of refused events
    that are not posted again. "lag" is the age of the oldest event that the receiver has neither accepted nor refused.
    """

    constants: ClassVar = {"webhook_id": None}
    nothing = "There is no webhook. To add one, see `dispatcher webhooks add --help`."
    missing: ClassVar = {"tenant_id": "all tenants"}
    examples = ("webhooks list", "webhooks list --json | jq '.webhooks[] | select(.state == \"disabled\")'")


class OneWebhook(AboutWebhooks[W]):
    """Is about one webhook."""

    webhook_id: int = field(WEBHOOK_ID, "The webhook.")

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("unknown", "not-found", "There is no webhook {webhook_id}.", "See `dispatcher webhooks list`."),
    )


class ShowWebhook(
    OneWebhook[Webhook], name="webhooks show", http="GET /v1/webhooks/{webhook_id}", query="list_webhooks"
):
    """Show one webhook. Its state, and how many of its events wait for delivery."""

    missing = ListWebhooks.missing
    examples = ("webhooks show 1",)


class ListRefused(
    OneWebhook[Any],
    Paged[RefusedDelivery],
    name="webhooks refused",
    http="GET /v1/webhooks/{webhook_id}/refused",
    query="list_refused",
):
    """List the events that the receiver refused and has not accepted since, newest first: what it answered, and when
    the event is posted again. Without a next attempt, the event was given up: enable the webhook to post it again."""

    key: ClassVar = {"failed_at": datetime, "id": UUID}
    plural = "refused"
    nothing = (
        "The receiver has accepted everything that was posted to it. Events that wait: `dispatcher webhooks show`."
    )
    missing: ClassVar = {"due_at": "given up"}
    examples = ("webhooks refused 1",)


class FindTarget(OneWebhook[WebhookTarget], name="webhooks test", query="find_webhook_target"):
    """Where to post a test event (`ops.webhooks.post_test`). No face shows this: it contains the secrets."""


_EXISTS: Final = Refusal(
    "exists",
    "webhook-exists",
    "Webhook {id} already posts the tenant's events to this URL.",
    "Enable or rotate that webhook, remove it, or give another URL.",
)


def _kinds(events: Collection[OutgoingKind]) -> list[str]:
    return [str(kind) for kind in OutgoingKind if kind in events]


def _wrong_url(url: str, settings: Any) -> list[Mistake]:
    from dispatcher.ops.webhooks import checked_url

    try:
        checked_url(url, allow_private=settings.webhooks_allow_private)
    except ValueError as error:
        return [Mistake("url", str(error))]
    return []


async def _refuse_known_url(asked: AddWebhook | SetWebhook, source: Any, tenant_id: str | None) -> None:
    from dispatcher.store.statements import fetch

    for each in await fetch(source, "list_webhooks", {"webhook_id": None, "tenant_id": tenant_id}, into=Webhook):
        if (each.url, each.tenant_id) == (asked.url, tenant_id):
            raise asked.refused("exists", id=each.id)


class AddWebhook(
    AboutWebhooks[Any], Change[NewWebhook], name="webhooks add", http="POST /v1/webhooks", query="insert_webhook"
):
    """Add a webhook and print its secret. The webhook gets the events that are recorded from now on."""

    url: str = field(URL, "Where to post: an https URL without a user name.")
    tenant_id: str | None = field(
        TENANT, "The tenant whose events the webhook gets. Required unless it gets those of all tenants.", default=None
    )
    all_tenants: bool = field(
        ALL_TENANTS,
        "The webhook gets the events of all tenants. Not over HTTP, where a webhook has one tenant.",
        default=False,
    )
    events: tuple[OutgoingKind, ...] = field(
        EVENT_TYPES,
        f"A type of events that the webhook gets: {', '.join(TYPES)}.  [default: all up to {DEFAULT_KINDS[-1].type}]",
        default=DEFAULT_KINDS,
    )
    recipients: bool = field(
        FLAG, "Include recipients' addresses in an email's events, until the email's content is deleted.", default=False
    )

    arguments = ("url",)
    needs_reason = False
    constants: ClassVar = {"act": "webhook_add", "most_webhooks": MAX_WEBHOOKS}
    secret = "secret"  # noqa: S105 - a field's name
    created = "/v1/webhooks/{id}"
    tells_row = True
    refusals = (
        Refusal(
            "too-many",
            "too-many-webhooks",
            f"The tenant already has {MAX_WEBHOOKS} webhooks.",
            "Remove a webhook, or poll the events instead.",
        ),
        _EXISTS,
    )
    done = _SAVE
    examples = (
        "webhooks add https://shop.example.com/hooks --tenant default",
        "webhooks add https://ops.example.com/hooks --all-tenants --events email.failed,email.held",
    )

    def check(self, settings: Any) -> None:
        found = _wrong_url(self.url, settings)
        if self.all_tenants == (self.tenant_id is not None):
            found.append(Mistake("", "needs either tenant_id or all_tenants"))
        if found:
            raise Mistakes(found)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[NewWebhook]:
        added = await super().run(source, {**parameters, "kinds": _kinds(self.events), "secret": new_secret()})
        if not added:
            await _refuse_known_url(self, source, self.tenant_id)
        return added


class ChangeWebhook(OneWebhook[W], Change[W]):
    """Changes one webhook."""

    needs_reason = False


class SetWebhook(
    ChangeWebhook[Webhook], name="webhooks set", http="PATCH /v1/webhooks/{webhook_id}", query="set_webhook"
):
    """Change where a webhook posts, or which events it gets. The secret, and the events that wait, stay.

    What you leave out does not change. Other events are those that are recorded from now on.
    """

    url: str | None = field(URL, "Where to post: an https URL without a user name.", default=None)
    events: tuple[OutgoingKind, ...] | None = field(EVENT_TYPES, "The types of events that it gets.", default=None)

    some_of = ("url", "events")
    constants: ClassVar = {"act": "webhook_set"}
    refusals = (*OneWebhook.refusals, _EXISTS)
    tells_row = True
    examples = ("webhooks set 1 --url https://shop.example.com/mail --events email.bounced,email.complained",)

    def check(self, settings: Any) -> None:
        if self.url is not None and (found := _wrong_url(self.url, settings)):
            raise Mistakes(found)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Webhook]:
        kinds = None if self.events is None else _kinds(self.events)
        changed = await super().run(source, {**parameters, "kinds": kinds})
        if not changed and self.url is not None:
            from dispatcher.store.statements import fetch

            for each in await fetch(source, "list_webhooks", parameters, into=Webhook):
                await _refuse_known_url(self, source, each.tenant_id)
        return changed


class EnableWebhook(
    ChangeWebhook[Webhook], name="webhooks enable", http="POST /v1/webhooks/{webhook_id}/enable", query="enable_webhook"
):
    """Make a webhook active again. Posts its waiting events, and the events that were given up, now."""

    constants: ClassVar = {"act": "webhook_enable"}
    done = "The webhook is active. Its waiting events are posted now."
    examples = ("webhooks enable 1",)


class DisableWebhook(
    ChangeWebhook[Webhook],
    name="webhooks disable",
    http="POST /v1/webhooks/{webhook_id}/disable",
    query="disable_webhook",
):
    """Post nothing to a webhook until `webhooks enable`. Its events wait.

    Waiting events that are older than DISPATCHER_RETAIN_EVENTS_DAYS are deleted: the webhook never gets them. An alert
    reminds operators of disabled webhooks.
    """

    constants: ClassVar = {"act": "webhook_disable"}
    done = "The webhook is disabled. Its events wait."
    examples = ('webhooks disable 1 --reason "the receiver moves"',)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Webhook]:
        """Tenants read who disabled the webhook, so the text has no host. The audit log has the host, too."""
        return await super().run(source, {**parameters, "error": f"disabled by {login_of(parameters['actor'])}"})


class RotateWebhook(
    ChangeWebhook[NewWebhook],
    name="webhooks rotate",
    http="POST /v1/webhooks/{webhook_id}/rotate",
    query="rotate_webhook",
):
    """Give a webhook a new secret and print it. For 24 hours, events are signed with both secrets, old and new."""

    constants: ClassVar = {"act": "webhook_rotate", "hours": PREVIOUS_SECRET_HOURS}
    secret = "secret"  # noqa: S105 - a field's name
    done = _SAVE
    examples = ("webhooks rotate 1",)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[NewWebhook]:
        return await super().run(source, {**parameters, "secret": new_secret()})


class ReplayWebhook(
    ChangeWebhook[Webhook], name="webhooks replay", http="POST /v1/webhooks/{webhook_id}/replay", query="rewind_webhook"
):
    """Post again all events since a given time. The events keep their ids.

    Events older than DISPATCHER_RETAIN_EVENTS_DAYS are deleted, so they cannot be posted again.
    """

    since: datetime = field(
        SINCE, "Post again the events from this time on: an age such as 2h or 3d, or a time with its zone."
    )

    constants: ClassVar = {"act": "webhook_replay"}
    done = "The webhook gets the events again."
    examples = ("webhooks replay 1 --since 2h", "webhooks replay 1 --since 2026-11-21T10:00:00Z")

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        """An instant that ids of events can have."""
        del source, settings
        return {"since": max(self.since, _EPOCH)}


class RemoveWebhook(
    ChangeWebhook[Webhook], name="webhooks remove", http="DELETE /v1/webhooks/{webhook_id}", query="delete_webhook"
):
    """Remove a webhook. Events that were not posted yet are never posted to it."""

    constants: ClassVar = {"act": "webhook_remove"}
    done = "The webhook is removed."
    examples = ("webhooks remove 1",)


ACTIONS = (
    ListWebhooks,
    ShowWebhook,
    ListRefused,
    AddWebhook,
    SetWebhook,
    EnableWebhook,
    DisableWebhook,
    RotateWebhook,
    ReplayWebhook,
    RemoveWebhook,
)
