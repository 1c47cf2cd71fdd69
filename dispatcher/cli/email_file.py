"""Enqueues a JSON Lines file of emails: reads it as a stream, uses one transaction per batch, reports invalid lines."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import BinaryIO, Final, NamedTuple

import click
import orjson

from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_json, say
from dispatcher.cli.table import Table
from dispatcher.config import Settings
from dispatcher.domain.json_data import has_duplicate_name
from dispatcher.domain.message import Message
from dispatcher.domain.sms import Sms, message_from_json
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.producers import ALREADY_EXPIRED, BATCH_EMAILS, Acceptance, Enqueued, enqueue_many
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from dispatcher.store.connections import connected, translated

BATCH_OCTETS: Final = 8 * 1024 * 1024
"""A batch ends when its lines have this many bytes, which bounds the memory for emails with attachments."""
MAX_LINE_OCTETS: Final = 128 * 1024 * 1024
"""The most bytes that one line may have. This limit bounds memory. No valid email is longer, even if every character of
its body is escaped."""
REFUSALS_IN_FULL: Final = 24
"""The most refusals that are printed one by one. Further refusals are only counted; the JSON lists all."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_SEPARATORS: Final = {b"\t": "tabs", b";": "semicolons", b",": "commas"}
_AGAIN: Final = "The emails counted above are stored. Run the same command again: it stores no email twice."


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a line's email was not accepted. `field` is `line` if the line as a whole is invalid."""

    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        names_itself = self.field == "line" or self.reason.startswith(f"{self.field} ")
        return f"line {self.line}: {'' if names_itself else f'{self.field}: '}{self.reason}"


class FileEntry(NamedTuple):
    """A line of the file that is not blank: its number from 1, the position of its end, its length, its email."""

    number: int
    end: int
    octets: int
    content: Message | Refusal


def read_entries(file: BinaryIO, *, allowed_headers: Collection[str] = ()) -> Iterator[FileEntry]:
    """Yields one entry per line of the file, except for blank lines."""
    end = number = 0
    while text := file.readline(MAX_LINE_OCTETS):
        number += 1
        end += len(text)
        if len(text) == MAX_LINE_OCTETS and not text.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_OCTETS)) and not rest.endswith(b"\n"):
                end += len(rest)
            end += len(rest)
            yield FileEntry(number, end, 0, Refusal(number, "line", f"has more than {MAX_LINE_OCTETS} bytes"))
            continue
        bare = text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text
        if bare and not bare.isspace():
            yield FileEntry(number, end, len(text), _email(number, bare, allowed_headers))


def _email(number: int, text: bytes, allowed_headers: Collection[str]) -> Message | Refusal:
    try:
        value = orjson.loads(text)
        if has_duplicate_name(text, value):
            return Refusal(number, "line", "has the same name twice in one JSON object")
        return message_from_json(value, allowed_headers=allowed_headers)
    except orjson.JSONDecodeError as error:
        return Refusal(number, "line", _why_not_json(text) or f"is not JSON ({error.msg}, character {error.pos + 1})")
    except InvalidEmail as error:
        return Refusal(number, error.field, error.reason)


def _why_not_json(text: bytes) -> str | None:
    """What kind of file the line probably comes from, and what to do; None without a sign."""
    if b"\0" in text or text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16, not UTF-8; save the file as UTF-8"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "is not UTF-8; save the file as UTF-8"
    if not text.lstrip().startswith((b"{", b"[")):
        found = next((name for mark, name in _SEPARATORS.items() if mark in text), None)
        return found and f"looks like a table separated by {found}; each line must be a JSON object"
    if text.rstrip().endswith((b",", b"[", b"{")):
        return "is only a part of a JSON document; write each email as one line, without a comma at its end"
    return None


