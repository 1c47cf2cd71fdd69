"""Stops a process on a signal or when its parent exits, and detects tasks that end before the process stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, ParamSpec, TypeVar

from dispatcher.errors import DispatcherError
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.process_table import ChildContext, ProcessSlot

BEAT_SECONDS: Final = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class StrayCancel(DispatcherError):
    """A task ended because a future that the task waited for was cancelled. The task itself was not cancelled."""


def stop_event(context: ChildContext) -> asyncio.Event:
    """An event that is set when this process must drain: on SIGTERM, or when the parent exits.

    Also starts the heartbeat, a timer of the loop: a task could be cancelled, and a thread would continue while the
    loop hangs.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    set_on_signals(stop, signal.SIGTERM)

    def on_lifeline() -> None:
        if not os.read(context.lifeline, 1):
            loop.remove_reader(context.lifeline)
            stop.set()

    loop.add_reader(context.lifeline, on_lifeline)
    _beat(loop, context.process_slot)
    return stop


def set_on_signals(stop: asyncio.Event, *numbers: signal.Signals) -> None:
    """Makes these signals set the event. The signals no longer end the process, even after the loop is closed."""
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: object) -> None:
        with suppress(RuntimeError):  # raised if the loop is closed: the process is about to exit
            loop.call_soon_threadsafe(stop.set)

    # Do not use loop.add_signal_handler. A closing loop removes its handlers, so a late signal would kill the process.
    for number in numbers:
        signal.signal(number, handle)


def _beat(loop: asyncio.AbstractEventLoop, process_slot: ProcessSlot) -> None:
    process_slot.beat()
    loop.call_later(seconds_to_tick(BEAT_SECONDS), _beat, loop, process_slot)


async def raise_on_stray_cancel(work: Callable[P, Coroutine[Any, Any, T]], *given: P.args, **named: P.kwargs) -> T:
    """Awaits the work. If it is cancelled although the calling task is not, raises StrayCancel.

    If a library cancels what the work awaits, CancelledError would end the task as if it had been cancelled; a task
    group would continue without it, and report no error.
    """
    try:
        return await work(*given, **named)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StrayCancel("A future that this task waited for was cancelled, but the task itself was not.") from error
