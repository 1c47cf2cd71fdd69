"""A file of emails into the tables: a transaction per batch; bad lines are told and passed over."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import click

from dispatcher.cli.email_lines import FileEntry, Refusal, read_entries
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.table import Table
from dispatcher.config import Settings
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.email import Email
from dispatcher.errors import DispatcherError
from dispatcher.producers import BATCH_EMAILS, Acceptance, Enqueued, enqueue_many
from dispatcher.providers.capabilities import capabilities_of, uncarried
from dispatcher.store.connections import Session, connected, translated

BATCH_OCTETS: Final = 8 * 1024 * 1024
"""Of lines: emails with attachments make smaller batches, so that memory stays bounded."""
REFUSALS_IN_FULL: Final = 24
"""Told one by one; the rest is counted, and complete in the JSON."""

_AGAIN: Final = "What was counted is stored; run it again, and the keys keep emails from being accepted twice."


@dataclass(slots=True)
class Tally:
    """What became of a file's emails.

    Attributes:
        refusals: Every one of them; conflicts come after the rest of their batch.
        conflicts: How many of them because their key names another email.
        fault: What ended the run before the file's end.
    """

    accepted: int = 0
    known: int = 0
    conflicts: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    fault: DispatcherError | None = None

    @property
    def exit(self) -> Exit:
        """What the counts amount to."""
        if self.fault or (self.refusals and not self.accepted + self.known):
            return Exit.FAILED
        return Exit.PARTLY if self.refusals else Exit.DONE

    def refuse(self, refusal: Refusal) -> None:
        """Counts a refusal, and tells the first ones."""
        self.refusals.append(refusal)
        if len(self.refusals) <= REFUSALS_IN_FULL:
            say(str(refusal))

    def note(self, entry: FileEntry, answer: Enqueued) -> None:
        """Counts an answer of the tables."""
        match answer.acceptance:
            case Acceptance.ACCEPTED:
                self.accepted += 1
            case Acceptance.KNOWN:
                self.known += 1
            case Acceptance.CONFLICT:
                self.conflicts += 1
                reason = f"{answer.message_key!r} already names email {answer.email_id} with another payload"
                self.refuse(Refusal(entry.number, "message_key", reason))


def enqueue_file(settings: Settings, file: BinaryIO, *, as_json: bool) -> Exit:
    """Enqueues a file's emails and tells what became of them; a second run finds them known and is harmless.

    Refuses emails that no configured provider could ever carry.

    Raises:
        DispatcherError: nothing could be enqueued, because PostgreSQL is away or has no tables.
    """
    tally, started_at = Tally(), time.monotonic()
    configured = capabilities_of(settings.providers)
    with connected(settings.database_url, name="dispatcher enqueue") as connection, _progress(file) as advance:
        try:
            for batch in _batches(read_entries(file, allowed_headers=settings.allowed_headers), configured, tally):
                _enqueue(connection, batch, tally)
                advance(batch[-1].end)
        except DispatcherError as error:
            tally.fault = error
        except KeyboardInterrupt:
            # At least: a commit may have been under way.
            say(f"Interrupted: at least {tally.accepted:,} accepted, {tally.known:,} already known. {_AGAIN}")
            raise
    tally.seconds = time.monotonic() - started_at
    _tell(tally, as_json=as_json)
    return tally.exit


def _batches(
    entries: Iterable[FileEntry], configured: Mapping[str, Capabilities], tally: Tally
) -> Iterator[list[FileEntry]]:
    """Batches of those entries that are emails which a provider could carry; the others are refused."""
    batch: list[FileEntry] = []
    octets = 0
    for entry in entries:
        if isinstance(entry.content, Refusal):
            tally.refuse(entry.content)
            continue
        if why := uncarried(entry.content, configured):
            tally.refuse(Refusal(entry.number, why.field, str(why)))
            continue
        batch.append(entry)
        octets += entry.octets
        if len(batch) >= BATCH_EMAILS or octets >= BATCH_OCTETS:
            yield batch
            batch, octets = [], 0
    if batch:
        yield batch


def _enqueue(connection: Session, batch: list[FileEntry], tally: Tally) -> None:
    """One transaction."""
    emails = [entry.content for entry in batch if isinstance(entry.content, Email)]
    with translated(), connection.transaction():
        answers = enqueue_many(connection, emails, report_conflicts=True)
    for entry, answer in zip(batch, answers, strict=True):
        tally.note(entry, answer)


@contextmanager
def _progress(file: BinaryIO) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; yields what is told up to which octet the file is done."""
    if not (sys.stderr.isatty() and stat.S_ISREG((status := os.fstat(file.fileno())).st_mode)):
        yield lambda _: None
        return
    with click.progressbar(length=status.st_size, label="enqueueing", file=sys.stderr) as bar:
        yield lambda end: bar.update(end - bar.pos)


def _tell(tally: Tally, *, as_json: bool) -> None:
    """The summary, and what stderr has not been told yet."""
    if (untold := len(tally.refusals) - REFUSALS_IN_FULL) > 0:
        say(f"… and {untold} more" + ("." if as_json else " (--json tells all)."))
    if as_json:
        print_json(_document(tally))
    else:
        table = Table(right=[1])
        table.add("accepted", f"{tally.accepted:,}", "")
        table.add("already known", f"{tally.known:,}", "")
        invalid = f"{len(tally.refusals) - tally.conflicts:,} invalid, {tally.conflicts:,} with a key that is taken"
        table.add("refused", f"{len(tally.refusals):,}", invalid if tally.refusals else "")
        table.show()
    if tally.fault:
        say(f"Stopped before the end: {tally.fault}")
        say(_AGAIN)


def _document(tally: Tally) -> dict[str, Any]:
    return {
        "accepted": tally.accepted,
        "known": tally.known,
        "refused": len(tally.refusals),
        "conflicts": tally.conflicts,
        "seconds": round(tally.seconds, 3),
        "refusals": [
            {"line": refusal.line, "field": refusal.field, "reason": refusal.reason}
            for refusal in sorted(tally.refusals, key=lambda refusal: refusal.line)
        ],
        "fault": str(tally.fault) if tally.fault else None,
    }
