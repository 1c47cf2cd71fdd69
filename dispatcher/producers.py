"""Enqueue: an email becomes durable and unique in the application's own PostgreSQL transaction.

    with psycopg.connect(...) as connection:
        connection.execute("insert into orders …")
        enqueue(connection, Email(message_key="order-17-receipt", sender="shop@example.com", to="ann@example.org", …))

Both rows commit or neither does. The connection is the caller's: a psycopg connection, Django's `connection`, or a
Connection or Session of SQLAlchemy over psycopg. Nothing here commits, rolls back or closes it, and psycopg's other
errors reach the caller unchanged. A second call with the same message key and payload returns the first email's id.
After the commit the relay publishes.

The `_async` twins take asynchronous connections: psycopg's AsyncConnection, or an AsyncConnection or AsyncSession of
SQLAlchemy. Otherwise they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from dispatcher.domain.email import Email
from dispatcher.errors import MessageKeyConflict
from dispatcher.store.callers import (
    AsyncCallersConnection,
    CallersConnection,
    async_connection_of,
    connection_of,
    with_tables,
)
from dispatcher.store.enqueueing import (
    Draft,
    Key,
    attachment_parameters,
    draft,
    has_attachments,
    holders,
    insert_parameters,
    key_parameters,
)
from dispatcher.store.queries import query

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

BATCH_EMAILS: Final = 500
"""Emails per statement: beyond some hundreds a larger batch gains nothing and holds more memory."""
BATCH_OCTETS: Final = 16 * 1024 * 1024
"""Bodies and attachments per statement, one email at least: half a gigabyte at once makes PostgreSQL hang up."""


class Acceptance(StrEnum):
    """What enqueueing an email came to."""

    ACCEPTED = "accepted"
    """Its key is new: it will be sent."""
    KNOWN = "known"
    """Its key and payload were enqueued before: nothing new."""
    CONFLICT = "conflict"
    """Its key names an email with another payload: nothing was stored."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One email's answer.

    Attributes:
        email_id: The email that holds the key: this one if it was accepted, else the earlier one.
        message_key: The key.
        acceptance: What it came to.
    """

    email_id: UUID
    message_key: str
    acceptance: Acceptance


def enqueue(connection: CallersConnection, email: Email, *, traceparent: str | None = None) -> Enqueued:
    """Enqueues one email in the connection's transaction.

    Args:
        connection: A psycopg connection, Django's `connection`, or a Connection or Session of SQLAlchemy.
        traceparent: W3C trace context, carried to the message and the logs.

    Raises:
        MessageKeyConflict: the key names an email with another payload.
        UnusableConnection: the connection is not psycopg's, is closed, its transaction failed, or its role lacks a
            right.
        SchemaError: the database does not have the dispatcher's tables.
    """
    return enqueue_many(connection, [email], traceparent=traceparent)[0]


def enqueue_many(
    connection: CallersConnection,
    emails: Iterable[Email],
    *,
    traceparent: str | None = None,
    report_conflicts: bool = False,
) -> list[Enqueued]:
    """Enqueues emails in the connection's transaction, some hundreds per statement; answers in the order given.

    On a connection in autocommit (such as Django's outside `atomic()`) the call is a transaction of its own and stores
    all emails or none. They stay if later code fails. With `report_conflicts`, every few hundred emails are a
    transaction of their own, so that a file of any size can be enqueued.

    Args:
        report_conflicts: Answer `conflict` for such an email and store the others, instead of raising.

    Raises:
        MessageKeyConflict: a key names an email with another payload, and conflicts are not reported. Roll the
            transaction back: others of the same call may stand in it.
        UnusableConnection, SchemaError: as `enqueue` does.
    """
    answers: list[Enqueued] = []
    driver = connection_of(connection)
    with ExitStack() as call:
        if driver.autocommit and not (report_conflicts or _is_one_statement(emails)):
            call.enter_context(driver.transaction())
        for drafts in _batches(emails, traceparent):
            with ExitStack() as batch:
                if driver.autocommit and report_conflicts and has_attachments(drafts):
                    batch.enter_context(driver.transaction())
                inserted = {row[0] for row in _fetch(driver, "enqueue", insert_parameters(drafts))}
                if attachments := attachment_parameters(drafts, inserted):
                    _run(driver, "enqueue_attachments", attachments)
            keys = key_parameters(drafts, inserted)
            known = holders(_fetch(driver, "find_by_key", keys)) if keys else {}
            answers.extend(_answers(drafts, inserted, known, report_conflicts=report_conflicts))
    return answers


async def enqueue_async(
    connection: AsyncCallersConnection, email: Email, *, traceparent: str | None = None
) -> Enqueued:
    """`enqueue` on an asynchronous connection."""
    return (await enqueue_many_async(connection, [email], traceparent=traceparent))[0]


async def enqueue_many_async(
    connection: AsyncCallersConnection,
    emails: Iterable[Email],
    *,
    traceparent: str | None = None,
    report_conflicts: bool = False,
) -> list[Enqueued]:
    """`enqueue_many` on an asynchronous connection."""
    answers: list[Enqueued] = []
    driver = await async_connection_of(connection)
    async with AsyncExitStack() as call:
        if driver.autocommit and not (report_conflicts or _is_one_statement(emails)):
            await call.enter_async_context(driver.transaction())
        for drafts in _batches(emails, traceparent):
            async with AsyncExitStack() as batch:
                if driver.autocommit and report_conflicts and has_attachments(drafts):
                    await batch.enter_async_context(driver.transaction())
                inserted = {row[0] for row in await _fetch_async(driver, "enqueue", insert_parameters(drafts))}
                if attachments := attachment_parameters(drafts, inserted):
                    await _run_async(driver, "enqueue_attachments", attachments)
            keys = key_parameters(drafts, inserted)
            known = holders(await _fetch_async(driver, "find_by_key", keys)) if keys else {}
            answers.extend(_answers(drafts, inserted, known, report_conflicts=report_conflicts))
    return answers


def _batches(emails: Iterable[Email], traceparent: str | None) -> Iterator[list[Draft]]:
    batch: list[Email] = []
    octets = 0
    for email in emails:
        size = _octets(email)
        if batch and (len(batch) == BATCH_EMAILS or octets + size > BATCH_OCTETS):
            yield draft(batch, traceparent)
            batch, octets = [], 0
        batch.append(email)
        octets += size
    if batch:
        yield draft(batch, traceparent)


def _octets(email: Email) -> int:
    """About how large its parameters are."""
    return len(email.text or "") + len(email.html or "") + sum(len(file.content) for file in email.attachments)


def _is_one_statement(emails: Iterable[Email]) -> bool:
    """Whether autocommit alone stores these emails whole, or not at all.

    Asked in autocommit alone: elsewhere psycopg's `transaction()` would commit what is the caller's to commit, if the
    caller has executed nothing before.
    """
    return isinstance(emails, list) and len(emails) == 1 and not emails[0].attachments


def _answers(
    drafts: Sequence[Draft],
    inserted: set[UUID],
    known: Mapping[Key, tuple[UUID, bytes]],
    *,
    report_conflicts: bool,
) -> Iterator[Enqueued]:
    for item in drafts:
        key = item.email.message_key
        if item.email_id in inserted:
            yield Enqueued(item.email_id, key, Acceptance.ACCEPTED)
            continue
        holder, payload_hash = known[item.key]
        if payload_hash == item.payload_hash:
            yield Enqueued(holder, key, Acceptance.KNOWN)
        elif report_conflicts:
            yield Enqueued(holder, key, Acceptance.CONFLICT)
        else:
            raise MessageKeyConflict(item.email.tenant_id, key, str(holder))


def _tuples(_cursor: object) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """psycopg's row factory for plain tuples: the caller's connection may make rows of any kind."""
    return tuple


def _fetch(connection: Connection[Any], name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    with with_tables(connection), connection.cursor(row_factory=_tuples) as cursor:
        return cursor.execute(query(name), parameters).fetchall()


def _run(connection: Connection[Any], name: str, parameters: dict[str, Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(query(name), parameters)


async def _fetch_async(
    connection: AsyncConnection[Any], name: str, parameters: dict[str, Any]
) -> list[tuple[Any, ...]]:
    with with_tables(connection):
        async with connection.cursor(row_factory=_tuples) as cursor:
            await cursor.execute(query(name), parameters)
            return await cursor.fetchall()


async def _run_async(connection: AsyncConnection[Any], name: str, parameters: dict[str, Any]) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute(query(name), parameters)
