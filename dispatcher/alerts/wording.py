"""A notice in words for a person, and as JSON for a program."""

from __future__ import annotations

from datetime import datetime
from typing import Final, assert_never

import orjson

from dispatcher.domain.alert import MANUAL, MOST_DUE, SEVERITY, Alert, Kind, Notice, Phase

_ALONE: Final = "PostgreSQL is away: this host tells for itself, and others may tell the same."


def subject(notice: Notice) -> str:
    """One line that says it all to who reads no further."""
    return f"{_HEADS[notice.phase]} {notice.alert.component}: {summary(notice)}"


_HEADS: Final = {
    Phase.RAISED: f"[{SEVERITY}]",
    Phase.REMINDED: f"[{SEVERITY}, still]",
    Phase.RESOLVED: "[RESOLVED]",
    Phase.TEST: "[TEST]",
}


def summary(notice: Notice) -> str:
    """What is wrong, or was."""
    if notice.phase is Phase.TEST:
        return "a test of this alert channel; nothing is wrong"
    if notice.phase is Phase.RESOLVED:
        return _resolution(notice.alert)
    return _trouble(notice.alert)


def text(notice: Notice) -> str:
    """The whole of it, a line per fact."""
    facts = {name: value for name, value in _facts(notice).items() if value not in (None, [])}
    lines = [f"{name.replace('_', ' ')}: {_plain(value)}" for name, value in facts.items()]
    return "\n".join([_sentence(notice), "", *lines, ""])


def payload(notice: Notice) -> bytes:
    """The JSON of a webhook: `type`, `timestamp` and `data`, as Standard Webhooks has them."""
    document = {
        "type": f"alert.{notice.phase}",
        "timestamp": instant(notice.at),
        "data": {**_facts(notice), "summary": _sentence(notice)},
    }
    return orjson.dumps(document)


def instant(at: datetime) -> str:
    """RFC 3339, in UTC."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _facts(notice: Notice) -> dict[str, object]:
    alert = notice.alert
    age = alert.oldest_age_seconds
    return {
        "severity": SEVERITY,
        "component": alert.component,
        "phase": notice.phase,
        "kind": alert.kind,
        "timestamp": instant(notice.at),
        "queue": alert.queue,
        "count": alert.count,
        "oldest_age_seconds": None if age is None else round(age, 1),
        "correlation_ids": list(alert.correlation_ids),
        "reason": alert.reason,
        "raised_at": instant(alert.raised_at),
        "host": alert.host,
    }


def _sentence(notice: Notice) -> str:
    words = summary(notice)
    sentence = f"{words[0].upper()}{words[1:]}."
    if notice.phase in (Phase.RAISED, Phase.REMINDED):
        sentence = f"{sentence} {MANUAL}"
    return f"{sentence} {_ALONE}" if notice.alert.is_alone else sentence


def _trouble(alert: Alert) -> str:
    match alert.kind:
        case Kind.DEAD_LETTERS:
            messages = "message" if alert.count == 1 else "messages"
            return f"{alert.count} {messages} on the dead-letter queue {alert.queue}"
        case Kind.OLDEST_AGE_GROWING:
            return f"dead letters do not reach the queue {alert.queue}, and the oldest grows older"
        case Kind.PROBE_FAILED:
            return f"the dead-letter queue {alert.queue} cannot be watched, so nobody knows what is on it"
        case Kind.UNDECIDED_EXPIRING:
            emails = "email loses its" if alert.count == 1 else "emails lose their"
            return (
                f"{alert.count} failed or held {emails} content within a week unless replayed, confirmed or discarded"
            )
        case Kind.NOTHING_SENT:
            more = " or more" if (alert.count or 0) >= MOST_DUE else ""
            emails = "1 email is" if alert.count == 1 else f"{alert.count}{more} emails are"
            return f"{emails} due, but none is sent: {_ended(alert.reason)}"
        case Kind.PROVIDER_UNUSABLE:
            return f"workers cannot use a provider: {_ended(alert.reason)}"
        case Kind.HOST_VANISHED:
            return f"a host has vanished: {_ended(alert.reason)}"
        case _:
            assert_never(alert.kind)


def _resolution(alert: Alert) -> str:
    match alert.kind:
        case Kind.DEAD_LETTERS:
            return f"the dead-letter queue {alert.queue} is empty again"
        case Kind.OLDEST_AGE_GROWING:
            return f"dead letters reach the queue {alert.queue} again"
        case Kind.PROBE_FAILED:
            return f"the dead-letter queue {alert.queue} can be watched again"
        case Kind.UNDECIDED_EXPIRING:
            return "no failed or held email is about to lose its content any more"
        case Kind.NOTHING_SENT:
            return "emails are sent again, or no email is due any more"
        case Kind.PROVIDER_UNUSABLE:
            return "workers can use every provider again"
        case Kind.HOST_VANISHED:
            return "every host is back, stopped in order, or has been gone for a day"
        case _:
            assert_never(alert.kind)


def _ended(reason: str | None) -> str:
    """A reason without its full stop, for use inside a sentence."""
    return (reason or "the reason is unknown").rstrip(".")


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
