"""The HTTP double writes accepted emails to its ledger before it answers, injects faults, and ends its connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.dev.http_behaviour import Fault
from dispatcher.dev.http_double import HttpDouble, running_double
from tests.waiting import until

SENDGRID = "/v3/mail/send"


def for_sendgrid(email_id: str) -> dict[str, Any]:
    """A request to SendGrid for an email with two recipients."""
    people = {"to": [{"email": "a@example.com"}], "cc": [{"email": "b@example.com"}]}
    return {"personalizations": [{**people, "custom_args": {"email_id": email_id}}]}


async def say(port: int, method: str, path: str, document: object) -> tuple[int, dict[str, str], bytes]:
    """Sends one request; returns status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(document).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(status_line.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[HttpDouble]:
    """A double on this event loop."""
    async with running_double(tmp_path) as running:
        yield running


async def test_each_acceptance_of_an_email_is_in_the_ledger(double: HttpDouble) -> None:
    for _ in range(2):
        status, headers, body = await say(double.port, "POST", SENDGRID, for_sendgrid("one"))

        assert (status, body) == (202, b"")
        assert len(headers["x-message-id"]) == 22

    assert [(entry.email_id, entry.recipients) for entry in double.ledger().entries] == [("one", 2)] * 2
    assert double.ledger().duplicates == double.requests == {"one": 2}


async def test_the_wire_record_has_every_event_of_each_request(tmp_path: Path) -> None:
    double = HttpDouble(tmp_path, records_wire=True)
    await double.start()
    await say(double.port, "POST", SENDGRID, for_sendgrid("id-1"))
    await until(lambda: not double.sessions)
    double.behaviour.fault = Fault.CLOSE

    with pytest.raises(asyncio.IncompleteReadError):
        await say(double.port, "POST", SENDGRID, for_sendgrid("id-2"))

    await until(lambda: not double.sessions)
    await double.close()
    seen = [json.loads(line) for line in double.wire_path.read_text().splitlines()]
    assert [(each["connection"], each["event"], each.get("email_id", each.get("by_us"))) for each in seen] == [
        (1, "began", None), (1, "read", "id-1"), (1, "answered", None), (1, "ended", False),
        (2, "began", None), (2, "read", "id-2"), (2, "ended", True),
    ]  # fmt: skip


async def test_a_forgotten_request_is_not_in_the_ledger_and_gets_no_answer(double: HttpDouble) -> None:
    double.behaviour.fault = Fault.FORGET

    with pytest.raises(asyncio.IncompleteReadError):
        await say(double.port, "POST", SENDGRID, for_sendgrid("id-1"))

    assert double.requests == {"id-1": 1}
    assert not double.ledger().entries
