"""A test server's acceptance ledger: a file with one line of JSON for each email that the server accepted.

The server appends the line before it answers. So the ledger contains every acceptance, even if the answer was lost.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import orjson


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One email that the server accepted. `octets` is its size, or its part of the size of an HTTP request; `email_id`
    is empty if the server found none; `addresses` are empty if the server records only the number of recipients."""

    email_id: str
    recipients: int
    octets: int
    accepted_at: float
    addresses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AcceptanceLedger:
    """The acceptances of one server, in order.

    `deliveries` counts by email id and address, which is empty if the server records no addresses. `times` counts by
    email id: an email that is delivered in several transactions counts once, unless a recipient is in two of them.
    """

    entries: tuple[LedgerEntry, ...]
    deliveries: Mapping[tuple[str, str], int]
    times: Mapping[str, int]

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self.times)

    @property
    def delivered(self) -> int:
        return len(self.times)

    @property
    def duplicates(self) -> Mapping[str, int]:
        """The emails that were accepted more than once, and how often."""
        return MappingProxyType({email_id: times for email_id, times in self.times.items() if times > 1})


def read_ledger(path: Path) -> AcceptanceLedger:
    """Reads the ledger of a server, which may be running. Without a file, the server has accepted nothing. Ignores an
    incomplete last line."""
    try:
        *lines, _unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    entries = tuple(LedgerEntry(**orjson.loads(line)) for line in lines)
    deliveries = Counter((entry.email_id, address) for entry in entries for address in entry.addresses or ("",))
    times: Counter[str] = Counter()
    for (email_id, _), count in deliveries.items():
        times[email_id] = max(times[email_id], count)
    return AcceptanceLedger(entries, MappingProxyType(deliveries), MappingProxyType(times))


class LedgerWriter:
    """Appends accepted emails to a ledger. If the process is killed, at most the last line is incomplete."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, *entries: LedgerEntry) -> None:
        """Appends one line per entry, all with one write. They survive a crash of this process, but not of the machine:
        there is no fsync."""
        os.write(self._file, b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in entries))

    def close(self) -> None:
        os.close(self._file)
