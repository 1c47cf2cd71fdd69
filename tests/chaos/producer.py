"""A program that enqueues, as applications do; it may be killed at any instant, also between commit and being told.

    python -m tests.chaos.producer --name NAME --file FILE --began-at T --rate R --shared-rate R --until T

It enqueues emails of its own, and with every other producer at the same time those of the shared keys. In FILE it says
by which keys it asks, before it asks, and what it was told; after a restart it asks again for what it was not told. It
ends when it was told everything that came up until `--until`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg

from dispatcher import Attachment, Email, enqueue_many

SHARED: Final = "shared"
"""The family of keys by which all producers ask."""
BATCH: Final = 25
LOOK_SECONDS: Final = 0.05
IMPOSTOR_EVERY: Final = 40
"""Of the shared keys, so many have another payload with each producer: one of them gets it, the others a conflict."""
ATTACHMENT_EVERY: Final = 25
LARGE_EVERY: Final = 300
"""So many emails have an attachment of some MiB."""
LARGE_MIB: Final = (1, 4)
TROUBLED_EVERY: Final = 16
"""So many emails go to a mailbox that the SMTP double answers with a 4xx (`dispatcher.dev.smtp_sink`): each second one
of them only at first."""
TROUBLES: Final = (
    "greylisted-",
    "busy-",
    "greylisted-",
    "limited-",
    "greylisted-",
    "unverified-",
    "greylisted-",
    "full-",
)


@dataclass(frozen=True, slots=True)
class Notes:
    """What a producer has written down: a line before it asks, a line after it was told.

    Attributes:
        asked: Keys, in their order.
        told: What it was told: key, email id, acceptance.
    """

    asked: tuple[str, ...]
    told: tuple[tuple[str, str, str], ...]

    @property
    def open_keys(self) -> list[str]:
        """Those that it has asked by and was told nothing of."""
        told = {key for key, _, _ in self.told}
        return [key for key in dict.fromkeys(self.asked) if key not in told]


def read_notes(path: Path) -> Notes:
    """The notes of a producer, which may have been killed at its last line."""
    with suppress(FileNotFoundError):
        *lines, _unfinished = path.read_bytes().split(b"\n")
        documents = [document for line in lines if (document := _document(line))]
        asked = tuple(key for document in documents for key in document.get("asked", ()))
        told = tuple(tuple(answer) for document in documents for answer in document.get("told", ()))
        return Notes(asked, told)
    return Notes((), ())


def _document(line: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return document


def email_of(key: str, asker: str) -> Email:
    """The email of a key: the same for all who ask, except for an impostor's."""
    family, _, digits = key.rpartition("-")
    number = int(digits)
    is_impostor = family == SHARED and number % IMPOSTOR_EVERY == 0
    return Email(
        message_key=key,
        sender="Shop <shop@example.com>",
        to=f"{_trouble(number)}{key}@example.org",
        subject=f"Receipt {number}",
        text=f"Thank you for order {number}{f', says {asker}' if is_impostor else ''}.",
        html=f"<p>Thank you for order {number}.</p>" if number % 3 == 0 else None,
        attachments=_attachments(number),
        correlation_id=key,
    )


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
    """Asks until it is told."""

    def __init__(self, name: str, file: Path, database_url: str) -> None:
        notes = read_notes(file)
        self._name = name
        self._database_url = database_url
        self._open_keys = notes.open_keys
        self._counts = Counter(key.rpartition("-")[0] for key in notes.asked)
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._connection: psycopg.Connection[Any] | None = None

    def run(self, rates: Mapping[str, float], began_at: float, until: float) -> None:
        """Enqueues until it was told of everything.

        Args:
            rates: Emails per second, by the family of their keys.
        """
        while self._open_keys or time.time() < until:
            again = list(self._open_keys)
            new = list(self._due(rates, min(time.time(), until) - began_at))
            if new:
                self._note({"asked": new})
                self._open_keys += new
            for batch in _batches(again + new):
                self._ask(batch)
            time.sleep(LOOK_SECONDS)

    def _due(self, rates: Mapping[str, float], seconds: float) -> Iterator[str]:
        for family, rate in rates.items():
            first, self._counts[family] = self._counts[family], max(self._counts[family], int(rate * seconds))
            yield from (f"{family}-{number}" for number in range(first, self._counts[family]))

    def _ask(self, keys: list[str]) -> None:
        try:
            answers = self._enqueue([email_of(key, self._name) for key in keys])
        except psycopg.Error as error:
            # Committed or not: nobody knows, and asking again by the same key settles it.
            print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
            self._hang_up()
            return
        self._note({"told": answers})
        told = {key for key, _, _ in answers}
        self._open_keys = [key for key in self._open_keys if key not in told]

    def _enqueue(self, emails: list[Email]) -> list[tuple[str, str, str]]:
        if self._connection is None:
            self._connection = psycopg.connect(self._database_url, connect_timeout=3, application_name="producer")
        with self._connection.transaction():
            answers = enqueue_many(self._connection, emails, report_conflicts=True)
        return [(answer.message_key, str(answer.email_id), answer.acceptance.value) for answer in answers]

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _note(self, document: dict[str, object]) -> None:
        # One write; the line end before it ends a line that a kill has torn.
        os.write(self._file, b"\n" + orjson.dumps(document) + b"\n")


def _batches(keys: list[str]) -> list[list[str]]:
    return [keys[at : at + BATCH] for at in range(0, len(keys), BATCH)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.chaos.producer", description="Enqueues until it is told.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--began-at", type=float, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--shared-rate", type=float, required=True)
    options = parser.parse_args(arguments)
    producer = Producer(options.name, options.file, os.environ["DISPATCHER_DATABASE_URL"])
    producer.run({options.name: options.rate, SHARED: options.shared_rate}, options.began_at, options.until)


if __name__ == "__main__":
    main()
