"""Whether a webhook may have a URL, and test events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from urllib.parse import urlsplit
from uuid import uuid4

import orjson

from dispatcher.config import Settings, values
from dispatcher.config.values import LOOPBACKS
from dispatcher.domain.webhook import WebhookTarget
from dispatcher.events.webhook_delivery import POST_SECONDS, PRIVATE_SETTING
from dispatcher.host.name_lookup import resolve
from dispatcher.transport.destination import NoAnswer, is_public
from dispatcher.transport.signed_post import SignedPoster, trusting_context


@dataclass(frozen=True, slots=True)
class TestResult:
    """What a receiver did with a test event. `detail` is its answer, or why no answer arrived."""

    __test__ = False  # pytest would otherwise take the class for a test, because of its name

    is_accepted: bool
    detail: str


def checked_url(text: str, *, allow_private: bool) -> str:
    """The URL, if events may be posted to it. Host names are resolved and checked before each post.

    DISPATCHER_WEBHOOKS_ALLOW_PRIVATE allows addresses that are not public, and http URLs of the loopback. The text of
    the ValueError is a predicate, such as `must begin with https://`, and does not contain the URL.
    """
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


async def post_test(target: WebhookTarget, settings: Settings) -> TestResult:
    """Posts a test event to a webhook, even if the webhook is disabled. Changes nothing, and needs no session."""
    poster = SignedPoster(
        target.url,
        private_setting=None if settings.webhooks_allow_private else PRIVATE_SETTING,
        context=trusting_context(settings.ca_file),
        total_seconds=POST_SECONDS,
        resolver=resolve,
    )
    event = {"type": "webhook.test", "timestamp": datetime.now(UTC), "data": {"webhook": target.id}}
    try:
        answer = await poster.post(str(uuid4()), target.secrets, orjson.dumps(event, option=orjson.OPT_UTC_Z))
    except NoAnswer as error:
        return TestResult(is_accepted=False, detail=error.reason)
    return TestResult(answer.is_success, f"the receiver answered {answer.status}")
