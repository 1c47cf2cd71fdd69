"""Applies the numbered files of `sql/migrations/`. Migrations only go forward and, once released, are never edited.

The heading of `0001_baseline.sql` says how a migration names tables and functions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Final, TypeVar

from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from dispatcher.domain.values import dataclass
from dispatcher.errors import SchemaError, StoreBusy, StoreTooSlow
from dispatcher.store.connections import AsyncSession, Session, translated
from dispatcher.store.indexes import Index, indexes_of, lasting_indexes, without_indexes
from dispatcher.store.old_transactions import find_oldest_transaction
from dispatcher.store.queries import query, schema
from dispatcher.store.statements import Row, fetch, fetch_sync

WEEKS_AHEAD: Final = 4
"""How many weekly partitions are created in advance. If these weeks have passed and no further partition was created,
new rows go to the default partition."""
TRIES: Final = 20
LOCK_SECONDS: Final = 2.0
"""How long a migration waits for its first lock. Longer than PostgreSQL's deadlock_timeout, after which a session that
waits ends an autovacuum of its table."""
NEXT_LOCK_SECONDS: Final = 0.2
"""How long a migration that has a lock waits for another lock. Much shorter than PostgreSQL's deadlock_timeout."""
PAUSE_SECONDS: Final = 4.0
INIT_POLL_SECONDS: Final = 0.2
_EXCLUSIVE: Final = "access exclusive"
_LOCK_MODES: Final = {
    _EXCLUSIVE: re.compile(r"\b(?:alter|drop) table (\w+)"),
    "share row exclusive": re.compile(r"\bcreate trigger\b[^;]*? on (\w+)"),
}
"""The lock that each kind of statement in a migration needs, the strongest first."""

