"""The SMTP sink records emails correctly, because other tests rely on its ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dispatcher.config.values import SmtpServer
from dispatcher.dev.acceptance_ledger import LedgerEntry, LedgerWriter, read_ledger
from dispatcher.domain.outcome import Accepted
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.emails import an_email, send
from tests.providers.places import sink_process, smtp_place


def test_a_missing_ledger_is_empty(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger.jsonl").delivered == 0


def test_a_ledger_counts_emails_and_duplicates(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl")
    for email_id in ("a", "b", "a", "c", "a"):
        writer.append(LedgerEntry(email_id, 1, 100, 0.0))
    writer.close()

    ledger = read_ledger(tmp_path / "ledger.jsonl")

    assert ledger.delivered == 3
    assert ledger.ids == {"a", "b", "c"}
    assert ledger.duplicates == {"a": 3}
    assert len(ledger.entries) == 5


def test_an_email_in_several_transactions_is_a_duplicate_only_if_a_recipient_repeats(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl")
    for email_id, addresses in (("a", ("x", "y")), ("a", ("z",)), ("b", ("x", "y")), ("b", ("y",))):
        writer.append(LedgerEntry(email_id, len(addresses), 100, 0.0, addresses))
    writer.close()

    ledger = read_ledger(tmp_path / "ledger.jsonl")

    assert ledger.times == {"a": 1, "b": 2}
    assert ledger.deliveries == {("a", "x"): 1, ("a", "y"): 1, ("a", "z"): 1, ("b", "x"): 1, ("b", "y"): 2}


def test_an_incomplete_last_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    writer = LedgerWriter(path)
    writer.append(LedgerEntry("a", 1, 100, 0.0))
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"email_id": "b", "recip')

    assert read_ledger(path).ids == {"a"}


async def test_a_sink_process_keeps_ledger_and_emails(tmp_path: Path) -> None:
    email = an_email(bcc=("bob@example.com",))
    async with sink_process(tmp_path) as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        sending = await send(provider, email)
        await provider.close()

    assert isinstance(sending.outcome, Accepted)
    (entry,) = read_ledger(tmp_path / "ledger.jsonl").entries
    assert entry.email_id == str(email.email_id)
    assert entry.recipients == 2
    (mail,) = (tmp_path / "mail").iterdir()
    assert mail.name == f"{email.email_id}.1.eml"
    assert len(mail.read_bytes()) == entry.octets


async def test_a_sink_can_keep_only_the_ledger(tmp_path: Path) -> None:
    async with sink_process(tmp_path, "--no-eml") as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        await send(provider, an_email())
        await provider.close()

    assert read_ledger(tmp_path / "ledger.jsonl").delivered == 1
    assert not list((tmp_path / "mail").iterdir())


async def test_a_sinks_replies_can_be_scripted(tmp_path: Path) -> None:
    async with sink_process(tmp_path, "--reply", "mail=451 4.3.0 not today") as port:
        provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))
        sending = await send(provider, an_email())
        await provider.close()

    assert getattr(sending.outcome, "code", None) == "451 4.3.0"


async def test_a_sink_can_limit_the_recipients_of_a_transaction(tmp_path: Path) -> None:
    async with sink_process(tmp_path, "--recipients-per-transaction", "2") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"EHLO x\r\nMAIL FROM:<a@b.c>\r\n" + b"".join(b"RCPT TO:<%d@e.f>\r\n" % n for n in range(3)))
        writer.write(b"DATA\r\nMessage-ID: <id@b.c>\r\n\r\n.\r\nQUIT\r\n")
        said = await reader.read()
        writer.close()

    assert said.count(b"452 4.5.3") == 1
    assert read_ledger(tmp_path / "ledger.jsonl").deliveries == {("id", "0@e.f"): 1, ("id", "1@e.f"): 1}


async def test_bare_line_ends_are_refused(tmp_path: Path) -> None:
    """If the sink accepted bare line ends, the adapter's tests could not detect that the adapter sends them."""
    async with smtp_place(tmp_path) as place:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.sink.port)
        writer.write(
            b"EHLO x\r\nMAIL FROM:<a@b.c>\r\nRCPT TO:<d@e.f>\r\nDATA\r\nSubject: x\r\n\r\nbare\nline\r\n.\r\nQUIT\r\n"
        )
        said = await reader.read()
        writer.close()

        assert b"550 5.6.0 bare CR or LF" in said
        assert place.sink.ledger().delivered == 0


async def test_greylisted_recipients_are_accepted_the_second_time(tmp_path: Path) -> None:
    email = an_email(to=("greylisted@example.com",))
    async with smtp_place(tmp_path) as place:
        first = await send(place.provider, email)
        second = await send(place.provider, email)

    assert getattr(first.outcome, "code", None) == "451 4.7.1"
    assert isinstance(second.outcome, Accepted)


async def test_slow_recipients_are_accepted_late(tmp_path: Path) -> None:
    async with smtp_place(tmp_path) as place:
        sending = await send(place.provider, an_email(to=("slow@example.com",)))

    assert isinstance(sending.outcome, Accepted)
