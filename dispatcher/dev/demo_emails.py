"""The demo's emails, generated from a seed, and the application that enqueues them.

The same seed and number always give the same email. All addresses are in reserved domains (RFC 2606). The local SMTP
server refuses recipients whose addresses begin with `refused`. It defers recipients whose addresses begin with
`greylisted` the first time, and accepts them afterwards (see `smtp_sink`).
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from random import Random
from typing import Any, Final

from dispatcher.dev.oracle import Answer
from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment
from dispatcher.producers import enqueue_many
from dispatcher.store.connections import Session


class ExpectedOutcome(StrEnum):
    """How the local SMTP server answers an email."""

    ACCEPTED = "accepted"
    GREYLISTED = "greylisted"
    """Deferred the first time, then accepted."""
    REFUSED = "refused"
    """Rejected: no such recipient."""


@dataclass(frozen=True, slots=True)
class PlannedEmail:
    """An email of the demo. `expected` is how the server answers; if `is_repeated`, the application enqueues it twice,
    as after a crash."""

    email: Email
    expected: ExpectedOutcome
    is_repeated: bool


@dataclass(frozen=True, slots=True)
class Customer:
    """A recipient, with texts in the recipient's language. `local` is the part of the address before the @."""

    name: str
    local: str
    domain: str
    subject: str
    greeting: str

    @property
    def address(self) -> str:
        return f"{self.name} <{self.local}@{self.domain}>"


CUSTOMERS: Final = (
    Customer("Ann Archer", "ann.archer", "example.com", "Your order {order} is on its way", "Hello Ann,"),
    Customer("Bob Baker", "bob", "example.org", "Receipt for order {order}", "Dear Bob,"),
    Customer('"Carter, Carol"', "carol+shop", "example.net", "Please confirm order {order}", "Hi Carol!"),
    Customer("Jörg Weiß", "joerg.weiss", "example.com", "Ihre Bestellung {order} für Sie", "Guten Tag, Herr Weiß,"),
    Customer("Zoë Brontë", "zoe", "bücher.example", "Twee boeken in bestelling {order} 📚", "Dag Zoë,"),
    Customer("Ελένη Παππά", "eleni", "example.org", "Στείλαμε την παραγγελία {order}", "Αγαπητή Ελένη,"),
    Customer("Мария Иванова", "maria", "example.net", "Ваш заказ {order} отправлен", "Здравствуйте, Мария!"),
    Customer("山田 太郎", "yamada", "example.com", "ご注文 {order} を発送しました", "山田様"),
    Customer("ليلى حداد", "layla", "example.org", "طلبك {order} في الطريق", "مرحبا ليلى،"),
    Customer("Đặng Thị Hoa", "hoa.đặng", "example.com", "Đơn hàng {order} của bạn", "Chào chị Hoa,"),
    Customer("Siobhán O'Neill", "siobhan.o'neill", "example.org", "Order {order} 🎉 is packed", "Hi Siobhán,"),
)
SENDERS: Final = ("Example Shop <shop@example.com>", "shop@example.com", "Café Example <hallo@café.example>")
OFFICE: Final = ("accounts@example.com", "Lager Süd <lager@example.com>", "audit@example.net")
ROLLED_BACK_EMAILS: Final = 5
_LARGEST_TRANSACTION: Final = 40
_TRANSACTIONS_AT_MOST: Final = 100
BODIES: Final = ("text", "html", "both")

# A divisor and a remainder for each group: the group has the emails for which `number % divisor == remainder`. The
# divisors are primes, so few emails are in two groups. The remainders are small, so even a small demo has an email in
# each group.
_REFUSED: Final = (67, 3)
_GREYLISTED: Final = (83, 5)
_REPEATED: Final = (31, 1)


def plan_emails(count: int, seed: int, *, first: int = 0) -> Iterator[PlannedEmail]:
    """Yields `count` emails, numbered from `first`."""
    for number in range(first, first + count):
        yield plan_email(number, seed)


def plan_email(number: int, seed: int) -> PlannedEmail:
    """The demo's email with this number. The same number and seed always give the same email."""
    # The random numbers must be reproducible, not secret: the same seed gives the same emails.
    random = Random(f"{seed}:{number}")  # noqa: S311
    expected = _expected_outcome(number)
    return PlannedEmail(Email(**_fields(number, seed, expected, random)), expected, _is_one_of(_REPEATED, number))


def _expected_outcome(number: int) -> ExpectedOutcome:
    if _is_one_of(_REFUSED, number):
        return ExpectedOutcome.REFUSED
    return ExpectedOutcome.GREYLISTED if _is_one_of(_GREYLISTED, number) else ExpectedOutcome.ACCEPTED


def _is_one_of(cycle: tuple[int, int], number: int) -> bool:
    every, remainder = cycle
    return number % every == remainder


def _fields(number: int, seed: int, expected: ExpectedOutcome, random: Random) -> dict[str, Any]:
    order = f"{seed}-{number:06}"
    customer = random.choice(CUSTOMERS)
    subject = customer.subject.format(order=order)
    return {
        "message_key": f"order-{order}-receipt",
        "correlation_id": f"checkout-{order}",
        "sender": random.choice(SENDERS),
        "subject": subject,
        **_recipients(number, customer, expected, random),
        **_bodies(customer, subject, order, random),
        **_extras(order, random),
    }


