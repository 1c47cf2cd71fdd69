"""Extends pika's connection. The extended connection detects a silent RabbitMQ in time, writes many frames in one
piece, reads deliveries without copying the rest of the buffer, and survives messages whose properties pika cannot
parse."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from pika import exceptions, frame, spec
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.heartbeat import HeartbeatChecker

from dispatcher.broker.deliveries import UNREADABLE, delivery_at, is_incomplete_delivery

CHECKS_PER_HEARTBEAT: Final = 10
"""How many times per heartbeat timeout we check whether data has arrived."""


class _Heartbeats(HeartbeatChecker):  # type: ignore[misc]  # pika 1.4 has no py.typed
    """Pika's heartbeats, but a silent connection ends after the timeout. Pika may need more than twice as long."""

    # RabbitMQ sends a heartbeat twice per timeout. This class counts checks, not seconds: a process that was stopped
    # for a while reads the data that has arrived before it makes the next check, so it does not drop its connection.

    def __init__(self, connection: AsyncioConnection, timeout: int) -> None:
        self._check_seconds = timeout / CHECKS_PER_HEARTBEAT
        super().__init__(connection, timeout)

    def _start_check_timer(self) -> None:
        self._check_interval = self._check_seconds
        super()._start_check_timer()

    @property
    def connection_is_idle(self) -> bool:
        """Whether CHECKS_PER_HEARTBEAT consecutive checks found no data."""
        return bool(self._idle_byte_intervals >= CHECKS_PER_HEARTBEAT)


class PikaConnection(AsyncioConnection):  # type: ignore[misc]  # pika 1.4 has no py.typed
    """Pika's connection with our extensions. They depend on pika's internals, so each has its own test."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._frames: list[bytes] = []
        super().__init__(*arguments, **named)

    def abort(self) -> None:
        """Drops the connection at once. Pika's `close` waits for an answer, and a RabbitMQ that blocks sends none."""
        if self.is_closed:
            return
        if self._opened:
            self._terminate_stream(exceptions.StreamLostError("aborted by us"))
        elif not self.is_closing:
            self.close()

    def _create_heartbeat_checker(self) -> HeartbeatChecker | None:
        return _Heartbeats(self, self.params.heartbeat) if self.params.heartbeat else None

    def _output_marshaled_frames(self, marshaled_frames: Sequence[bytes]) -> None:
        """Writes the frames of many messages in one piece. pika would make three system calls per message."""
        self.emit(marshaled_frames)

    @property
    def most_body_octets(self) -> int:
        """The longest body that fits into one frame, in octets. Valid after the connection is open."""
        return int(self._body_max_length)

    def emit(self, frames: Sequence[bytes]) -> None:
        if not self._frames:
            self.ioloop.call_soon(self._write_frames)
        self._frames.extend(frames)

    def _write_frames(self) -> None:
        data = b"".join(self._frames)
        self.bytes_sent += len(data)
        self.frames_sent += len(self._frames)
        self._frames.clear()
        if self._transport is not None:  # None if the connection is lost
            self._adapter_emit_data(data)

    def _on_data_available(self, data_in: bytes) -> None:
        """Replaces pika's method, which copies the rest of the buffer for each frame that it reads."""
        self._frame_buffer += data_in
        while self._frame_buffer:
            self._take_deliveries()
            # Wait for the rest: pika must not read the frames of a delivery before all of them have arrived.
            if is_incomplete_delivery(self._frame_buffer):
                return
            consumed, value = self._read_frame()
            if not value:
                return
            self._trim_frame_buffer(consumed)
            self._process_frame(value)

    def _take_deliveries(self) -> None:
        """Passes the deliveries at the start of the buffer to their consumers, up to a frame that pika must read."""
        buffer, at = self._frame_buffer, 0
        while delivery := delivery_at(buffer, at):
            channel = self._channels.get(delivery.channel_number)
            consume = None if channel is None else channel._consumers.get(delivery.consumer_tag)
            if consume is None or delivery.consumer_tag in channel._cancelled:
                break
            at = delivery.end
            self.frames_received += 3
            consume(channel, delivery, delivery, delivery.body)
            if self._frame_buffer is not buffer:  # `consume` has ended the connection, so `buffer` is no longer valid
                return
        self._trim_frame_buffer(at)

    def _read_frame(self) -> Any:
        """The next frame, with empty properties if pika cannot parse the message's properties."""
        # Otherwise, pika would close the connection, RabbitMQ would redeliver the message, and so on for ever.
        try:
            return super()._read_frame()
        except UNREADABLE:
            # The frame begins with its type, channel and size. A header frame continues with the class, weight and body
            # size of the message (AMQP 0-9-1, section 4.2).
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            if kind != spec.FRAME_HEADER:
                raise
            _, _, body_octets = struct.unpack_from(">HHQ", self._frame_buffer, spec.FRAME_HEADER_SIZE)
            end = spec.FRAME_HEADER_SIZE + size + spec.FRAME_END_SIZE
            return end, frame.Header(channel, body_octets, spec.BasicProperties())
