"""The SMTP sink records emails correctly, because other tests rely on its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.acceptance_ledger import LedgerEntry, LedgerWriter, read_ledger
from dispatcher.domain.outcome import Accepted
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.emails import an_email, send
from tests.providers.places import sink_process, smtp_place

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


async def test_a_sink_process_keeps_ledger_and_emails(tmp_path: Path) -> None:
    email = an_email(bcc=("bob@example.com",))
    async with sink_process(tmp_path) as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        sending = await send(provider, email)
        await provider.close()

    assert isinstance(sending.outcome, Accepted)
    (entry,) = read_ledger(tmp_path / "ledger.jsonl").entries
    assert (entry.email_id, entry.recipients) == (str(email.email_id), 2)
    (mail,) = (tmp_path / "mail").iterdir()
    assert mail.name == f"{email.email_id}.1.eml"
    assert len(mail.read_bytes()) == entry.octets


async def test_a_sink_process_can_limit_recipients_answer_by_a_script_and_keep_only_the_ledger(tmp_path: Path) -> None:
    options = ("--no-eml", "--recipients-per-transaction", "2", "--reply", "rset=451 4.3.0 not today")
    async with sink_process(tmp_path, *options) as port:
        to = b"".join(b"RCPT TO:<%d@e.f>\r\n" % number for number in range(3))
        data = b"DATA\r\nMessage-ID: <id@b.c>\r\n\r\n.\r\n"
        said = await talk(port, b"EHLO x\r\nMAIL FROM:<a@b.c>\r\n" + to + data + b"RSET\r\nQUIT\r\n")

    assert (said.count(b"452 4.5.3"), said.count(b"451 4.3.0 not today")) == (1, 1)
    assert read_ledger(tmp_path / "ledger.jsonl").deliveries == {("id", "0@e.f"): 1, ("id", "1@e.f"): 1}
    assert not list((tmp_path / "mail").iterdir())


async def talk(port: int, commands: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(commands)
    said = await reader.read()
    writer.close()
    return said


async def test_bare_line_ends_are_refused_and_some_recipients_come_late(tmp_path: Path) -> None:
    """If the sink accepted bare line ends, the adapter's tests could not detect that the adapter sends them."""
    greylisted = an_email(to=("greylisted@example.com",))
    async with smtp_place(tmp_path) as place:
        assert b"550 5.6.0 bare CR or LF" in await talk(place.sink.port, BARE)
        assert place.sink.ledger().delivered == 0
        assert getattr((await send(place.provider, greylisted)).outcome, "code", None) == "451 4.7.1"
        for email in (greylisted, an_email(to=("slow@example.com",))):
            assert isinstance((await send(place.provider, email)).outcome, Accepted)
