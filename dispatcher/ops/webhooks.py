"""Operators' actions on webhooks, for the command line and the HTTP API. Every change is audited."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

import orjson

from dispatcher.config import Settings, values
from dispatcher.config.values import LOOPBACKS
from dispatcher.domain.controls import login_of
from dispatcher.domain.outgoing_event import OutgoingKind
from dispatcher.domain.webhook import new_secret
from dispatcher.errors import DispatcherError
from dispatcher.events.webhook_delivery import POST_SECONDS, PRIVATE_SETTING
from dispatcher.host.name_lookup import resolve
from dispatcher.ops.acts import Act
from dispatcher.store import webhooks as store
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import audit
from dispatcher.store.statements import Source
from dispatcher.store.webhooks import MAX_WEBHOOKS, Webhook
from dispatcher.transport.destination import NoAnswer, is_public
from dispatcher.transport.signed_post import SignedPoster, trusting_context

MAX_URL_CHARACTERS: Final = 2000
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The earliest instant of a replay, because ids of events contain no earlier time."""


class UnknownWebhook(DispatcherError):
    """There is no webhook with this number."""


class TooManyWebhooks(DispatcherError):
    """The tenant already has `MAX_WEBHOOKS` webhooks."""


@dataclass(frozen=True, slots=True)
class NewWebhook:
    """A webhook that was just added.

    Attributes:
        secret: The secret that signs the webhook's events. It is not shown again.
    """

    webhook_id: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TestResult:
    """What a receiver did with a test event.

    Attributes:
        detail: The receiver's answer, or why no answer arrived.
    """

    __test__ = False  # pytest would otherwise take the class for a test, because of its name

    is_accepted: bool
    detail: str


def checked_url(text: str, *, allow_private: bool) -> str:
    """The URL, if events may be posted to it.

    Args:
        allow_private: DISPATCHER_WEBHOOKS_ALLOW_PRIVATE, which allows addresses that are not public, and http URLs of
            the loopback. Host names are resolved and checked before each post.

    Raises:
        ValueError: The URL is not allowed. The error's text is a predicate, such as `must begin with https://`, and
            does not contain the URL.
    """
    if len(text) > MAX_URL_CHARACTERS:
        raise ValueError(f"must have at most {MAX_URL_CHARACTERS:,} characters")
    parts = urlsplit(text)
    if parts.scheme == "http" and parts.hostname in LOOPBACKS:
        if not allow_private:
            raise ValueError(
                "must begin with https://; DISPATCHER_WEBHOOKS_ALLOW_PRIVATE=on allows http for development"
            )
        values.webhook_url(f"https{text[len('http') :]}")
        return text
    if not allow_private and not _is_public(parts.hostname or ""):
        raise ValueError(f"must have a public address. {PRIVATE_SETTING}=on allows other addresses, too")
    return values.webhook_url(text)


def _is_public(host: str) -> bool:
    if host in LOOPBACKS:
        return False
    try:
        return is_public(ip_address(host.partition("%")[0]))
    except ValueError:
        return True  # a host name, which is resolved and checked before each post


async def list_webhooks(session: AsyncSession, tenant_id: str | None = None) -> list[Webhook]:
    """The webhooks of one tenant, or of all tenants, oldest first."""
    return await store.list_webhooks(session, tenant_id=tenant_id)


async def find(session: AsyncSession, webhook_id: int, tenant_id: str | None) -> Webhook | None:
    """The webhook with this number; None if there is none.

    Args:
        tenant_id: Find the webhook only if it belongs to this tenant; None for any tenant.
    """
    return next(iter(await store.list_webhooks(session, tenant_id=tenant_id, webhook_id=webhook_id)), None)


async def add(
    session: AsyncSession,
    url: str,
    *,
    tenant_id: str | None,
    kinds: Collection[OutgoingKind],
    with_recipients: bool,
    act: Act,
) -> NewWebhook:
    """Adds a webhook, which gets all later events of the given kinds.

    Args:
        url: A URL that `checked_url` returned.
        tenant_id: The tenant whose events the webhook gets; None for all tenants.
        with_recipients: Whether the posted events contain the recipients' addresses.

    Raises:
        TooManyWebhooks: The tenant already has `MAX_WEBHOOKS` webhooks.
    """
    secret = new_secret()
    webhook_id = await store.insert_webhook(
        session, url=url, tenant_id=tenant_id, kinds=kinds, secret=secret, with_recipients=with_recipients
    )
    if webhook_id is None:
        raise TooManyWebhooks(
            f"The tenant already has {MAX_WEBHOOKS} webhooks.", remedy="Remove a webhook, or poll the events instead."
        )
    await _audit(session, "webhook_add", webhook_id, act)
    return NewWebhook(webhook_id, secret)


