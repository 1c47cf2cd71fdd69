"""The providers' doubles record accepted emails correctly, because other tests rely on their records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dispatcher.dev.acceptance_ledger import LedgerEntry, LedgerWriter, read_ledger
from dispatcher.domain.outcome import Accepted
from tests.providers.emails import an_email, send
from tests.providers.places import smtp_place

BARE = b"EHLO x\r\nMAIL FROM:<a@b.c>\r\nRCPT TO:<d@e.f>\r\nDATA\r\nSubject: x\r\n\r\nbare\nline\r\n.\r\nQUIT\r\n"


@pytest.mark.parametrize(
    ("entries", "times", "duplicates"),
    [
        ([], {}, {}),
        ([(each, ()) for each in "abaca"], {"a": 3, "b": 1, "c": 1}, {"a": 3}),
        # An email in several transactions is a duplicate only if a recipient repeats.
        ([("a", "xy"), ("a", "z"), ("b", "xy"), ("b", "y")], {"a": 1, "b": 2}, {"b": 2}),
    ],
    ids=["missing", "repeated", "several transactions"],
)
def test_a_ledger_counts_emails_and_duplicates(
    entries: list[tuple[str, str]], times: dict[str, int], duplicates: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    if entries:
        writer = LedgerWriter(path)
        for email_id, addresses in entries:
            writer.append(LedgerEntry(email_id, len(addresses), 100, 0.0, tuple(addresses)))
        writer.close()
        with path.open("ab") as file:
            file.write(b'{"email_id": "incomplete", "recip')

    ledger = read_ledger(path)

    assert (dict(ledger.times), set(ledger.ids), ledger.delivered) == (times, set(times), len(times))
    assert (ledger.duplicates, len(ledger.entries)) == (duplicates, len(entries))


async def test_bare_line_ends_are_refused_and_some_recipients_come_late(tmp_path: Path) -> None:
    """If the sink accepted bare line ends, the adapter's tests could not detect that the adapter sends them."""
    greylisted = an_email(to=("greylisted@example.com",))
    async with smtp_place(tmp_path) as place:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.sink.port)
        writer.write(BARE)
        assert b"550 5.6.0 bare CR or LF" in await reader.read()
        writer.close()
        assert place.sink.ledger().delivered == 0
        assert getattr((await send(place.provider, greylisted)).outcome, "code", None) == "451 4.7.1"
        for email in (greylisted, an_email(to=("slow@example.com",))):
            assert isinstance((await send(place.provider, email)).outcome, Accepted)
