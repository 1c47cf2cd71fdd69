"""What the monitor of a host says, as another program of the host reads it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

import orjson
import pytest

from dispatcher.config.values import Listener
from dispatcher.host.web_server import WebResponse, WebServer
from dispatcher.monitor.asking import ask_unready
from tests.waiting import until


async def told(body: bytes) -> str | None:
    """What is read of a page with this body."""

    async def page() -> WebResponse:
        return WebResponse(body, "application/json", HTTPStatus.SERVICE_UNAVAILABLE)

    server = WebServer(Listener("127.0.0.1", 0), {"/readyz": page})
    running = asyncio.create_task(server.run())
    try:
        await until(lambda: server.address is not None)
        assert server.address is not None
        return await ask_unready(server.address)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize(
    ("body", "unready"),
    [
        ({"checks": {"processes": {"ok": False, "reason": "worker 0 could not boot."}}}, "worker 0 could not boot."),
        ({"checks": {"processes": {"ok": False, "reason": "\x1b]0;owned\x07"}}}, "\ufffd]0;owned\ufffd"),
        ({"checks": {"processes": {"ok": True, "reason": None}}}, None),
        ({"checks": {"processes": {"ok": False, "reason": {"a": 1}}}}, None),
        ({"checks": []}, None),
        ([], None),
    ],
)
async def test_the_reason_is_read_and_another_programs_answer_does_no_harm(body: object, unready: str | None) -> None:
    assert await told(orjson.dumps(body)) == unready


@pytest.mark.parametrize("body", [b"", b"not JSON", b"\xff", b" " * 1_000_000])
async def test_an_answer_of_another_program_is_none(body: bytes) -> None:
    assert await told(body) is None


async def test_without_a_listener_the_answer_is_none() -> None:
    assert await ask_unready(Listener("", 0)) is None
    assert await ask_unready(Listener("127.0.0.1", 1)) is None
