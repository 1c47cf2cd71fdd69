"""The SMTP sink records emails and events of the wire correctly, because other tests rely on its records."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import orjson
import pytest

from dispatcher.dev.acceptance_ledger import LedgerEntry, LedgerWriter, read_ledger
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink
from dispatcher.dev.wire import Wire
from dispatcher.domain.outcome import Accepted
from tests.providers.emails import an_email, send
from tests.providers.places import smtp_place
from tests.waiting import until

ID = UUID(int=7)
ENVELOPE = b"EHLO us\r\nMAIL FROM:<a@example.com>\r\nRCPT TO:<%s@example.org>\r\nDATA\r\n"
BODY = f"Message-ID: <{ID}@example.com>\r\n\r\nHello\r\n".encode()
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


async def wire_of(folder: Path, *dialogue: tuple[bytes, bytes | None], behaviour: SmtpBehaviour | None = None) -> Wire:
    """The double's wire record of one connection.

    Args:
        dialogue: Pairs: the octets to send, and the octets to wait for. Empty octets mean: wait until the connection
            ends. None means: do not wait.
    """
    sink = SmtpSink(folder, behaviour, writes_eml=False, records_wire=True)
    await sink.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", sink.port)
    async with asyncio.timeout(20):
        for words, reply_end in dialogue:
            writer.write(words)
            if reply_end is not None:
                await (reader.readuntil(reply_end) if reply_end else reader.read())
        writer.close()
    await until(lambda: not sink.sessions)
    await sink.close()
    return Wire.of([orjson.loads(line) for line in sink.wire_path.read_bytes().splitlines()])


@pytest.mark.parametrize(
    ("content", "behaviour", "exchanges", "fragments", "closed"),
    [
        ((BODY + b".\r\n", b"queued as"), None, [(ID, True, True)], 0, 0),
        ((BODY + b".\r\n", b""), SmtpBehaviour({Step.ANSWER: SmtpFault.CLOSE}), [(ID, False, True)], 0, 1),
        ((BODY, None), None, [], 1, 0),
    ],
    ids=["answered", "closed by the server", "without its final dot"],
)
async def test_the_wire_record_has_what_arrived_and_whether_it_was_answered(
    content: tuple[bytes, bytes | None],
    behaviour: SmtpBehaviour | None,
    exchanges: list[tuple[UUID, bool, bool]],
    fragments: int,
    closed: int,
    tmp_path: Path,
) -> None:
    wire = await wire_of(tmp_path, (ENVELOPE % b"ann", b"354"), content, behaviour=behaviour)

    assert [(each.email_id, each.answered_at is not None, each.was_read) for each in wire.exchanges] == exchanges
    assert (len(wire.fragments), len(wire.closed_at)) == (fragments, closed)
