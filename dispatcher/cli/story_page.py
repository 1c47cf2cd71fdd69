"""One email's whole story for people: what says something, in words; `--json` has every column."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from dispatcher.cli.output import print_data
from dispatcher.cli.table import Table
from dispatcher.domain.outcome import left_out
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from dispatcher.domain.waiting import Waiting
    from dispatcher.ops.messages import Message
    from dispatcher.ops.stories import Story

Record = Mapping[str, Any]

_NAMES: Final = {
    "email_id": "email",
    "tenant_id": "tenant",
    "message_key": "message key",
    "error_type": "error",
    "last_error": "words",
    "error": "words",
    "provider_message_id": "provider's id",
    "on_uncertain": "if unknown",
    "correlation_id": "correlation id",
    "traceparent": "trace",
    "created_at": "enqueued",
    "published_at": "published",
    "sent_at": "sent",
    "publish_due_at": "to be published",
    "dead_letter_due_at": "dead letter due",
    "dead_letter_discarded_at": "dead letter discarded",
    "attempt_number": "attempt",
    "provider_code": "code",
    "started_at": "began",
    "finished_at": "ended",
    "acted_at": "when",
    "replay_id": "replay",
    "settled_at": "when",
    "template_data": "template data",
    "template_id": "template",
    "text_body": "text",
    "html_body": "html",
}
_TOLD_OTHERWISE: Final = frozenset(
    {"attempt_count", "attempt_base", "was_uncertain", "crash_count", "locked_by", "locked_until"}
)


_MAKE_MIME: Final = frozenset({"smtp", "capture"})
"""Providers to whom we give the Message-ID; the others make their own."""


def show_story(story: Story, messages: list[Message] | None) -> None:
    """Writes it to stdout.

    Args:
        messages: What the DLQ holds of it; None if nobody looked.
    """
    fields_table({**_email(story.email), **_wait(story.waiting)}).show()
    _list("attempts", story.attempts)
    _list("what people did", story.acts)
    _list("replays", story.replays)
    if messages is not None:
        _list("on the DLQ", [_message(message) for message in messages])
    if story.content:
        print_data("\ncontent")
        fields_table(story.content).show()


def fields_table(record: Record) -> Table:
    """A record, one field per line, without those that hold nothing."""
    table = Table()
    for name, value in record.items():
        if value not in (None, [], {}):
            table.add(_NAMES.get(name, name.replace("_", " ")), _words(value))
    return table


def _email(row: Record) -> dict[str, Any]:
    told = {name: value for name, value in row.items() if name not in _TOLD_OTHERWISE}
    return {**told, **_circumstances(row)}


def _circumstances(row: Record) -> dict[str, Any]:
    """The columns that need a sentence; nothing of those that have nothing to say."""
    told: dict[str, Any] = {"attempts": f"{row['attempt_count']:,}"}
    if row["attempt_base"]:
        told["attempts"] += f", {row['attempt_count'] - row['attempt_base']:,} since the last replay or recovery"
    if row["was_uncertain"]:
        told["may have arrived"] = "yes: an attempt went out and no answer came back"
    if row["crash_count"]:
        told["crashes"] = f"{row['crash_count']:,}: so many workers died while they rendered it"
    if row["status"] == Status.SENT and (refused := left_out(row["last_error"])):
        told["not sent to"] = f"the provider refused recipients {refused}, counted over To, Cc, Bcc; it took the others"
    if row["provider"] in _MAKE_MIME:
        told["Message-ID"] = f"<{row['email_id']}@…>, with the sender's domain"
    if row["locked_by"]:
        told["in the hands of"] = f"{row['locked_by']}, until {_words(row['locked_until'])}"
    return told


def _wait(waiting: Waiting | None) -> dict[str, Any]:
    if waiting is None:
        return {}
    until = "" if waiting.until is None else f", until {_words(waiting.until)}"
    return {"waits": f"{waiting.reason.replace('_', ' ')}{until}: {waiting.detail}"}


def _message(message: Message) -> dict[str, Any]:
    headers = {name: value for name, value in message.headers.items() if name != "x-delivery-count"}
    return {
        "place": message.position + 1,
        "tells of": "an earlier failure" if message.is_stale else "how it stands",
        "failed": message.failed_at,
        "attempts": message.attempts,
        "headers": headers,
        "x-death": message.x_death,
    }


def _list(heading: str, records: list[dict[str, Any]]) -> None:
    """A table of records, without the columns in which none of them has anything."""
    print_data(f"\n{heading}" if records else f"\n{heading}: none")
    if not records:
        return
    names = [name for name in records[0] if any(record[name] not in (None, [], {}) for record in records)]
    table = Table(*(_NAMES.get(name, name.replace("_", " ")) for name in names))
    for record in records:
        table.add(*(_words(record[name]) for name in names))
    table.show()


def _words(value: Any) -> str:
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, dict):
        return ", ".join(f"{name}={_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_words(inner) for inner in value)
    return str(value)
