"""The SMTP double records events of the wire, and its control port changes its behaviour."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import orjson

from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink
from dispatcher.dev.wire import Exchange, Fragment, Wire
from tests.waiting import until

ID = UUID(int=7)
ENVELOPE = b"EHLO us\r\nMAIL FROM:<a@example.com>\r\nRCPT TO:<%s@example.org>\r\nDATA\r\n"
BODY = f"Message-ID: <{ID}@example.com>\r\n\r\nHello\r\n".encode()


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
        for words, awaited in dialogue:
            writer.write(words)
            if awaited is not None:
                await (reader.readuntil(awaited) if awaited else reader.read())
        writer.close()
    await until(lambda: not sink.sessions)
    await sink.close()
    return Wire.of([orjson.loads(line) for line in sink.wire_path.read_bytes().splitlines()])


def bare(exchange: Exchange) -> tuple[UUID, bool, bool]:
    return exchange.email_id, exchange.answered_at is not None, exchange.was_read


async def test_an_accepted_email_is_recorded_as_read_and_answered(tmp_path: Path) -> None:
    wire = await wire_of(tmp_path, (ENVELOPE % b"ann", b"354"), (BODY + b".\r\n", b"queued as"))

    assert [bare(each) for each in wire.exchanges] == [(ID, True, True)]
    assert not wire.fragments
    assert not wire.closed_at


async def test_an_email_whose_connection_the_server_closed_is_recorded_as_read_and_not_answered(tmp_path: Path) -> None:
    behaviour = SmtpBehaviour({Step.ANSWER: SmtpFault.CLOSE})

    wire = await wire_of(tmp_path, (ENVELOPE % b"ann", b"354"), (BODY + b".\r\n", b""), behaviour=behaviour)

    assert [bare(each) for each in wire.exchanges] == [(ID, False, True)]
    assert len(wire.closed_at) == 1


async def test_content_without_its_final_dot_is_a_fragment(tmp_path: Path) -> None:
    wire = await wire_of(tmp_path, (ENVELOPE % b"ann", b"354"), (BODY, None))

    assert not wire.exchanges
    assert [type(each) for each in wire.fragments] == [Fragment]


async def test_a_refused_recipient_is_not_in_the_wire_record(tmp_path: Path) -> None:
    for name, reply in {b"busy-1": b"450 4.2.1", b"limited-1": b"450 4.7.1", b"full-1": b"452 4.2.2"}.items():
        wire = await wire_of(tmp_path / name.decode(), (ENVELOPE % name, reply))

        assert (wire.exchanges, wire.fragments, wire.closed_at) == ([], [], [])


def test_a_change_applies_the_given_number_of_times_and_resets_the_script() -> None:
    behaviour = SmtpBehaviour({Step.MAIL: SmtpFault.CLOSE}, latency_seconds=3.0)

    behaviour.change({"script": {"end": "451 4.3.0 later"}, "times": 2, "latency_ms": 30})

    assert [behaviour.scripted(Step.END) for _ in range(3)] == ["451 4.3.0 later"] * 2 + [None]
    assert behaviour.scripted(Step.MAIL) is None
    assert behaviour.latency_seconds == 0.03