def _recipients(number: int, customer: Customer, expected: ExpectedOutcome, random: Random) -> dict[str, Any]:
    """Usually one recipient, and always one if the server refuses or defers the email: its answer then applies to the
    whole email."""
    if expected is not ExpectedOutcome.ACCEPTED:
        return {"to": f"{expected}.{number}@example.net"}
    others = [other.address for other in CUSTOMERS if other is not customer]
    lists: dict[str, Any] = {"to": customer.address}
    if _happens(random, 0.12):
        lists["to"] = [customer.address, *random.sample(others, random.randint(1, 4))]
    if _happens(random, 0.12):
        lists["cc"] = random.sample(OFFICE, random.randint(1, 2))
    if _happens(random, 0.08):
        lists["bcc"] = f"archive+{number}@example.net"
    return lists


def _bodies(customer: Customer, subject: str, order: str, random: Random) -> dict[str, str]:
    kind = random.choice(BODIES)
    lines = [f"{count}: article {random.randint(100, 999)}" for count in range(1, random.randint(2, 12))]
    bodies = {}
    if kind != "html":
        # The line with only a dot tests dot-stuffing: without dot-stuffing, this line would end the email in SMTP.
        bodies["text"] = "\n".join([customer.greeting, "", f"{subject}.", "", *lines, ".", "", "Example Shop, ☎ 0100"])
    if kind != "text":
        items = "".join(f"<li>{line}</li>\n" for line in lines)
        opening = f"<!doctype html>\n<title>{order}</title>\n<p>{customer.greeting}</p>\n"
        bodies["html"] = f"{opening}<p>{subject}.</p>\n<ul>\n{items}</ul>\n"
    return bodies


def _extras(order: str, random: Random) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if _happens(random, 0.2):
        extras["reply_to"] = f"Order {order} <reply+{order}@example.com>"
    if _happens(random, 0.2):
        extras["headers"] = {"X-Order": order, "List-Unsubscribe": f"<https://example.com/unsubscribe/{order}>"}
    if _happens(random, 0.3):
        extras["tags"] = ["receipt", random.choice(["spring", "summer"])]
    if _happens(random, 0.15):
        extras["attachments"] = _attachments(order, random)
    return extras


def _attachments(order: str, random: Random) -> list[Attachment]:
    makers = (_table, _picture, _archive)
    return [make(order, random) for make in random.sample(makers, random.choice((1, 1, 2)))]


def _table(order: str, random: Random) -> Attachment:
    rows = [f"{random.randint(100, 999)};{random.random():.2f}\r\n" for _ in range(random.randint(1, 40))]
    return Attachment(f"Rechnung für {order}.csv", "text/csv", f"article;price\r\n{''.join(rows)}".encode())


def _picture(order: str, random: Random) -> Attachment:
    """An attachment: a PNG of one pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + random.randbytes(3))), (b"IEND", b""))
    parts = [struct.pack(">I", len(data)) + kind + data + _checksum(kind + data) for kind, data in chunks]
    return Attachment(f"{order}.png", "image/png", b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def _checksum(part: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(part))


def _archive(order: str, random: Random) -> Attachment:
    """An attachment of random bytes, sometimes larger than a socket's buffer."""
    octets = random.choice((300, 3_000, 120_000)) + random.randint(0, 200)
    return Attachment(f"фото {order}.bin", "application/octet-stream", random.randbytes(octets))


def _happens(random: Random, probability: float) -> bool:
    return random.random() < probability


class _RolledBackError(Exception):
    """Raised in a transaction to roll the transaction back. This module always catches it."""


class Application:
    """Enqueues the demo's emails in its own transactions, as the code of a shop would do.

    Enqueues some emails twice, like an application that crashed during a commit and does not know whether the commit
    succeeded. Also enqueues emails in one transaction that it then rolls back: these must never be sent.
    """

    def __init__(self, connection: Session, emails: int, seed: int) -> None:
        self.answers: list[Answer] = []
        self.expected_outcomes: dict[str, ExpectedOutcome] = {}
        self.repeated = 0
        self.transactions = 0
        self._connection = connection
        self._emails = emails
        self._seed = seed
        self._again: deque[Email] = deque()

    def work(self) -> Iterator[None]:
        """Enqueues all emails; yields after each committed transaction."""
        random = Random(self._seed)  # noqa: S311 - reproducible, not secret
        remaining = plan_emails(self._emails, self._seed)
        largest = max(_LARGEST_TRANSACTION, self._emails // _TRANSACTIONS_AT_MOST)
        while (batch := list(islice(remaining, random.randint(1, largest)))) or self._again:
            again = [self._again.popleft() for _ in range(len(self._again))]
            self._transact(batch, again)
            self._again.extend(item.email for item in batch if item.is_repeated)
            if self.transactions == 1:
                self._roll_back()
            yield

    def _transact(self, batch: Sequence[PlannedEmail], again: Sequence[Email]) -> None:
        """In one transaction, enqueues `batch` for the first time, and `again` a second time. A real application would
        write its own rows in the same transaction."""
        with self._connection.transaction():
            answers = enqueue_many(self._connection, [*[item.email for item in batch], *again])
        self.transactions += 1
        self.repeated += len(again)
        self.expected_outcomes.update((item.email.message_key, item.expected) for item in batch)
        self.answers += [Answer(each.message_key, each.email_id, each.acceptance) for each in answers]

    def _roll_back(self) -> None:
        emails = [item.email for item in plan_emails(ROLLED_BACK_EMAILS, self._seed, first=self._emails)]
        try:
            with self._connection.transaction():
                enqueue_many(self._connection, emails)
                raise _RolledBackError  # noqa: TRY301 - psycopg rolls back a transaction on an exception
        except _RolledBackError:
            return