_BEFORE_BASELINE: Final = {
    (65, "lease_indexes", "ae1626ac4e39d11272c063aec46a396e344a0feac779512a65569d53935a64aa"),
    (1, "baseline", "5f443c0ea190afab8083233a1b91dc480c2ea064e6178faab7a0392ad42b6416"),
    (1, "baseline", "7e4b563cbfe6a5117789e85dfa90d5521d074f5f689d8b175746ab368e37c6cd"),
}
"""The last migrations of commit bb5680df and of earlier texts of the baseline, with their checksums. Their tables are
the baseline's, so `init` only replaces the record of their migrations (docs/decisions/0085-one-baseline.md)."""
T = TypeVar("T")
_FILE_NAME: Final = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of `sql/migrations/`."""

    number: int
    name: str
    text: str
    checksum: str  # SHA-256 of the text, to detect an edited file

    @property
    def subject(self) -> str:
        return f"{self.number:04} {self.name}"


@cache
def all_migrations() -> tuple[Migration, ...]:
    """The migrations of this release, in order."""
    found = []
    for resource in files("dispatcher.sql.migrations").iterdir():
        if match := _FILE_NAME.fullmatch(resource.name):
            text = resource.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), match[2], text, sha256(text.encode()).hexdigest()))
    return tuple(sorted(found, key=lambda migration: migration.number))


def migrate(connection: Session) -> list[str]:
    """As `apply_missing`. Returns all changes."""
    return [*apply_missing(connection)]


def apply_missing(
    connection: Session,
    *,
    tries: int = TRIES,
    report_plan: Callable[[str], object] = str,
    report_start: Callable[[str], object] = str,
    report_wait: Callable[[str], object] = str,
) -> Iterator[str]:
    """Applies the missing migrations and creates future partitions. Yields a description of each change.

    Idempotent; concurrent calls wait for each other. A new database gets all migrations in one transaction. In a
    database that is in use, each migration is a transaction of its own, and waits for the locks of tables only for
    `LOCK_SECONDS`, because every other session that needs the table waits behind it. Between two tries, all sessions
    proceed for `PAUSE_SECONDS`. Indexes are built concurrently (see `indexes_of`).

    Calls `report_plan` for each missing migration before the first change of a database in use, `report_start` before
    each change, and `report_wait` when a change has to wait, with the sessions that block it.

    Raises StoreBusy if a table was locked in every try, or a transaction was open for too long; the message names it.
    Raises SchemaError if the database or the role cannot have this release's tables.
    """
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with _locked_migrations(connection, report_wait):
        is_new = not _has_tables(*fetch_sync(connection, "find_migration_table")[0])
        rows = [] if is_new else fetch_sync(connection, "list_migrations")
        if _is_before_baseline(rows):
            yield _adopt_baseline(connection)
            rows = fetch_sync(connection, "list_migrations")
        applied = _assert_compatible(rows)
        missing = [migration for migration in all_migrations() if migration.number not in applied]
        if is_new:
            report_start("creating the tables")
            changes = []
            with translated(), connection.transaction():
                with _explained("The first step"):
                    if not fetch_sync(connection, "find_schema", {"schema": schema()}):
                        connection.execute(query("create_schema"))
                        changes.append(f"created schema {schema()}")
                    connection.execute(query("create_migration_table"))
                changes += [_apply(connection, migration) for migration in missing]
            yield from changes
            applied, missing = {migration.number for migration in missing}, []
        for migration in missing:
            report_plan(_planned(connection, migration))
        build = partial(_build_indexes, connection, tries, report_start, report_wait)
        done = [migration.text for migration in all_migrations() if migration.number in applied]
        yield from build(lasting_indexes(done).values())
        for migration in missing:
            report_start(f"applying migration {migration.subject}")
            rest = replace(migration, text=without_indexes(migration.text))
            tables, apply = tables_to_lock(rest.text), partial(_apply, connection, rest)
            yield _retried(connection, f"Migration {migration.subject}", tables, apply, tries, report_wait)
            done.append(migration.text)
            yield from build(lasting_indexes(done).values())
        make = partial(fetch_sync, connection, "make_partitions", {"weeks_ahead": WEEKS_AHEAD})
        if made := _retried(connection, "The creation of partitions", {}, make, tries, report_wait):
            yield f"created {len(made)} {'partition' if len(made) == 1 else 'partitions'}"


@contextmanager
def _locked_migrations(connection: Session, report_wait: Callable[[str], object]) -> Iterator[None]:
    """Holds the lock of `init`. Waits for another `init` as long as that takes, because nothing else waits for it.

    The wait is no statement, because an index build waits for each statement, and this one would wait for the build.
    """
    with suppress(pg.UndefinedObject, pg.InvalidParameterValue):  # an old server, or its operating system cannot do it
        connection.execute(query("check_client"))
    is_waiting = False
    while not fetch_sync(connection, "try_lock_migrations")[0][0]:
        if not is_waiting:
            is_waiting = True
            report_wait("waiting for another `dispatcher init`, which is still working")
        time.sleep(INIT_POLL_SECONDS)
    try:
        yield
    finally:
        if connection.info.transaction_status is TransactionStatus.IDLE:
            fetch_sync(connection, "unlock_migrations")


def _apply(connection: Session, migration: Migration) -> str:
    fetch_sync(connection, "enter_schema", {"schema": schema()})
    with _explained(f"Migration {migration.subject}"):
        connection.execute(migration.text.encode())
    _record(connection, migration)
    return f"applied migration {migration.subject}"


def _record(connection: Session, migration: Migration) -> None:
    row = {"number": migration.number, "name": migration.name, "checksum": migration.checksum}
    fetch_sync(connection, "record_migration", row)


def _adopt_baseline(connection: Session) -> str:
    baseline = all_migrations()[0]
    with translated(), connection.transaction(), _explained(f"Migration {baseline.subject}"):
        connection.execute(query("replace_old_record"))
        _record(connection, baseline)
    return f"recorded the tables of an earlier commit as migration {baseline.subject}"


def _planned(connection: Session, migration: Migration) -> str:
    built = indexes_of(migration.text)
    tables = [*tables_to_lock(without_indexes(migration.text)), *(index.table for index in built)]
    rows = fetch_sync(connection, "estimate_rows", {"schema": schema(), "tables": list(dict.fromkeys(tables))})
    changed = ", ".join(f"{table} ({estimate:,})" for table, estimate in rows) or "none"
    later = f"; builds {', '.join(index.name for index in built)} while others read and write" if built else ""
    return f"migration {migration.subject} changes these tables (with about so many rows): {changed}{later}"


def _build_indexes(
    connection: Session,
    tries: int,
    report_start: Callable[[str], object],
    report_wait: Callable[[str], object],
    wanted: Iterable[Index],
) -> Iterator[str]:
    """Builds each index that is missing or invalid. A build waits for open transactions, but no writer waits for it."""
    limit_seconds = tries * (LOCK_SECONDS + PAUSE_SECONDS)
    valid = find_valid_indexes(connection)
    for index in (each for each in wanted if each.name not in valid):
        fetch_sync(connection, "prepare_build", {"schema": schema(), "lock_seconds": limit_seconds})
        if old := find_oldest_transaction.sync(connection, older_seconds=LOCK_SECONDS):
            report_wait(f"The index {index.name} waits up to {limit_seconds:g} s for {old}.")
        for statement, table, rows in fetch_sync(connection, "plan_build", asdict(index)):
            report_start(f"building the index {index.name} on {table} (rows: about {rows:,})")
            try:
                with translated(), _explained(f"The index {index.name}"):
                    connection.execute(statement.encode())
            except StoreBusy as error:
                old = find_oldest_transaction.sync(connection, older_seconds=0.0)
                raise StoreBusy(
                    f"The index {index.name} on {table} is not built, because of "
                    f"{old or 'a transaction that has ended meanwhile'}.",
                    remedy=f"Processes that run continue to work. {old.remedy + '; then repeat' if old else 'Repeat'} "
                    "`dispatcher init`, which builds the index.",
                ) from error
        if index.name not in find_valid_indexes(connection):  # a partitioned table, whose partitions have the index
            create = partial(connection.execute, index.statement.encode())
            _retried(connection, f"The index {index.name}", {index.table: "share"}, create, tries, report_wait)
        yield f"built index {index.name}"


def find_valid_indexes(connection: Session) -> set[str]:
    return {name for (name,) in fetch_sync(connection, "find_valid_indexes", {"schema": schema()})}


def tables_to_lock(text: str) -> dict[str, str]:
    """The tables that a migration changes, with the strongest lock that it needs on each."""
    tables: dict[str, str] = {}
    for mode, pattern in _LOCK_MODES.items():
        for table in pattern.findall(text):
            tables.setdefault(table, mode)
    return tables


def _retried(
    connection: Session,
    subject: str,
    tables: dict[str, str],
    change: Callable[[], T],
    tries: int,
    report_wait: Callable[[str], object],
) -> T:
    """Makes a change in one transaction, which first locks the tables. Tries again if another session has a lock."""
    for number in range(1, tries + 1):
        table, mode, began_at = "", _EXCLUSIVE, time.monotonic()
        try:
            with translated(), connection.transaction():
                fetch_sync(connection, "enter_schema", {"schema": schema()})
                # Only the first table is worth a long wait. While the transaction has a lock and waits for another one,
                # PostgreSQL could find a deadlock, and end the transaction of an application.
                seconds = LOCK_SECONDS
                for table, mode in tables.items():
                    began_at = time.monotonic()
                    _limit_waits(connection, seconds, seconds, table, mode)
                    with _explained(subject):
                        connection.execute(query("lock_table"))
                    seconds = NEXT_LOCK_SECONDS
                table, mode, began_at = "", _EXCLUSIVE, time.monotonic()
                _limit_waits(connection, 0, NEXT_LOCK_SECONDS)
                return change()
        except (StoreBusy, StoreTooSlow) as error:
            if isinstance(error, StoreTooSlow) and not table:  # an operator has cancelled the migration
                raise
            blockers = _describe_blockers(connection, table, mode, age_seconds=time.monotonic() - began_at)
            fault = f"{subject} cannot lock {table or 'a table'}, because of {blockers}."
            if number == tries:
                raise StoreBusy(
                    f"{fault} Gave up after {tries} {'try' if tries == 1 else 'tries'}.",
                    remedy="Processes that run continue to work. Wait until that transaction ends, or end it with "
                    "pg_terminate_backend(pid); then repeat `dispatcher init`.",
                ) from error
            report_wait(f"{fault} Try {number} of {tries}; the next begins in {PAUSE_SECONDS:g} s.")
            if table:  # the next try waits for this table first, and so for as long as it can
                tables = {table: mode} | tables
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("at least one try")


def _limit_waits(
    connection: Session, statement_seconds: float, lock_seconds: float, table: str = "", mode: str = ""
) -> None:
    limits = {"statement_seconds": statement_seconds, "lock_seconds": lock_seconds, "table": table, "mode": mode}
    fetch_sync(connection, "limit_waits", limits)


def _describe_blockers(connection: Session, table: str, mode: str, *, age_seconds: float) -> str:
    """The sessions that have a lock, such as `pid 4711 (user app, application psql, transaction open since …)`."""
    sessions = []
    asked = {"schema": schema(), "table": table, "blocks_readers": mode == _EXCLUSIVE, "age_seconds": age_seconds}
    for pid, user, application, since in fetch_sync(connection, "find_blockers", asked):
        age = f", transaction open since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if since else ""
        session = f"pid {pid} (user {user or 'unknown'}, application {application or 'unknown'}{age})"
        sessions.append(session if pid else "a prepared transaction (see pg_prepared_xacts)")
    return " and ".join(sessions) or "a session whose transaction has ended meanwhile"


@contextmanager
def _explained(step: str) -> Iterator[None]:
    """Translates the block's errors that an operator can mend into a SchemaError with a remedy."""
    try:
        yield
    except (pg.DuplicateTable, pg.DuplicateFunction, pg.DuplicateObject) as error:
        raise SchemaError(
            f'{step} failed in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="The existing object belongs to another application. Set DISPATCHER_DATABASE_SCHEMA to a schema "
            "that no other application uses.",
        ) from error
    except pg.UniqueViolation as error:
        raise SchemaError(
            f'{step} failed in the schema "{schema()}", because two rows have the same key.',
            remedy="Probably, a new C library of the operating system orders texts differently, and the old index did "
            "not find one of the rows. Delete the younger row, then repeat `dispatcher init`.",
        ) from error
    except pg.InsufficientPrivilege as error:
        raise SchemaError(
            f'{step} failed in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="Run `dispatcher init` as the owner of the tables. Before the first `init`, an administrator must "
            f'create the schema for that role: create schema "{schema()}" authorization ROLE; or, if the schema '
            f'exists: grant create on schema "{schema()}" to ROLE.',
        ) from error


