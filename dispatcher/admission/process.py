"""How a process that accepts emails starts: its listener, its metrics, its event loop and its signals."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import uvloop

from dispatcher.config import Settings
from dispatcher.config.values import Listener
from dispatcher.errors import DispatcherError
from dispatcher.host.lifecycle import set_on_signals
from dispatcher.host.web_server import WebResponse, WebServer
from dispatcher.supervisor.run_dir import make_run_dir
from dispatcher.telemetry import metric_files, scrape
from dispatcher.telemetry.tracing import TRACER

ACCEPT_BACKLOG: Final = 4096
LARGE_BLOCK_BYTES: Final = 1 << 20
_M_MMAP_THRESHOLD: Final = -3
SWITCH_SECONDS: Final = 0.0005
"""The GIL's switch interval: how long the thread that parses large bodies may delay the event loop at a time. Python's
default is ten times longer."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

NEEDS_A_KEY: Final = (
    "No usable API key exists. Create one: `dispatcher keys create --name shop --from-domain example.com`."
)


def run(settings: Settings, name: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs `serve` until it has ended, and returns the exit code 0. SIGTERM and SIGINT set the event that it gets.

    `name`: of the process, in its trace spans.
    """
    if settings.metrics:
        # Ignore an error here: only metrics need the run directory, and `metric_files.begin` logs the error.
        with suppress(OSError):
            make_run_dir(settings.run_dir)
    sys.setswitchinterval(SWITCH_SECONDS)
    # By default, glibc keeps freed blocks that are smaller than its mmap threshold, and each larger freed block raises
    # the threshold, up to 32 MiB. After a few large bodies the process would stay hundreds of megabytes larger.
    with suppress(AttributeError):  # C libraries other than glibc have no mallopt, and do not need it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    TRACER.begin(name)
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, metric_files.API)

    async def until_signalled() -> None:
        stop = asyncio.Event()
        set_on_signals(stop, *_STOP_SIGNALS)
        await serve(stop)

    try:
        uvloop.run(until_signalled())
    finally:
        # At exit, the interpreter restores the default handlers. A late second signal would then kill the process, so
        # the process ignores the signals from now on.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        metric_files.end()
        TRACER.end()
    return 0


def listen(address: Listener, *, setting: str, shares_port: bool) -> socket.socket:
    """Opens a listening socket at an address, which `setting` has set.

    `shares_port`: whether other processes of the same user may listen on the port too. The kernel distributes
    connections over them.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address.host, address.port))
        listener.listen(ACCEPT_BACKLOG)
    except OSError as error:
        listener.close()
        raise DispatcherError(
            f"The process cannot listen on {address.host}:{address.port}: {error.strerror or error}.",
            remedy=f"Set {setting} to another address, or stop the process that listens on this one.",
        ) from error
    return listener


def metrics_pages(settings: Settings) -> list[WebServer]:
    """The server for /metrics, unless DISPATCHER_API_METRICS_ADDRESS is off."""
    if not settings.api_metrics_address.host:
        return []

    async def metrics() -> WebResponse:
        return WebResponse(scrape.page(settings.metrics_folder), scrape.CONTENT_TYPE)

    # Each process that accepts emails reads the metric files of all such processes on the host, so any process may
    # answer.
    setting = "DISPATCHER_API_METRICS_ADDRESS"
    return [WebServer(settings.api_metrics_address, {"/metrics": metrics}, setting=setting, shares_port=True)]
