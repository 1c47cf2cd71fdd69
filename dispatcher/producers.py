"""`enqueue` stores an email in the application's own PostgreSQL transaction, once per message key.

    with psycopg.connect(...) as connection:
        connection.execute("insert into orders …")
        enqueue(connection, Email(message_key="order-17-receipt", sender="shop@example.com", to="ann@example.org", …))

Both rows commit, or neither does. The connection may be a psycopg connection, Django's `connection`, or SQLAlchemy's
Connection or Session over psycopg. These functions never commit, roll back or close the connection. They raise
psycopg's own errors unchanged, except for the errors that `enqueue` lists. A second call with the same message key and
payload returns the id of the first email. The relay publishes the email after the commit.

The `_async` functions do the same with psycopg's AsyncConnection, or SQLAlchemy's AsyncConnection or AsyncSession.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from dispatcher.domain.message import Message
from dispatcher.domain.sms import SMS_CHANNEL, SmsRules
from dispatcher.errors import ConfigurationError, InvalidEmail, MessageKeyConflict
from dispatcher.store.callers import (
    AsyncCallersConnection,
    CallersConnection,
    async_connection_of,
    connection_of,
    with_tables,
)
from dispatcher.store.enqueueing import (
    Draft,
    Holders,
    attachment_parameters,
    draft,
    has_attachments,
    has_file_parts,
    holders,
    insert_parameters,
    key_parameters,
    octets_of,
)
from dispatcher.store.queries import query

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

Rows = Sequence[tuple[Any, ...]]
BATCH_EMAILS: Final = 500
"""The most emails per statement. Larger batches are not faster, but use more memory."""
BATCH_OCTETS: Final = 16 * 1024 * 1024
"""The most octets of content per statement. A larger email gets its own statement. PostgreSQL ends the session if a
statement has half a gigabyte."""

ALREADY_EXPIRED: Final = "is in the past by PostgreSQL's clock; set a later time, or do not send this email"
"""The reason of `InvalidEmail` if a new email's `expires_at` has passed."""


class Acceptance(StrEnum):
    """The result of enqueueing an email."""

    ACCEPTED = "accepted"
    """The key is new. The email will be sent."""
    KNOWN = "known"
    """The key was enqueued before with the same payload. Nothing was stored."""
    CONFLICT = "conflict"
    """The key was enqueued before with a different payload, or `dispatcher forget` has erased the payload. Nothing was
    stored."""
    EXPIRED = "expired"
    """The email's `expires_at` has passed, and the key is new. Nothing was stored."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The result of enqueueing one email.

    Attributes:
        email_id: The new email's id, if the email was accepted. An unused id, if the email has expired. Otherwise the
            id of the earlier email with the same key.
        warnings: Sentences that the caller should read although the email is valid: for example, that one character
            increases the number of an SMS's segments.
    """

    email_id: UUID
    message_key: str
    acceptance: Acceptance
    warnings: tuple[str, ...] = ()


def enqueue(connection: CallersConnection, email: Message, *, traceparent: str | None = None) -> Enqueued:
    """Enqueues one email in the connection's transaction. Idempotent per message key.

    Args:
        connection: A psycopg connection, Django's `connection`, or SQLAlchemy's Connection or Session.
        traceparent: A W3C trace context. The dispatcher adds it to the RabbitMQ message and to log events.

    Raises:
        InvalidEmail: the email's `expires_at` has passed, and the key is new; or DISPATCHER_SMS_COUNTRIES is set for
            this application, and does not allow the country of an SMS.
        MessageKeyConflict: the key was enqueued before with a different payload.
        UnusableConnection: the connection is not a psycopg connection, is closed, is in a failed transaction, or its
            role lacks a permission.
        SchemaError: the database does not have the dispatcher's tables.
    """
    return enqueue_many(connection, [email], traceparent=traceparent)[0]


def enqueue_many(
    connection: CallersConnection,
    emails: Iterable[Message],
    *,
    traceparent: str | None = None,
    report_conflicts: bool = False,
) -> list[Enqueued]:
    """Enqueues emails in the connection's transaction, up to `BATCH_EMAILS` per statement.

    If the connection is in autocommit mode (as Django's is outside `atomic()`), the call is its own transaction: it
    stores all emails or none, and the emails stay stored if the caller's later code fails. With `report_conflicts`,
    each batch is its own transaction instead, so a file of any size can be enqueued.

    Args:
        report_conflicts: Do not raise `MessageKeyConflict` or `InvalidEmail`: return `Acceptance.CONFLICT` or
            `Acceptance.EXPIRED` for such an email, and store all other emails.

    Returns:
        The result for each email, in the order of `emails`.

    Raises:
        MessageKeyConflict: a key was enqueued before with a different payload, and `report_conflicts` is off. Roll the
            transaction back: it may contain other emails of the call.
        InvalidEmail: an email has expired, its key is new, and `report_conflicts` is off. Roll the transaction back.
        UnusableConnection, SchemaError: see `enqueue`.
    """
    answers: list[Enqueued] = []
    driver = connection_of(connection)
    is_own = driver.autocommit and not (report_conflicts or _is_one_statement(emails))
    with driver.transaction() if is_own else nullcontext():
        for drafts in _batches(emails, traceparent):
            inserted: set[UUID] = set()
            known: Holders = {}
            for left in _rounds(drafts, inserted, known):
                is_own = driver.autocommit and report_conflicts and has_attachments(left)
                with driver.transaction() if is_own else nullcontext():
                    rows = _fetch(driver, "enqueue" if len(left) > 1 else "enqueue_one", insert_parameters(left), left)
                    inserted |= {row[0] for row in rows}
                    if attachments := attachment_parameters(left, inserted):
                        _fetch(driver, "enqueue_attachments", attachments)
                if keys := key_parameters(left, inserted):
                    known |= holders(_fetch(driver, "find_by_key", keys))
            answers.extend(_answers(drafts, inserted, known, report_conflicts=report_conflicts))
    return answers


