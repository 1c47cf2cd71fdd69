"""What happened to one email, as a list of instants, oldest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass

Record = Mapping[str, Any]

DOUBTS: Final = MappingProxyType(
    {
        "impossible": "without effect, because no worker sent the email through this provider",
        "recipient": "suppresses no recipient, because nothing proves that it is about this one",
    }
)
"""What an event that proves less than it says does not do, by its doubt (docs/events.md)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant in the history of an email. Contains no private data: no content and no address.

    Attributes:
        what: What happened, in plain English, such as `enqueued`, `attempt 1: accepted`, or `released`.
        detail: Further facts, such as the provider and its answer.
        actor: The operator who acted; None if this was not an operator's action.
        reason: Why the operator acted.
    """

    at: datetime
    what: str
    detail: str | None = None
    actor: str | None = None
    reason: str | None = None


def timeline(
    email: Record,
    *,
    attempts: Sequence[Record],
    events: Sequence[Record] = (),
    acts: Sequence[Record] = (),
    replays: Sequence[Record] = (),
) -> list[Moment]:
    """Every instant that is known about an email, oldest first.

    The email's row stores only the last instant of each kind: after a replay, the earlier instants of `published` and
    `leased` are lost. Instants that an earlier release did not store are missing.

    Args:
        email, attempts, events, acts, replays: The fields of `EmailHistory` with these names.
    """
    moments = [
        *_of_row(email),
        *map(_attempt, attempts),
        *map(_event, events),
        *map(_act, acts),
        *(_replay(each) for each in replays if each["settled_at"] is not None),
    ]
    return sorted(moments, key=lambda moment: moment.at)


def _of_row(email: Record) -> Iterator[Moment]:
    yield Moment(email["created_at"], "enqueued", f"lane {email['lane']}" if email.get("lane") else None)
    for column, what in (("published_at", "published"), ("leased_at", "leased"), ("sent_at", "sent")):
        if (at := email.get(column)) is not None:
            by = email.get("locked_by") if column == "leased_at" else None
            yield Moment(at, what, f"by {by}" if by else None)
    status = email["status"]
    if status in (Status.FAILED, Status.HELD, Status.CANCELLED) and email.get("settled_at") is not None:
        yield Moment(email["settled_at"], str(status), _joined(email["error_type"], email["last_error"]))
    if email.get("dead_lettered_at") is not None:
        yield Moment(email["dead_lettered_at"], "dead-lettered", "its dead letter is on the DLQ")
    if email.get("dead_letter_discarded_at") is not None and status in (Status.FAILED, Status.HELD):
        yield Moment(email["dead_letter_discarded_at"], "dead letter discarded")


def _attempt(attempt: Record) -> Moment:
    what = f"attempt {attempt['attempt_number']}: {attempt['outcome']}"
    seconds = (attempt["finished_at"] - attempt["started_at"]).total_seconds()
    answer = _joined(attempt["provider_code"], attempt["error_type"], attempt["error"])
    return Moment(attempt["finished_at"], what, _joined(f"{attempt['provider']}, after {seconds:.3f} s", answer))


def _event(event: Record) -> Moment:
    kind = f"{event['kind']} ({event['bounce']})" if event["bounce"] else event["kind"]
    whom = f"recipient {event['recipient']}" if event.get("recipient") else None
    doubt = DOUBTS.get(event.get("doubt") or "")
    return Moment(event["happened_at"], kind, _joined(event["provider"], whom, doubt, event["code"], event["detail"]))


def _act(act: Record) -> Moment:
    return Moment(act["acted_at"], act["action"].replace("_", " "), None, act["actor"], act["reason"])


def _replay(replay: Record) -> Moment:
    what = (replay["outcome"] or "replay").replace("_", " ")
    return Moment(replay["settled_at"], what, f"replay {replay['replay_id']}", replay["actor"], replay["reason"])


def _joined(*parts: str | None) -> str | None:
    return ": ".join(part for part in parts if part) or None