def verify_schema(connection: Session) -> list[str]:
    """Returns the other schemas that also have our tables.

    Raises SchemaError unless exactly this release's migrations were applied.
    """
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    (found,) = fetch_sync(connection, "find_migration_table")
    _assert_complete(fetch_sync(connection, "list_migrations") if _has_tables(*found) else [])
    return list(found[1])


async def verify_schema_async(session: AsyncSession) -> None:
    """As `verify_schema`, on an asynchronous session."""
    (found,) = await fetch(session, "find_migration_table")
    _assert_complete(await fetch(session, "list_migrations") if _has_tables(*found) else [])


def _has_tables(has_tables: bool, others: Sequence[str]) -> bool:
    """Returns `has_tables`: whether our schema has the dispatcher's tables. Raises SchemaError if only another schema
    has them: one relay publishes for the whole database, so emails in a second schema would never be published."""
    if others and not has_tables:
        raise SchemaError(
            f'The dispatcher\'s tables are not in the schema "{schema()}" but in the schema "{others[0]}".',
            remedy=f"Set DISPATCHER_DATABASE_SCHEMA={others[0]} here and for the applications that enqueue with the "
            'library, or move the tables (docs/deployment.md, "Schema and roles in PostgreSQL").',
        )
    return has_tables


def _assert_unicode(encoding: str | None) -> None:
    # An email or a provider's answer may contain any character, and only UTF8 can store every character.
    if encoding != "UTF8":
        raise SchemaError(
            f"The database's encoding is {encoding}, which cannot store every character.",
            remedy="Create a database with ENCODING 'UTF8', and set DISPATCHER_DATABASE_URL to it.",
        )


