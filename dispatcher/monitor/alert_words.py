"""The texts of a notice for operators, and its JSON for programs."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import orjson

from dispatcher.domain.alert import MANUAL, MAX_DUE_COUNT, SEVERITY, Alert, Kind, Notice, Phase

_ALONE: Final = "PostgreSQL is unreachable, so every host alerts on its own: other hosts may send the same alert."


def subject(notice: Notice) -> str:
    """The notice in one line, for an email's subject."""
    return f"{_HEADS[notice.phase]} {notice.alert.component}: {summary(notice)}"


_HEADS: Final = {
    Phase.RAISED: f"[{SEVERITY}]",
    Phase.REMINDED: f"[{SEVERITY}, still]",
    Phase.RESOLVED: "[RESOLVED]",
    Phase.TEST: "[TEST]",
}


def summary(notice: Notice) -> str:
    """What is wrong, or what was resolved: a sentence without a capital at the start and without a full stop."""
    if notice.phase is Phase.TEST:
        return "a test of this alert channel; nothing is wrong"
    if notice.phase is Phase.RESOLVED:
        return _resolution(notice.alert)
    return _trouble(notice.alert)


def text(notice: Notice) -> str:
    """The notice as plain text: a sentence, an empty line, and one line for each fact."""
    facts = {name: value for name, value in _facts(notice).items() if value not in (None, [])}
    lines = [
        f"{name.replace('_', ' ')}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in facts.items()
    ]
    return "\n".join([_sentence(notice), "", *lines, ""])


def payload(notice: Notice) -> bytes:
    """The JSON body of a webhook: `type`, `timestamp` and `data`, according to Standard Webhooks."""
    document = {
        "type": f"alert.{notice.phase}",
        "timestamp": instant(notice.at),
        "data": {**_facts(notice), "summary": _sentence(notice)},
    }
    return orjson.dumps(document)


def instant(at: datetime) -> str:
    """An instant in RFC 3339 format, in UTC, with milliseconds."""
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
    queue, count, is_one = alert.queue, alert.count, alert.count == 1
    reason = (alert.reason or "the reason is unknown").rstrip(".")
    more = " or more" if (count or 0) >= MAX_DUE_COUNT else ""
    return {
        Kind.DEAD_LETTERS: f"{count} {'message' if is_one else 'messages'} on the dead-letter queue {queue}",
        Kind.DEAD_LETTERS_UNPUBLISHED: f"dead letters do not reach the queue {queue}; the oldest has waited too long",
        Kind.PROBE_FAILED: f"the dead-letter queue {queue} cannot be checked, so new dead letters would go unnoticed",
        Kind.UNDECIDED_EXPIRING: (
            f"{count} failed or held {'email loses its' if is_one else 'emails lose their'} content within a week "
            f"unless an operator replays, confirms, releases or discards {'it' if is_one else 'them'}"
        ),
        Kind.NOTHING_SENT: f"{count}{more} {'email is' if is_one else 'emails are'} due, but none is sent: {reason}",
        Kind.PROVIDER_UNUSABLE: f"workers cannot use a provider: {reason}",
        Kind.HOST_VANISHED: f"a host has vanished: {reason}",
        Kind.WEBHOOK_DISABLED: f"a webhook gets no events any more: {reason}",
        Kind.IMPOSSIBLE_EVENTS: f"events arrive about emails that no worker sent: {reason}",
        Kind.PAUSED: f"a pause without an end time is still in force: {reason}",
    }[alert.kind]


def _resolution(alert: Alert) -> str:
    return {
        Kind.DEAD_LETTERS: f"the dead-letter queue {alert.queue} is empty again",
        Kind.DEAD_LETTERS_UNPUBLISHED: f"dead letters reach the queue {alert.queue} again",
        Kind.PROBE_FAILED: f"the dead-letter queue {alert.queue} can be checked again",
        Kind.UNDECIDED_EXPIRING: "no failed or held email is about to lose its content",
        Kind.NOTHING_SENT: "emails are being sent again, or no email is due",
        Kind.PROVIDER_UNUSABLE: "workers can use every provider again",
        Kind.HOST_VANISHED: "every host reports again, was stopped in an orderly way, or vanished more than a day ago",
        Kind.WEBHOOK_DISABLED: "every webhook is active again, or was removed",
        Kind.IMPOSSIBLE_EVENTS: "for a day, no event arrived about an email that no worker sent",
        Kind.PAUSED: "every long pause has ended, or has an end time",
    }[alert.kind]
