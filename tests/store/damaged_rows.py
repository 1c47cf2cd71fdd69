"""Rows of `email_log` with values that Python or AMQP cannot represent: what PostgreSQL allows, and a producer could
insert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import psycopg
from psycopg import sql

from tests.store.books import Books
from tests.store.damage import allow_damage

Columns = Mapping[str, object]

PAST: Final = "2026-01-01 00:00+00"
INSTANTS: Final = ("-infinity", "infinity", "4000-01-01 00:00+00 BC", "200000-01-01 00:00+00")
LEASED: Final[Columns] = {"status": "sending", "locked_by": "gone:w1:1:a", "lease_token": 1, "attempt_count": 1}
"""Columns of an email whose worker is gone."""
_WAITING: Final[Columns] = {"status": "waiting", "wait_reason": "scheduled", "publish_due_at": None}
_WAITING_FOR_DOMAIN: Final[Columns] = {**_WAITING, "wait_reason": "domain", "wait_domain": "example.org"}
_EXPIRED: Final[Columns] = {**LEASED, "publish_due_at": None, "locked_until": PAST, "redeliver_seconds": 60}
_FAILED: Final[Columns] = {"status": "failed", "publish_due_at": None, "dead_letter_due_at": PAST}
_WITH_ATTEMPT: Final[Columns] = {
    "status": "sent",
    "publish_due_at": None,
    "attempt_count": 1,
    "attempt_worker": "x",
    "provider": "smtp",
    "attempt_finished_at": PAST,
}
_LONG: Final = 20_000_000
"""More characters than RabbitMQ 4 takes in a message."""


def _with_instants(
    columns: Columns, column: str, about: str = "", instants: Sequence[str] = INSTANTS
) -> Mapping[str, Columns]:
    return {f"{column}{about}: {instant}": {**columns, column: instant} for instant in instants}


REFUSED: Final[Mapping[str, Columns]] = {
    **_with_instants(_WAITING, "wait_until", instants=INSTANTS[:2]),
    **_with_instants(_WAITING_FOR_DOMAIN, "wait_until", " for a domain", INSTANTS[:2]),
    **_with_instants({**LEASED, "publish_due_at": None}, "locked_until"),
    **_with_instants(_EXPIRED, "due_since"),
    "traceparent: 200,000 characters": {"traceparent": "0" * 200_000},
    "traceparent of a dead letter": {**_FAILED, "traceparent": "0" * 200_000},
}
"""Rows that the schema refuses. A row that was stored before its constraint may still have such values."""

READ: Final[Mapping[str, Columns]] = {
    **_with_instants(_WAITING, "wait_until", instants=INSTANTS[2:]),
    **_with_instants(_WAITING_FOR_DOMAIN, "wait_until", " for a domain", INSTANTS[2:]),
    **_with_instants(_EXPIRED, "pinned_at"),
    **_with_instants(_EXPIRED, "created_at"),
    **_with_instants(_EXPIRED, "redeliver_seconds", instants=("NaN", "Infinity", "1e300")),
    **_with_instants(_FAILED, "created_at", " of a dead letter"),
    **_with_instants({}, "expires_at"),
    **_with_instants({}, "publish_due_at"),
    **_with_instants({"publish_due_at": None}, "published_at"),
    **_with_instants(_FAILED, "dead_letter_due_at"),
    **_with_instants({**LEASED, "status": "sent", "publish_due_at": None}, "sent_at"),
    "half an attempt": {"status": "sent", "publish_due_at": None, "attempt_worker": "x"},
    **_with_instants(_WITH_ATTEMPT, "attempt_started_at"),
    **{
        f"recipient_outcomes: {json}": {**LEASED, "publish_due_at": None, "recipient_outcomes": json}
        for json in ("5", "[]", '"x"', '{"x": null}', '{"1": 5}')
    },
    "correlation_id: 300 characters": {"correlation_id": "c" * 300},
    "correlation_id of a dead letter": {**_FAILED, "correlation_id": "c" * 100_000},
    f"message_key: {_LONG:,} characters": {"message_key": "k" * _LONG},
    "message_key of a dead letter": {**_FAILED, "message_key": "k" * _LONG},
}
"""Rows that the schema allows (see decision 0065). Every reader tolerates them."""

DAMAGED: Final[Mapping[str, Columns]] = {**REFUSED, **READ}

_RECIPIENTS: Final = (
    "null",
    "5",
    "[]",
    '{"to": 5}',
    '{"to": {}}',
    '{"to": [null, 1, "", "x", "<>"]}',
    '{"to": [1e400]}',
)
CONTENTS: Final[Mapping[str, Columns]] = {
    **{f"recipients: {json}": {"recipients": json} for json in _RECIPIENTS},
    **{f"{column}: {json}": {column: json} for column in ("headers", "tags", "template_data") for json in ("5", "[5]")},
}
"""Rows of `email_content` with values that are not those of an email."""


def insert_row(connection: psycopg.Connection, row: Columns) -> None:
    statement = sql.SQL("insert into email_log ({}) values ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join([sql.Placeholder()] * len(row))
    )
    connection.execute(statement, [*row.values()])


def insert_damaged(books: Books) -> dict[str, UUID]:
    """Inserts every damaged row, and an email with each damaged content. Returns the email's id by the case's name."""
    ids = dict(zip([*DAMAGED, *CONTENTS], books.enqueue(len(DAMAGED) + len(CONTENTS)), strict=True))
    with allow_damage(books.connection):
        for name, columns in DAMAGED.items():
            books.change(ids[name], **{"wait_until": None, **columns})
    for name, columns in CONTENTS.items():
        ((column, json),) = columns.items()
        statement = sql.SQL("update email_content set {} = %s where email_id = %s").format(sql.Identifier(column))
        books.connection.execute(statement, [json, ids[name]])
    return ids
