"""Tests the client with which other programs on the host read the monitor's /readyz."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

import orjson
import pytest

from dispatcher.cli.status import fetch_unready
from dispatcher.config.values import Listener
from dispatcher.host.web_server import WebResponse, WebServer
from tests.waiting import until


async def unready_of(body: bytes) -> str | None:
    """The client's result if /readyz returns this body."""

    async def page() -> WebResponse:
        return WebResponse(body, "application/json", HTTPStatus.SERVICE_UNAVAILABLE)

    server = WebServer(Listener("127.0.0.1", 0), {"/readyz": page})
    running = asyncio.create_task(server.run())
    try:
        await until(lambda: server.address is not None)
        assert server.address is not None
        return await fetch_unready(server.address)
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
async def test_the_reason_is_returned_and_control_characters_are_removed(body: object, unready: str | None) -> None:
    assert await unready_of(orjson.dumps(body)) == unready


@pytest.mark.parametrize("body", [b"", b"not JSON", b"\xff", b" " * 1_000_000])
async def test_the_answer_of_another_program_gives_none(body: bytes) -> None:
    assert await unready_of(body) is None


async def test_without_a_listener_the_result_is_none() -> None:
    assert await fetch_unready(Listener("", 0)) is None
    assert await fetch_unready(Listener("127.0.0.1", 1)) is None
