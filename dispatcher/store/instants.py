"""Loads rows whose instants Python cannot represent.

PostgreSQL has the instants `-infinity` and `infinity`, and the years 4713 BC to 294276. Python has the years 1 to 9999.
psycopg raises an error for any other instant, so one such row would make all rows of a statement unreadable.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import Format

from dispatcher.domain.values import dataclass

# One day is left at each end, so that no conversion to another time zone fails.
EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)
"""Stands for `-infinity`: `store.arrays` writes it as `-infinity`."""
LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)
"""Stands for `infinity`: `store.arrays` writes it as `infinity`."""
AHEAD_SECONDS: Final = 300.0
"""If a time in a row is more than this ahead of PostgreSQL's clock, the clock was set back after the write."""
_TYPE: Final = "timestamptz"
_TYPE_OID: Final = psycopg.adapters.types[_TYPE].oid


class _NearestInstantLoader(Loader):
    """Loads an instant that Python cannot represent as EARLIEST or LATEST, whichever is nearer."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        exact = psycopg.adapters.get_loader(_TYPE_OID, Format.TEXT)
        assert exact is not None
        self._load = exact(oid, context).load

    def load(self, data: Buffer) -> Any:
        try:
            return self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


@dataclass(frozen=True, slots=True)
class _Context:
    adapters: AdaptersMap
    connection: Any


def load_nearest(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> list[tuple[Any, ...]]:
    """All rows of a cursor's result, with EARLIEST and LATEST for the instants that Python cannot represent. Call this
    after the cursor has failed to load the rows: it takes several times as long."""
    adapters = AdaptersMap(cursor.adapters)
    adapters.register_loader(_TYPE, _NearestInstantLoader)
    transformer = Transformer(_Context(adapters, cursor.connection))
    assert cursor.pgresult is not None
    transformer.set_pgresult(cursor.pgresult)
    return transformer.load_rows(0, cursor.pgresult.ntuples, tuple)
