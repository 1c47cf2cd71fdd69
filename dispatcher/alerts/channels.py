"""The alert channel that writes to the log, and a function that creates the channels that the settings configure."""

from __future__ import annotations

from dispatcher.alerts.contract import Channel
from dispatcher.alerts.wording import summary
from dispatcher.config import Settings
from dispatcher.domain.alert import SEVERITY, Notice, Phase
from dispatcher.telemetry.log import get_log


class LogChannel:
    """An alert channel that writes notices to the log. It is always active and needs no settings."""

    name = "log"

    async def send(self, notice: Notice) -> str:
        """See `Channel.send`. Never raises NotDelivered."""
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


def channels_of(settings: Settings) -> list[Channel]:
    """Creates the channels that the settings configure. The log is not one of them. Opens no connection.

    Raises:
        ConfigurationError: The CA file is not usable.
    """
    channels: list[Channel] = []
    if settings.alert_webhook_url:
        from dispatcher.alerts.webhook import WebhookChannel

        channels.append(
            WebhookChannel(
                settings.alert_webhook_url,
                settings.alert_webhook_secret,
                allow_private=settings.alert_webhook_allow_private,
                ca_file=settings.ca_file,
            )
        )
    if settings.alert_smtp_url is not None:
        from dispatcher.alerts.mail import MailChannel  # imported here, because aiosmtplib loads slowly

        channels.append(
            MailChannel(
                settings.alert_smtp_url,
                settings.alert_email_from,
                settings.alert_email_to,
                ca_file=settings.ca_file,
            )
        )
    return channels