def _assert_complete(rows: Sequence[Row]) -> None:
    applied = set() if _is_before_baseline(rows) else _assert_compatible(rows)
    missing = [m.subject for m in all_migrations() if m.number not in applied]
    if missing:
        raise SchemaError(
            f"The database lacks {len(missing)} "
            f"{'migration' if len(missing) == 1 else 'migrations'} of this release: {', '.join(missing)}.",
            remedy="Run `dispatcher init`.",
        )


def _is_before_baseline(rows: Sequence[Row]) -> bool:
    """Whether `init` can replace this record by the baseline. Raises SchemaError for those of other earlier commits."""
    baseline = all_migrations()[0]
    if rows and tuple(rows[-1]) in _BEFORE_BASELINE:
        return True
    if rows and rows[0][:2] != (baseline.number, baseline.name) and rows[0][0] == baseline.number:
        number, name, _ = rows[-1]
        raise SchemaError(
            f"The last migration of the database is {number:04} {name}, from before the baseline of this release.",
            remedy="Run `dispatcher init` of commit bb5680df first, then `dispatcher init` of this release.",
        )
    return False


def _assert_compatible(rows: Sequence[Row]) -> set[int]:
    """Returns the numbers of the applied migrations, which must be this release's, with the same texts."""
    checksums = {migration.number: migration.checksum for migration in all_migrations()}
    for number, name, checksum in rows:
        if number not in checksums:
            raise SchemaError(
                f"The database has migration {number:04} {name}, which this release does not have.",
                remedy="Run the release that applied the migration, or a later one.",
            )
        if checksums[number] != checksum:
            raise SchemaError(
                f"Migration {number:04} {name} was edited after it was applied.",
                remedy="Restore the released file; make changes in a new migration.",
            )
    return {row[0] for row in rows}
