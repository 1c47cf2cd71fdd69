"""A program that enqueues like an application. It may be killed at any moment, even between a commit and the answer.

The producer enqueues its own emails, and emails with shared keys, which all producers enqueue at the same time. It
writes each key into a file before the call, and the answer after the call. After a restart, it repeats the calls that
have no answer. It ends when every call that was due until `--until` has an answer.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import psycopg

from dispatcher import Attachment, Email, Sms, enqueue_many

SHARED: Final = "shared"
BATCH: Final = 25
LOOK_SECONDS: Final = 0.05
IMPOSTOR_EVERY: Final = 40
"""One in this many shared keys has a different payload in each producer: one producer succeeds, and all other producers
get a conflict."""
ATTACHMENT_EVERY: Final = 25
LARGE_EVERY: Final = 300
"""One in this many emails has an attachment of some MiB."""
LARGE_MIB: Final = (1, 4)
TROUBLED_EVERY: Final = 16
"""One in this many emails goes to a mailbox for which the SMTP double answers 4xx (`dispatcher.dev.smtp_sink`). For
half of these mailboxes, the double answers 4xx only at the first attempt."""
TROUBLES: Final = tuple(
    name for other in ("busy-", "limited-", "unverified-", "full-") for name in ("greylisted-", other)
)

TIMED_EVERY: Final = 20
SCHEDULED: Final = {3: 2.0, 8: 5.0, 12: 3.0}
"""How many seconds after it is enqueued an email is to be sent, by the remainder of its number."""
EXPIRING: Final = {5: 3.0, 12: 6.0, 17: 1.0, 19: 0.05}
"""The same for the expiry. With the shortest, some emails expire before they are enqueued."""


class Notes(NamedTuple):
    """The records in a producer's file: the keys of each call before it, and then its answers, each with the key, the
    email's id and the acceptance."""

    keys: tuple[str, ...]
    answers: tuple[tuple[str, str, str], ...]


def read_notes(path: Path) -> Notes:
    """Read a producer's file. The last line may be incomplete, because the producer may have been killed."""
    with suppress(FileNotFoundError):
        *lines, _unfinished = path.read_bytes().split(b"\n")
        documents = []
        for line in lines:
            with suppress(orjson.JSONDecodeError):  # a kill may have cut off any line
                documents.append(orjson.loads(line))
        keys = tuple(key for document in documents for key in document.get("keys", ()))
        answers = tuple(tuple(answer) for document in documents for answer in document.get("answers", ()))
        return Notes(keys, answers)
    return Notes((), ())


def email_of(key: str, asker: str, due_at: float, channel: str, recipients: int) -> Email | Sms:
    """The email of a key, due at a Unix time. Every producer makes the same email, unless the key is one with different
    payloads."""
    family, _, digits = key.rpartition("-")
    number = int(digits)
    is_impostor = family == SHARED and number % IMPOSTOR_EVERY == 0
    if channel == "sms" or (channel == "both" and number % 2):
        return Sms(
            message_key=key,
            to=f"+4915{zlib.crc32(key.encode()):010}"[:14],
            text=f"Your code is {number}{f', says {asker}' if is_impostor else ''}.",
            correlation_id=key,
            **_times(number, due_at),
        )
    first, *others = recipients_of(key, recipients)
    return Email(
        message_key=key,
        sender="Shop <shop@example.com>",
        to=first,
        cc=others[::2],
        bcc=others[1::2],
        subject=f"Receipt {number}",
        text=f"Thank you for order {number}{f', says {asker}' if is_impostor else ''}.",
        html=f"<p>Thank you for order {number}.</p>" if number % 3 == 0 else None,
        attachments=_attachments(number),
        correlation_id=key,
        **_times(number, due_at),
    )


def recipients_of(key: str, most: int) -> list[str]:
    number = int(key.rpartition("-")[2])
    others = [f"{key}.{place}@example.org" for place in range(number % most)]
    return [f"{_trouble(number)}{key}@example.org", *others]


def _times(number: int, due_at: float) -> dict[str, Any]:
    place = number % TIMED_EVERY
    moments = {"send_at": SCHEDULED.get(place), "expires_at": EXPIRING.get(place)}
    return {name: datetime.fromtimestamp(due_at + s, UTC) for name, s in moments.items() if s is not None}


def _trouble(number: int) -> str:
    turn, place = divmod(number, TROUBLED_EVERY)
    return TROUBLES[turn % len(TROUBLES)] if place == TROUBLED_EVERY - 1 else ""


def _attachments(number: int) -> tuple[Attachment, ...]:
    if number % LARGE_EVERY == LARGE_EVERY - 1:
        chance = random.Random(number)
        octets = chance.randint(*(mib * 1024 * 1024 for mib in LARGE_MIB))
        return (Attachment("photo.jpg", "image/jpeg", chance.randbytes(octets)),)
    if number % ATTACHMENT_EVERY == 0:
        return (Attachment("receipt.txt", "text/plain", b"Thank you. " * 100),)
    return ()


class Producer:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rates = {options.name: options.rate, SHARED: options.shared_rate}
        notes = read_notes(options.file)
        answered = {key for key, _, _ in notes.answers}
        self._open_keys = [key for key in dict.fromkeys(notes.keys) if key not in answered]
        self._counts = Counter(key.rpartition("-")[0] for key in notes.keys)
        self._file = os.open(options.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._connection: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        while self._open_keys or time.time() < self._options.until:
            again = list(self._open_keys)
            new = list(self._due(min(time.time(), self._options.until) - self._options.began_at))
            if new:
                self._note({"keys": new})
                self._open_keys += new
            keys = again + new
            for at in range(0, len(keys), BATCH):
                self._ask(keys[at : at + BATCH])
            time.sleep(LOOK_SECONDS)

    def _due(self, seconds: float) -> Iterator[str]:
        for family, rate in self._rates.items():
            first, self._counts[family] = self._counts[family], max(self._counts[family], int(rate * seconds))
            yield from (f"{family}-{number}" for number in range(first, self._counts[family]))

    def _ask(self, keys: list[str]) -> None:
        try:
            answers = self._enqueue([self._email(key) for key in keys])
        except psycopg.Error as error:
            # The producer does not know whether the commit succeeded, so it repeats the call with the same key.
            print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
            self._hang_up()
            return
        self._note({"answers": answers})
        answered = {key for key, _, _ in answers}
        self._open_keys = [key for key in self._open_keys if key not in answered]

    def _email(self, key: str) -> Email | Sms:
        family, _, number = key.rpartition("-")
        due_at = self._options.began_at + int(number) / self._rates[family]
        return email_of(key, self._options.name, due_at, self._options.channel, self._options.recipients)

    def _enqueue(self, emails: list[Email | Sms]) -> list[tuple[str, str, str]]:
        if self._connection is None:
            url = os.environ["DISPATCHER_DATABASE_URL"]
            self._connection = psycopg.connect(url, connect_timeout=3, application_name="producer")
        with self._connection.transaction():
            answers = enqueue_many(self._connection, emails, report_conflicts=True)
        return [(answer.message_key, str(answer.email_id), answer.acceptance.value) for answer in answers]

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _note(self, document: dict[str, object]) -> None:
        # This is a single write. Its leading line end terminates a line that a kill has cut off.
        os.write(self._file, b"\n" + orjson.dumps(document) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos.producer", description="Enqueues until every call has an answer."
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--began-at", type=float, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--shared-rate", type=float, required=True)
    parser.add_argument("--channel", required=True)
    parser.add_argument("--recipients", type=int, required=True)
    Producer(parser.parse_args()).run()


if __name__ == "__main__":
    main()
