"""Posts notices to one configured https URL, signed according to Standard Webhooks (https://www.standardwebhooks.com).

All tries to post one notice have the same `webhook-id`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from dispatcher.alerts.contract import NotDelivered
from dispatcher.alerts.wording import payload
from dispatcher.domain.alert import Notice
from dispatcher.host.name_lookup import resolve
from dispatcher.transport.destination import NoAnswer, Resolve
from dispatcher.transport.signed_post import SignedPoster, trusting_context

TOTAL_SECONDS: Final = 10.0
_PRIVATE_SETTING: Final = "DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE"


class WebhookChannel:
    """An alert channel that posts each notice to the configured webhook."""

    name = "webhook"

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        allow_private: bool = False,
        ca_file: Path | None = None,
        resolver: Resolve = resolve,
        total_seconds: float = TOTAL_SECONDS,
    ) -> None:
        """Opens no connection: each `send` opens one.

        Args:
            secret: The signing secret: `whsec_` followed by base64.
            allow_private: Whether the URL's host may have an address that is not public, such as 10.0.0.5.
            ca_file: A PEM file of certificates to trust in addition to the system's.

        Raises:
            ConfigurationError: The CA file is not usable.
        """
        self._new_poster = partial(
            SignedPoster,
            url,
            private_setting=None if allow_private else _PRIVATE_SETTING,
            context=trusting_context(ca_file),
            total_seconds=total_seconds,
            resolver=resolver,
        )
        self._secrets = [secret]

    async def send(self, notice: Notice) -> str:
        """See `Channel.send`. Succeeds if the response has a 2xx status."""
        try:
            answer = await self._new_poster().post(notice.notice_id, self._secrets, payload(notice))
        except NoAnswer as error:
            raise NotDelivered(error.reason) from error
        if not answer.is_success:
            raise NotDelivered(f"the receiver answered {answer.status}")
        return f"the receiver answered {answer.status}"
