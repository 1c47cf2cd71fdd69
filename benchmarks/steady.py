"""Enqueues emails at a steady rate, however fast or slowly they are sent (an open loop).

An application that enqueues an email only after the previous email was sent would hide every delay. This application
does not wait: it enqueues late emails immediately, together with all other emails that are due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from dispatcher import Email, enqueue_many
from dispatcher.store.connections import connected

TEXT = "Thank you for your order. It leaves our house tomorrow.\n" * 8


class Arrivals:
    """Enqueues emails for the duration of a block.

    Attributes:
        ids: The enqueued emails, in order.
        worst_lateness_seconds: The longest time from an email's scheduled arrival to its enqueue. The caller may reset
            it to 0.
        fault: The error that ended the arrivals early; None if there was no error.
    """

    def __init__(self, database_url: str, rate: float, *, burst: int = 1, tags: Sequence[str] = ()) -> None:
        """
        Args:
            rate: Emails per second.
            burst: The number of emails that arrive together, in one statement.
            tags: The tags of every email.
        """
        self.ids: list[UUID] = []
        self.worst_lateness_seconds = 0.0
        self.fault: Exception | None = None
        self._database_url = database_url
        self._rate = rate
        self._burst = burst
        self._tags = tuple(tags)
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Arrivals]:
        """Emails arrive until the block ends."""
        thread = threading.Thread(target=self._run, name="arrivals")
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def stop(self) -> None:
        """Stop the arrivals."""
        self._stop.set()

    def _run(self) -> None:
        try:
            with connected(self._database_url) as connection:
                began_at = time.monotonic()
                while not self._stop.is_set():
                    due = (int((time.monotonic() - began_at) * self._rate / self._burst) + 1) * self._burst
                    if drafts := [self._email(number) for number in range(len(self.ids), due)]:
                        self._note_lateness(began_at + len(self.ids) / self._rate)
                        self.ids += [answer.email_id for answer in enqueue_many(connection, drafts)]
                    self._stop.wait(began_at + due / self._rate - time.monotonic())
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the main thread raises it
            self.fault = error

    def _note_lateness(self, was_due_at: float) -> None:
        self.worst_lateness_seconds = max(self.worst_lateness_seconds, time.monotonic() - was_due_at)

    def _email(self, number: int) -> Email:
        return Email(
            message_key=f"receipt-{number}",
            sender="Shop <shop@example.com>",
            to=f"customer{number}@example.org",
            subject=f"Your receipt {number}",
            text=TEXT,
            tags=self._tags,
        )