@dataclass(slots=True)
class Tally:
    """Counts the emails of a file by their results. `fault` is what stopped the run before the end of the file."""

    accepted: int = 0
    known: int = 0
    conflicts: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    printed: int = 0
    seconds: float = 0.0
    fault: DispatcherError | None = None

    @property
    def exit(self) -> Exit:
        """The command's exit code."""
        if self.fault or (self.refusals and not self.accepted + self.known):
            return Exit.FAILED
        return Exit.PARTLY if self.refusals else Exit.DONE

    def count(self, entry: FileEntry, answer: Enqueued) -> None:
        self.accepted += answer.acceptance is Acceptance.ACCEPTED
        self.known += answer.acceptance is Acceptance.KNOWN
        if answer.acceptance is Acceptance.CONFLICT:
            self.conflicts += 1
            reason = f"{answer.message_key!r} belongs to email {answer.email_id}, which has different content"
            self.refuse(Refusal(entry.number, "message_key", reason))
        if answer.acceptance is Acceptance.EXPIRED:
            self.refuse(Refusal(entry.number, "expires_at", ALREADY_EXPIRED))

    def refuse(self, refusal: Refusal) -> None:
        """Prints the first `REFUSALS_IN_FULL`, but the same fault of adjacent lines only once."""
        last = self.refusals[-1] if self.refusals else None
        is_repeated = refusal.field == "line" and last == replace(refusal, line=refusal.line - 1)
        self.refusals.append(refusal)
        if not is_repeated and self.printed < REFUSALS_IN_FULL:
            self.printed += 1
            say(str(refusal))


def enqueue_file(settings: Settings, file: BinaryIO, *, as_json: bool) -> Exit:
    """Enqueues the emails of a file and prints the result. Idempotent: in a second run, all emails are known."""
    tally, started_at = Tally(), time.monotonic()
    with connected(settings.database_url, name="dispatcher enqueue") as connection, _progress(file) as advance:
        try:
            for batch in _batches(settings, file, tally):
                with translated(), connection.transaction():
                    answers = enqueue_many(connection, [email for _, email in batch], report_conflicts=True)
                for (entry, _), answer in zip(batch, answers, strict=True):
                    tally.count(entry, answer)
                advance(batch[-1][0].end)
        except DispatcherError as error:
            tally.fault = error
        except KeyboardInterrupt:
            # The text says "at least", because PostgreSQL may have committed the interrupted batch.
            say(f"Interrupted: at least {tally.accepted:,} accepted, {tally.known:,} already known. {_AGAIN}")
            raise
    tally.seconds = time.monotonic() - started_at
    _report(tally, as_json=as_json)
    return tally.exit


def _batches(settings: Settings, file: BinaryIO, tally: Tally) -> Iterator[list[tuple[FileEntry, Message]]]:
    """Yields batches of valid emails; refuses invalid lines, and emails that no configured provider can send."""
    configured, sms = capabilities_of(settings.providers), settings.sms_rules
    batch: list[tuple[FileEntry, Message]] = []
    octets = 0
    for entry in read_entries(file, allowed_headers=settings.allowed_provider_headers):
        if isinstance(entry.content, Refusal):
            tally.refuse(entry.content)
        elif isinstance(entry.content, Sms) and (fault := sms.fault(entry.content.to[0], entry.content.text)):
            tally.refuse(Refusal(entry.number, fault.field, fault.reason))
        elif why := capability_gap(entry.content, configured, settings.account_rules):
            tally.refuse(Refusal(entry.number, why.field, str(why)))
        else:
            batch.append((entry, entry.content))
            octets += entry.octets
        if len(batch) >= BATCH_EMAILS or octets >= BATCH_OCTETS:
            yield batch
            batch, octets = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(file: BinaryIO) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal. Yields the function to call with the number of bytes done so far."""
    if not (sys.stderr.isatty() and stat.S_ISREG((status := os.fstat(file.fileno())).st_mode)):
        yield lambda _: None
        return
    with click.progressbar(length=status.st_size, label="enqueueing", file=sys.stderr) as bar:
        yield lambda end: bar.update(end - bar.pos)


def _report(tally: Tally, *, as_json: bool) -> None:
    refused = len(tally.refusals)
    if unreported := refused - tally.printed:
        say(f"… and {unreported} more" + ("." if as_json else " (--json lists all)."))
    if as_json:
        document = {
            "accepted": tally.accepted,
            "known": tally.known,
            "refused": refused,
            "conflicts": tally.conflicts,
            "seconds": round(tally.seconds, 3),
            "refusals": [asdict(refusal) for refusal in sorted(tally.refusals, key=lambda each: each.line)],
            "fault": str(tally.fault) if tally.fault else None,
        }
        print_json(document)
    else:
        table = Table(right=[1])
        table.add("accepted", f"{tally.accepted:,}", "")
        table.add("already known", f"{tally.known:,}", "")
        invalid = f"{refused - tally.conflicts:,} invalid, {tally.conflicts:,} with the key of another email"
        table.add("refused", f"{refused:,}", invalid if refused else "")
        table.show()
    if tally.fault:
        say(f"Stopped before the end of the file: {tally.fault}")
        say(_AGAIN)