async def remove(session: AsyncSession, webhook_id: int, act: Act) -> None:
    """Removes a webhook. Its receiver never gets the events that were not delivered yet.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    _require(webhook_id, exists=await store.delete_webhook(session, webhook_id))
    await _audit(session, "webhook_remove", webhook_id, act)


async def rotate(session: AsyncSession, webhook_id: int, act: Act) -> str:
    """Gives a webhook a new secret, and returns the secret. For a day, events are signed with the old and the new
    secret.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    secret = new_secret()
    _require(webhook_id, exists=await store.rotate_webhook(session, webhook_id, secret))
    await _audit(session, "webhook_rotate", webhook_id, act)
    return secret


async def enable(session: AsyncSession, webhook_id: int, act: Act) -> None:
    """Makes a webhook active, so that the monitor posts its waiting events immediately. Idempotent.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    _require(webhook_id, exists=await store.enable_webhook(session, webhook_id))
    await _audit(session, "webhook_enable", webhook_id, act)


async def disable(session: AsyncSession, webhook_id: int, act: Act) -> None:
    """Disables a webhook: nothing is posted to it until `enable` is called. Until then, its events wait; events that
    the feed no longer keeps are lost. Idempotent.

    Tenants read who disabled it, so the text has no host. The audit log has the host, too.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    _require(webhook_id, exists=await store.disable_webhook(session, webhook_id, f"disabled by {login_of(act.actor)}"))
    await _audit(session, "webhook_disable", webhook_id, act)


async def replay(session: AsyncSession, webhook_id: int, since: datetime, act: Act) -> None:
    """Delivers again all events since an instant. Each event keeps its id.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    _require(webhook_id, exists=await store.rewind_webhook(session, webhook_id, max(since, _EPOCH)))
    await _audit(session, "webhook_replay", webhook_id, act)


@dataclass(frozen=True, slots=True)
class TestTarget:
    """The number, URL and secrets of a webhook, for `post_test`."""

    __test__ = False

    webhook_id: int
    url: str = field(repr=False)
    secrets: list[str] = field(repr=False)


async def find_test_target(source: Source, webhook_id: int) -> TestTarget:
    """Reads the number, URL and secrets of a webhook from the database, for `post_test`.

    Raises:
        UnknownWebhook: There is no such webhook.
    """
    target = await store.find_webhook_target(source, webhook_id)
    _require(webhook_id, exists=target is not None)
    assert target is not None
    return TestTarget(webhook_id, *target)


async def post_test(target: TestTarget, settings: Settings) -> TestResult:
    """Posts a test event to a webhook, even if the webhook is disabled. Changes nothing, and needs no database session.

    Raises:
        ConfigurationError: The CA file is not usable.
    """
    poster = SignedPoster(
        target.url,
        private_setting=None if settings.webhooks_allow_private else PRIVATE_SETTING,
        context=trusting_context(settings.ca_file),
        total_seconds=POST_SECONDS,
        resolver=resolve,
    )
    event = {"type": "webhook.test", "timestamp": datetime.now(UTC), "data": {"webhook": target.webhook_id}}
    try:
        answer = await poster.post(str(uuid4()), target.secrets, orjson.dumps(event, option=orjson.OPT_UTC_Z))
    except NoAnswer as error:
        return TestResult(is_accepted=False, detail=error.reason)
    return TestResult(answer.is_success, f"the receiver answered {answer.status}")


def _require(webhook_id: int, *, exists: bool) -> None:
    if not exists:
        raise UnknownWebhook(
            f"There is no webhook {webhook_id}.", remedy="`dispatcher webhooks list` lists all webhooks."
        )


async def _audit(session: AsyncSession, action: str, webhook_id: int, act: Act) -> None:
    await audit(session, action, actor=act.actor, reason=act.reason, detail={"webhook": webhook_id})
