"""The page of `dispatcher show`: one email's history, without empty fields. `--json` has every column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from dispatcher.cli.output import counted, print_data
from dispatcher.cli.table import Table
from dispatcher.domain.outcome import delivered_recipients, left_out
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from dispatcher.domain.waiting import WaitExplanation
    from dispatcher.ops.email_history import EmailHistory
    from dispatcher.ops.messages import DeadLetterMessage

Record = Mapping[str, Any]

_NAMES: Final = {
    "email_id": "email",
    "tenant_id": "tenant",
    "message_key": "message key",
    "error_type": "error type",
    "last_error": "last error",
    "error": "error",
    "provider_message_id": "provider's id",
    "on_uncertain": "if uncertain",
    "correlation_id": "correlation id",
    "traceparent": "trace",
    "created_at": "enqueued",
    "published_at": "published",
    "leased_at": "last leased",
    "dead_lettered_at": "dead letter published",
    "at": "when",
    "sent_at": "sent",
    "publish_due_at": "publish due",
    "expires_at": "expires",
    "dead_letter_due_at": "dead letter due",
    "dead_letter_discarded_at": "dead letter discarded",
    "provider_code": "code",
    "started_at": "started",
    "finished_at": "finished",
    "happened_at": "when",
    "received_at": "received",
    "acted_at": "when",
    "replay_id": "replay",
    "settled_at": "when",
    "template_data": "template data",
    "template_id": "template",
    "text_body": "text",
    "html_body": "html",
}
_EXPLAINED: Final = frozenset(
    {
        *("attempt_count", "attempt_base", "was_uncertain", "crash_count", "locked_by", "locked_until"),
        *("wait_until", "wait_reason", "redelivery_count", "recipient_outcomes"),
    }
)
"""Columns that `_explained_fields` shows in a different form."""


_KEEP_MESSAGE_ID: Final = frozenset({"smtp", "capture"})
"""Providers that keep the Message-ID that the dispatcher creates. All other providers create their own."""


def show_history(story: EmailHistory, messages: list[DeadLetterMessage] | None) -> None:
    """Writes one email's history to stdout.

    Args:
        messages: The email's dead letters on the DLQ; None if the DLQ was not read.
    """
    fields_table({**_email(asdict(story.email)), **_wait(story.waiting)}).show()
    for heading, rows in (
        ("timeline", story.timeline),
        ("attempts (by the clock of the sending host)", story.attempts),
        ("events from providers (by the provider's clock)", story.events),
        ("operator actions", story.acts),
        ("replays", story.replays),
    ):
        _list(heading, [asdict(row) for row in rows])
    if messages is not None:
        _list("on the DLQ", [_message(message) for message in messages])
    if story.content:
        print_data("\ncontent")
        fields_table(story.content).show()


def document(story: EmailHistory, messages: list[DeadLetterMessage] | None) -> dict[str, Any]:
    """The document of HTTP, with what only operators see: all columns, workers, actors, and the dead letters."""
    from dispatcher.ops.email_history import status_of

    whole = {**asdict(story.email), **asdict(status_of(story)), **asdict(story), "timeline": story.timeline}
    del whole["email"], whole["email_id"]
    if story.content is None:
        del whole["content"]
    return {**whole, "dlq": messages}


def fields_table(record: Record) -> Table:
    """A table with one line per field of the record, without empty fields."""
    table = Table()
    for name, value in record.items():
        if value not in (None, [], {}):
            table.add(_NAMES.get(name, name.replace("_", " ")), _text(value))
    return table


def _email(row: Record) -> dict[str, Any]:
    # If the email is sent, the column `last_error` contains the provider's answer, which is not an error.
    answer = "answer" if row["status"] == Status.SENT else "last_error"
    names = {"last_error": answer, "settled_at": "status since"}
    fields = {names.get(name, name): value for name, value in row.items() if name not in _EXPLAINED}
    if row["status"] not in (Status.FAILED, Status.HELD, Status.CANCELLED):
        del fields["status since"]  # in every other status, `settled_at` belongs to an earlier status
    return {**fields, **_explained_fields(row)}


def _explained_fields(row: Record) -> dict[str, Any]:
    """The fields that the page explains in words. Leaves out fields that do not apply to this email."""
    fields: dict[str, Any] = {"attempts": f"{row['attempt_count']:,}"}
    if row["attempt_base"]:
        fields["attempts"] += (
            f", {row['attempt_count'] - row['attempt_base']:,} since the last replay, recovery or partial delivery"
        )
    if row["redelivery_count"]:
        fields["redeliveries"] = f"{row['redelivery_count']:,}"
    if row["was_uncertain"]:
        fields["may have arrived"] = "yes: the outcome of an attempt is unknown"
    if row["crash_count"]:
        fields["crashes"] = f"{counted(row['crash_count'], 'worker')} died while rendering this email"
    if row["status"] == Status.SENT and (refused := left_out(row["last_error"])):
        fields["not sent to"] = (
            f"recipients {refused}, in the order To, Cc, Bcc: the provider refused these and accepted all others"
        )
    if delivered := delivered_recipients(row["status"], row["recipient_outcomes"]):
        fields["delivered to"] = f"recipients {delivered}, in the order To, Cc, Bcc: a further attempt leaves these out"
    if row["provider"] in _KEEP_MESSAGE_ID:
        fields["Message-ID"] = f"<{row['email_id']}@…>, with the sender's domain"
    if row["locked_by"]:
        fields["leased by"] = f"{row['locked_by']}, until {_text(row['locked_until'])}"
    return fields


def _wait(waiting: WaitExplanation | None) -> dict[str, Any]:
    if waiting is None:
        return {}
    if waiting.because is not None:
        return {"waits": f"until {_text(waiting.until)} because {waiting.because}"}
    until = "" if waiting.until is None else f", until {_text(waiting.until)}"
    return {"waits": f"{waiting.reason.replace('_', ' ')}{until}: {waiting.detail}"}


def _message(message: DeadLetterMessage) -> dict[str, Any]:
    headers = {name: value for name, value in message.headers.items() if name != "x-delivery-count"}
    return {
        "position": message.position + 1,
        "refers to": "an earlier failure" if message.is_stale else "the current failure",
        "failed": message.failed_at,
        "attempts": message.attempts,
        "headers": headers,
        "x-death": message.x_death,
    }


def _list(heading: str, records: list[dict[str, Any]]) -> None:
    """Prints a table of records, without columns that are empty in every record."""
    print_data(f"\n{heading}" if records else f"\n{heading}: none")
    if not records:
        return
    names = [name for name in records[0] if any(record[name] not in (None, [], {}) for record in records)]
    table = Table(*(_NAMES.get(name, name.replace("_", " ")) for name in names))
    for record in records:
        table.add(*(_text(record[name]) for name in names))
    table.show()


def _text(value: Any) -> str:
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_text(inner) for inner in value)
    return str(value)
