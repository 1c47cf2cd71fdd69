"""The independent ledger at the provider's end: one line of JSON for each email that a test server accepted.

The server appends the line before it answers, so whatever we were told of is in it, and what an answer that got lost
was about is in it too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import orjson


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One acceptance.

    Attributes:
        email_id: From the Message-ID; empty if it had none of ours.
        recipients: How many the envelope had when the server accepted.
        octets: Size on the wire.
        accepted_at: Seconds since 1970.
    """

    email_id: str
    recipients: int
    octets: int
    accepted_at: float


@dataclass(frozen=True, slots=True)
class AcceptanceLedger:
    """What a server accepted, in its order.

    Attributes:
        times: How often each email id was accepted.
    """

    entries: tuple[LedgerEntry, ...]
    times: Mapping[str, int]

    @property
    def ids(self) -> frozenset[str]:
        """The emails that arrived at all."""
        return frozenset(self.times)

    @property
    def delivered(self) -> int:
        """How many different emails arrived."""
        return len(self.times)

    @property
    def duplicates(self) -> Mapping[str, int]:
        """The emails that arrived more than once, and how often."""
        return MappingProxyType({email_id: times for email_id, times in self.times.items() if times > 1})


def read_ledger(path: Path) -> AcceptanceLedger:
    """The ledger of a server, which may be running; a last line that is not finished yet does not count.

    A missing file is an empty ledger: the server has accepted nothing.
    """
    try:
        *lines, _unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    entries = tuple(LedgerEntry(**orjson.loads(line)) for line in lines)
    return AcceptanceLedger(entries, MappingProxyType(Counter(entry.email_id for entry in entries)))


class LedgerWriter:
    """Appends to a ledger; each line is one write, so that whoever is killed tears none but its last."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, *entries: LedgerEntry) -> None:
        """Write acceptances, all at once; they survive our process, not the machine."""
        os.write(self._file, b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in entries))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
