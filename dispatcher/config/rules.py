"""What is wrong or doubtful about settings that can each be read."""

from __future__ import annotations

from typing import Final

from dispatcher.config.settings import Settings

LONG_WAIT_SECONDS: Final = 600.0
"""A retry may wait for so long without a warning."""


def doubts(settings: Settings) -> tuple[str, ...]:
    """What works, and is hardly meant so; a sentence each."""
    found = []
    lease, hang, cap = settings.lease_seconds, settings.hang_seconds, settings.retry_cap_seconds
    if hang >= lease:
        found.append(
            f"DISPATCHER_LEASE_SECONDS ({lease:g}) is not above DISPATCHER_HANG_SECONDS ({hang:g}): a worker that "
            "hangs loses its leases before it is replaced, and what it has on the wire counts as unknown. Raise the "
            "one, or lower the other."
        )
    if settings.max_attempts > 1 and cap > max(LONG_WAIT_SECONDS, 10 * lease):
        found.append(
            f"DISPATCHER_RETRY_CAP_SECONDS ({cap:g}) is far above DISPATCHER_LEASE_SECONDS ({lease:g}): an email stays "
            "leased while it waits for its next attempt. If its host vanishes in that time, no other host sends the "
            "email before the lease ends. Lower the one, or raise the other."
        )
    return tuple(found)


def contradictions(settings: Settings) -> list[str]:
    """A sentence for each two settings that cannot both be meant."""
    mistakes = _alert_gaps(settings)
    if settings.queue == settings.dlq:
        mistakes.append("DISPATCHER_DLQ names the same queue as DISPATCHER_QUEUE: give the dead letters their own.")
    if 0 < settings.retain_emails_days < settings.retain_content_days:
        mistakes.append(
            "DISPATCHER_RETAIN_CONTENT_DAYS is longer than DISPATCHER_RETAIN_EMAILS_DAYS: content goes first; lower it."
        )
    if settings.retain_keys_days and not 0 < settings.retain_emails_days <= settings.retain_keys_days:
        mistakes.append(
            "DISPATCHER_RETAIN_KEYS_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS: keys go last; raise it."
        )
    if settings.retain_audit_days and not 0 < settings.retain_emails_days <= settings.retain_audit_days:
        mistakes.append(
            "DISPATCHER_RETAIN_AUDIT_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS: what was done to an email is "
            "kept as long as the email; raise it."
        )
    if settings.retry_base_seconds > settings.retry_cap_seconds:
        mistakes.append("DISPATCHER_RETRY_BASE_SECONDS is above DISPATCHER_RETRY_CAP_SECONDS: lower it.")
    return mistakes


def _alert_gaps(settings: Settings) -> list[str]:
    """A channel that is half set up would be silent on the day that it is needed."""
    gaps = []
    if settings.alert_webhook_url and not settings.alert_webhook_secret:
        gaps.append(
            "DISPATCHER_ALERT_WEBHOOK_SECRET is not set, but DISPATCHER_ALERT_WEBHOOK_URL is: "
            "make one with: echo whsec_$(openssl rand -base64 32)."
        )
    mail = {
        "DISPATCHER_ALERT_SMTP_URL": settings.alert_smtp_url,
        "DISPATCHER_ALERT_EMAIL_FROM": settings.alert_email_from,
        "DISPATCHER_ALERT_EMAIL_TO": settings.alert_email_to,
    }
    missing = [name for name, value in mail.items() if not value]
    if 0 < len(missing) < len(mail):
        gaps.append(f"{' and '.join(missing)} not set: alerts by email need all of {', '.join(mail)}.")
    return gaps
