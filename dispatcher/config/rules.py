"""Checks that involve several settings. The checks run after all settings are read and parsed."""

from __future__ import annotations

from typing import Final

from dispatcher.config.plugins import renamed
from dispatcher.config.settings import SMS_PROVIDERS, Settings
from dispatcher.config.values import LOOPBACKS

LONG_WAIT_SECONDS: Final = 600.0
"""If DISPATCHER_RETRY_CAP_SECONDS is at most this many seconds, it never causes a warning."""


def suspicious_settings(settings: Settings) -> tuple[str, ...]:
    """Warnings about settings that are valid, but probably not intended; one sentence each."""
    found = []
    lease, hang, cap = settings.lease_seconds, settings.hang_seconds, settings.retry_cap_seconds
    if hang >= lease:
        found.append(
            f"DISPATCHER_LEASE_SECONDS ({lease:g}) is not above DISPATCHER_HANG_SECONDS ({hang:g}): a worker that "
            "hangs loses its leases before it is replaced, and emails that it was transmitting are uncertain. Raise "
            "DISPATCHER_LEASE_SECONDS or lower DISPATCHER_HANG_SECONDS."
        )
    if settings.max_attempts > 1 and cap > max(LONG_WAIT_SECONDS, 10 * lease):
        found.append(
            f"DISPATCHER_RETRY_CAP_SECONDS ({cap:g}) is far above DISPATCHER_LEASE_SECONDS ({lease:g}): an email stays "
            "leased while it waits for its next attempt. If its host vanishes in that time, no other host sends the "
            "email before the lease expires. Lower DISPATCHER_RETRY_CAP_SECONDS or raise DISPATCHER_LEASE_SECONDS."
        )
    return tuple(found)


def contradictions(settings: Settings) -> list[str]:
    """Mistakes in settings that contradict each other; one sentence each."""
    mistakes = _alert_gaps(settings) + _openid_gaps(settings) + _submission_gaps(settings) + _wrong_rules(settings)
    if settings.dlq in map(settings.queue_of, settings.lanes):
        mistakes.append(
            "DISPATCHER_DLQ has the same name as the send queue of a lane. Dead letters need a separate queue: change "
            "DISPATCHER_DLQ or DISPATCHER_QUEUE."
        )
    if 0 < settings.retain_emails_days < settings.retain_content_days:
        mistakes.append(
            "DISPATCHER_RETAIN_CONTENT_DAYS is longer than DISPATCHER_RETAIN_EMAILS_DAYS, but content is deleted "
            "first. Lower DISPATCHER_RETAIN_CONTENT_DAYS."
        )
    if settings.retain_keys_days and not 0 < settings.retain_emails_days <= settings.retain_keys_days:
        mistakes.append(
            "DISPATCHER_RETAIN_KEYS_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS, but keys are deleted last. "
            "Raise DISPATCHER_RETAIN_KEYS_DAYS."
        )
    if settings.retain_audit_days and not 0 < settings.retain_emails_days <= settings.retain_audit_days:
        mistakes.append(
            "DISPATCHER_RETAIN_AUDIT_DAYS is shorter than DISPATCHER_RETAIN_EMAILS_DAYS, but the record of operators' "
            "actions must be kept at least as long as the email. Raise DISPATCHER_RETAIN_AUDIT_DAYS."
        )
    return mistakes + [
        renamed(mistake, name) for name, own in settings.own.items() for mistake in own.mistakes(settings)
    ]


def _wrong_rules(settings: Settings) -> list[str]:
    """Mistakes in the rules for accounts; none if this process does not know the providers."""
    rules, emails = settings.account_rules, [name for name in settings.providers if name not in SMS_PROVIDERS]
    if not rules or not emails:
        return []
    listed = f"DISPATCHER_PROVIDERS lists: {', '.join(emails)}."
    found = [f"DISPATCHER_ACCOUNT_RULES names {name}, but {listed}" for name in sorted(rules.named - {*emails})]
    lanes = sorted({rule.lane for rule in rules.rules if rule.lane} - {*settings.lanes})
    found += [
        f"DISPATCHER_ACCOUNT_RULES names the lane {lane}, which DISPATCHER_LANES does not have." for lane in lanes
    ]
    if rules.named.issuperset(emails):
        found.append(
            "DISPATCHER_ACCOUNT_RULES names every provider, so an email without a rule could not be sent. Add a "
            f"provider that no rule names, or leave one out of the rules. {listed}"
        )
    return found


def unprotected_submission(settings: Settings) -> list[str]:
    """A sentence if `dispatcher smtp` would listen for other hosts without TLS. Other commands do not need the rule."""
    if settings.submission_tls != "off" or settings.submission_address.host in LOOPBACKS:
        return []
    mistake = (
        f"DISPATCHER_SUBMISSION_ADDRESS is {settings.submission_address}, but DISPATCHER_SUBMISSION_TLS is off: "
        "clients would send API keys and emails without encryption. Set DISPATCHER_SUBMISSION_TLS to starttls or "
        "implicit, or listen on 127.0.0.1."
    )
    return [mistake]


def _submission_gaps(settings: Settings) -> list[str]:
    if settings.submission_tls == "off" or settings.submission_certificate is not None:
        return []
    return [f"DISPATCHER_SUBMISSION_TLS={settings.submission_tls} needs DISPATCHER_SUBMISSION_CERTIFICATE."]


def _openid_gaps(settings: Settings) -> list[str]:
    """A sentence if the sign-in with OpenID Connect is only partly configured."""
    if settings.ops_oidc_issuer is None:
        return []
    needed = {
        "DISPATCHER_OPS_URL": settings.ops_url,
        "DISPATCHER_OPS_OIDC_CLIENT_ID": settings.ops_oidc_client_id,
        "DISPATCHER_OPS_OIDC_CLIENT_SECRET": settings.ops_oidc_client_secret,
        "DISPATCHER_OPS_OIDC_OPERATE or DISPATCHER_OPS_OIDC_READ": settings.ops_oidc_operate or settings.ops_oidc_read,
    }
    return [
        f"DISPATCHER_OPS_OIDC_ISSUER needs {name}, which is not set." for name, value in needed.items() if not value
    ]


def _alert_gaps(settings: Settings) -> list[str]:
    """A sentence for each alert channel that is only partly configured, so that it could send no alert."""
    gaps = []
    if settings.alert_webhook_url and not settings.alert_webhook_secret:
        gaps.append(
            "DISPATCHER_ALERT_WEBHOOK_SECRET is not set, but DISPATCHER_ALERT_WEBHOOK_URL is. "
            "Create one with: echo whsec_$(openssl rand -base64 32)."
        )
    mail = {
        "DISPATCHER_ALERT_SMTP_URL": settings.alert_smtp_url,
        "DISPATCHER_ALERT_EMAIL_FROM": settings.alert_email_from,
        "DISPATCHER_ALERT_EMAIL_TO": settings.alert_email_to,
    }
    missing = [name for name, value in mail.items() if not value]
    if 0 < len(missing) < len(mail):
        is_or_are = "is" if len(missing) == 1 else "are"
        gaps.append(f"{' and '.join(missing)} {is_or_are} not set. Alerts by email need all of {', '.join(mail)}.")
    return gaps
