"""Rows that the pages show, and what operators did."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

from psycopg import sql

from tests.store.books import Books


def write(books: Books, table: str, **columns: Any) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    values = sql.SQL(", ").join(sql.Placeholder() * len(columns))
    statement = sql.SQL("insert into {} ({}) values ({})").format(sql.Identifier(table), names, values)
    books.connection.execute(statement, [*columns.values()])


def dead_email(books: Books, status: str = "failed", **columns: Any) -> UUID:
    email_id = books.enqueue_one()
    usual = {"status": status, "attempt_count": 2, "provider": "smtp", "publish_due_at": None}
    usual |= {"error_type": "outcome_unknown" if status == "held" else "refused", "last_error": "550 no such user"}
    books.change(email_id, **{**usual, **columns})
    return email_id


def event(books: Books, email_id: UUID, kind: str = "bounced", **columns: Any) -> None:
    named = {"email_id": email_id, "provider": "sendgrid", "kind": kind, "happened_at": "now", **columns}
    write(books, "email_event", event_key=uuid4().bytes, **named)


def audited(books: Books) -> list[tuple[str, str]]:
    """Action and reason of each audited act after the sign-in."""
    rows = books.select("select action, reason from operator_audit where action <> 'sign_in' order by audit_id")
    return [(row["action"], row["reason"]) for row in rows]