async def enqueue_async(
    connection: AsyncCallersConnection, email: Message, *, traceparent: str | None = None
) -> Enqueued:
    """`enqueue` on an asynchronous connection."""
    return (await enqueue_many_async(connection, [email], traceparent=traceparent))[0]


async def enqueue_many_async(
    connection: AsyncCallersConnection,
    emails: Iterable[Message],
    *,
    traceparent: str | None = None,
    report_conflicts: bool = False,
) -> list[Enqueued]:
    """`enqueue_many` on an asynchronous connection."""
    answers: list[Enqueued] = []
    driver = await async_connection_of(connection)
    is_own = driver.autocommit and not (report_conflicts or _is_one_statement(emails))
    async with driver.transaction() if is_own else nullcontext():
        for drafts in _batches(emails, traceparent):
            inserted: set[UUID] = set()
            known: Holders = {}
            for left in _rounds(drafts, inserted, known):
                is_own = driver.autocommit and report_conflicts and has_attachments(left)
                async with driver.transaction() if is_own else nullcontext():
                    rows = await _fetch_async(
                        driver, "enqueue" if len(left) > 1 else "enqueue_one", insert_parameters(left), left
                    )
                    inserted |= {row[0] for row in rows}
                    if attachments := attachment_parameters(left, inserted):
                        await _fetch_async(driver, "enqueue_attachments", attachments)
                if keys := key_parameters(left, inserted):
                    known |= holders(await _fetch_async(driver, "find_by_key", keys))
            answers.extend(_answers(drafts, inserted, known, report_conflicts=report_conflicts))
    return answers


def _batches(emails: Iterable[Message], traceparent: str | None) -> Iterator[list[Draft]]:
    batch: list[Message] = []
    octets = 0
    for email in emails:
        if email.channel == SMS_CHANNEL and (fault := sms_rules().fault(email.to[0], "")):
            raise fault
        size = octets_of(email)
        if batch and (len(batch) == BATCH_EMAILS or octets + size > BATCH_OCTETS):
            yield draft(batch, traceparent)
            batch, octets = [], 0
        batch.append(email)
        octets += size
    if batch:
        yield draft(batch, traceparent)


def _rounds(drafts: list[Draft], inserted: set[UUID], known: Holders) -> Iterator[list[Draft]]:
    """All drafts, then the drafts that were neither inserted nor found. Their keys existed, but without an email, so
    `find_by_key` deleted the keys."""
    yield drafts
    if len(inserted) < len(drafts) and (
        left := [item for item in drafts if item.email_id not in inserted and item.key not in known]
    ):
        yield left


@cache
def sms_rules() -> SmsRules:
    """Which SMS this application may enqueue: the value of DISPATCHER_SMS_COUNTRIES at the first call."""
    from dispatcher.config import examine  # imported here, because the import takes many milliseconds

    name = "DISPATCHER_SMS_COUNTRIES"
    settings, _, mistakes = examine({name: os.environ.get(name, "")}, reads_own=False)
    if mistakes:
        raise ConfigurationError(mistakes)
    return settings.sms_rules


def _is_one_statement(emails: Iterable[Message]) -> bool:
    """Whether a single statement stores all emails, so the call needs no explicit transaction in autocommit mode.

    Outside autocommit mode, the call must not begin a transaction. If the caller has executed no statement yet,
    psycopg's `transaction()` would commit the caller's own transaction.
    """
    return isinstance(emails, list) and len(emails) == 1 and not has_file_parts(emails[0])


def _answers(
    drafts: Sequence[Draft],
    inserted: set[UUID],
    known: Holders,
    *,
    report_conflicts: bool,
) -> Iterator[Enqueued]:
    for item in drafts:
        key = item.email.message_key
        if item.email_id in inserted:
            yield Enqueued(item.email_id, key, Acceptance.ACCEPTED, item.email.warnings)
            continue
        if item.key not in known and item.email.expires_at is not None:
            if not report_conflicts:
                raise InvalidEmail("expires_at", ALREADY_EXPIRED)
            yield Enqueued(item.email_id, key, Acceptance.EXPIRED)
            continue
        holder, payload_hash = known[item.key]
        if payload_hash == item.payload_hash:
            yield Enqueued(holder, key, Acceptance.KNOWN, item.email.warnings)
        elif report_conflicts:
            yield Enqueued(holder, key, Acceptance.CONFLICT)
        else:
            raise MessageKeyConflict(item.email.tenant_id, key, str(holder))


def _tuples(_cursor: object) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A psycopg row factory for tuples, because the caller's connection may have one for other types."""
    return tuple


def _fetch(connection: Connection[Any], name: str, parameters: dict[str, Any], drafts: Rows = ()) -> Rows:
    """The rows; if there is a row for each draft, the drafts, which begin with the same ids, and no row is read."""
    with with_tables(connection), connection.cursor(row_factory=_tuples) as cursor:
        cursor.execute(query(name), parameters)
        return drafts if cursor.rowcount == len(drafts) else cursor.fetchall()


async def _fetch_async(
    connection: AsyncConnection[Any], name: str, parameters: dict[str, Any], drafts: Rows = ()
) -> Rows:
    with with_tables(connection):
        async with connection.cursor(row_factory=_tuples) as cursor:
            await cursor.execute(query(name), parameters)
            return drafts if cursor.rowcount == len(drafts) else await cursor.fetchall()
