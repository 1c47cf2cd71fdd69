"""The channels that the settings name."""

from __future__ import annotations

from dispatcher.alerts.contract import Channel
from dispatcher.alerts.mail import MailChannel
from dispatcher.config import Settings


def channels_of(settings: Settings) -> list[Channel]:
    """Every configured way to reach a person; empty where none is. Connects to nobody.

    Raises:
        ConfigurationError: the CA file cannot be used.
    """
    channels: list[Channel] = []
    if settings.alert_webhook_url:
        # pyreqwest's allocator reserves a GiB of address space. Workers are forked from a process without it.
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
        channels.append(
            MailChannel(
                settings.alert_smtp_url,
                settings.alert_email_from,
                settings.alert_email_to,
                ca_file=settings.ca_file,
            )
        )
    return channels
