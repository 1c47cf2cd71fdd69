"""The providers' doubles record accepted emails and the events of the wire correctly, because other tests rely on their
records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import UUID

import orjson
import pytest

from dispatcher.dev.acceptance_ledger import LedgerEntry, LedgerWriter, read_ledger
from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.dev.http_double import HttpDouble, running_double
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink
from dispatcher.dev.wire import Wire
from dispatcher.domain.outcome import Accepted
from tests.providers.emails import an_email, send
from tests.providers.places import smtp_place
from tests.waiting import until


async def post(port: int, email_id: str) -> None:
    people = {"to": [{"email": "a@example.com"}], "custom_args": {"email_id": email_id}}
    body = json.dumps({"personalizations": [people]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /v3/mail/send HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def test_the_wire_record_has_every_event_of_each_request(tmp_path: Path) -> None:
    double = HttpDouble(tmp_path, records_wire=True)
    await double.start()
    await post(double.port, "id-1")
    await until(lambda: not double.sessions)
    double.behaviour.fault = Fault.CLOSE

    with pytest.raises(asyncio.IncompleteReadError):
        await post(double.port, "id-2")

    await until(lambda: not double.sessions)
    await double.close()
    seen = [json.loads(line) for line in double.wire_path.read_text().splitlines()]
    assert [(each["connection"], each["event"], each.get("email_id", each.get("by_us"))) for each in seen] == [
        (1, "began", None), (1, "read", "id-1"), (1, "answered", None), (1, "ended", False),
        (2, "began", None), (2, "read", "id-2"), (2, "ended", True),
    ]  # fmt: skip


async def test_a_forgotten_request_is_not_in_the_ledger_and_gets_no_answer(tmp_path: Path) -> None:
    async with running_double(tmp_path, Behaviour(Fault.FORGET)) as double:
        with pytest.raises(asyncio.IncompleteReadError):
            await post(double.port, "id-1")

        assert double.requests == {"id-1": 1}
        assert not double.ledger().entries


ID = UUID(int=7)
ENVELOPE = b"EHLO us\r\nMAIL FROM:<a@example.com>\r\nRCPT TO:<ann@example.org>\r\nDATA\r\n"
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


@pytest.mark.parametrize(
    ("content", "reply_end", "behaviour", "exchanges", "fragments", "closed"),
    [
        (BODY + b".\r\n", b"queued as", None, [(ID, True, True)], 0, 0),
        (BODY + b".\r\n", b"", SmtpBehaviour({Step.ANSWER: SmtpFault.CLOSE}), [(ID, False, True)], 0, 1),
        (BODY, None, None, [], 1, 0),
    ],
    ids=["answered", "closed by the server", "without its final dot"],
)
async def test_the_wire_record_has_what_arrived_and_whether_it_was_answered(
    content: bytes,
    reply_end: bytes | None,
    behaviour: SmtpBehaviour | None,
    exchanges: list[tuple[UUID, bool, bool]],
    fragments: int,
    closed: int,
    tmp_path: Path,
) -> None:
    """Empty octets as the end of the reply mean: the connection ends. None means: there is no reply."""
    sink = SmtpSink(tmp_path, behaviour, writes_eml=False, records_wire=True)
    await sink.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", sink.port)
    async with asyncio.timeout(20):
        writer.write(ENVELOPE)
        await reader.readuntil(b"354")
        writer.write(content)
        if reply_end is not None:
            await (reader.readuntil(reply_end) if reply_end else reader.read())
        writer.close()
    await until(lambda: not sink.sessions)
    await sink.close()

    wire = Wire.of([orjson.loads(line) for line in sink.wire_path.read_bytes().splitlines()])

    assert [(each.email_id, each.answered_at is not None, each.was_read) for each in wire.exchanges] == exchanges
    assert (len(wire.fragments), len(wire.closed_at)) == (fragments, closed)
