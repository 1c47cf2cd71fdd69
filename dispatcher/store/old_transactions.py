"""Finds the oldest transaction that keeps PostgreSQL from removing old row versions.

While it is open, searches for due emails and for leases read more and more dead index entries, and a concurrent index
build does not end.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from dispatcher.domain.values import dataclass
from dispatcher.store.statements import Source, statement

OLD_SECONDS: Final = 300.0
_REMEDIES: Final = {
    "session": "End its transaction, or run: select pg_terminate_backend({name})",
    "prepared transaction": "Run: rollback prepared '{name}' (or: commit prepared)",
    "replication slot": "Start its standby, or run: select pg_drop_replication_slot('{name}')",
    "standby": "End the long query on the standby, or set hot_standby_feedback to off there.",
}


@dataclass(frozen=True, slots=True)
class OldTransaction:
    """What keeps old row versions; see `find_oldest_transaction` in sql/queries/doctor.sql.

    Attributes:
        name: The pid, or the name of the prepared transaction, the slot or the standby.
        transactions: How many transactions have begun since.
    """

    kind: str
    name: str
    user: str | None
    application: str | None
    since: datetime | None
    transactions: int

    def __str__(self) -> str:
        facts = [f"{name} {value}" for name in ("user", "application") if (value := getattr(self, name))]
        facts += [f"open since {self.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"] if self.since else []
        return f"the {self.kind} {self.name} ({', '.join([*facts, f'{self.transactions:,} transactions since'])})"

    @property
    def remedy(self) -> str:
        """What an operator can do. Doubles quotes, because any role may choose the name of a prepared transaction."""
        return _REMEDIES[self.kind].format(name=self.name.replace("'", "''"))


@statement
async def find_oldest_transaction(source: Source, *, older_seconds: float = OLD_SECONDS) -> OldTransaction | None: ...
