"""The channels that notify operators: the log, a webhook, and email (`alert_mail`).

No channel uses this dispatcher's queues, tables or providers, so operators are notified even if these fail.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.alert import SEVERITY, Channel, NotDelivered, Notice, Phase
from dispatcher.host.name_lookup import resolve
from dispatcher.monitor.alert_words import payload, summary
from dispatcher.telemetry.log import get_log
from dispatcher.transport.destination import NoAnswer, Resolve
from dispatcher.transport.signed_post import SignedPoster, trusting_context

TOTAL_SECONDS: Final = 10.0
_PRIVATE_SETTING: Final = "DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE"


class LogChannel:
    """Writes notices to the log. It is always active and needs no settings."""

    name = "log"

    async def send(self, notice: Notice) -> str:
        alert, log = notice.alert, get_log()
        if notice.phase is Phase.RESOLVED:
            log.info("alert.resolved", kind=alert.kind, queue=alert.queue, summary=summary(notice))
            return "logged"
        log.error(
            "alert.raised",
            severity=SEVERITY,
            component=notice.alert.component,
            kind=alert.kind,
            phase=notice.phase,
            queue=alert.queue,
            count=alert.count,
            oldest_age_seconds=alert.oldest_age_seconds,
            correlation_ids=alert.correlation_ids,
            reason=alert.reason,
            database_unreachable=alert.is_alone,
            summary=summary(notice),
        )
        return "logged"


class WebhookChannel:
    """Posts each notice to one https URL, signed according to Standard Webhooks (https://www.standardwebhooks.com).

    All tries to post one notice have the same `webhook-id`. Private addresses, such as 10.0.0.5, are refused unless
    allowed. The certificates of `ca_file` are trusted in addition to the system's.
    """

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
        try:
            answer = await self._new_poster().post(notice.notice_id, self._secrets, payload(notice))
        except NoAnswer as error:
            raise NotDelivered(error.reason) from error
        if not answer.is_success:
            raise NotDelivered(f"the receiver answered {answer.status}")
        return f"the receiver answered {answer.status}"


def channels_of(settings: Settings) -> list[Channel]:
    """Creates the channels that the settings configure, without the log. Raises ConfigurationError for an unusable CA
    file."""
    channels: list[Channel] = []
    if settings.alert_webhook_url:
        channels.append(
            WebhookChannel(
                settings.alert_webhook_url,
                settings.alert_webhook_secret,
                allow_private=settings.alert_webhook_allow_private,
                ca_file=settings.ca_file,
            )
        )
    if settings.alert_smtp_url is not None:
        from dispatcher.monitor.alert_mail import MailChannel  # imported here, because aiosmtplib loads slowly

        channels.append(
            MailChannel(
                settings.alert_smtp_url,
                settings.alert_email_from,
                settings.alert_email_to,
                ca_file=settings.ca_file,
            )
        )
    return channels
