"""Extends pika's connection: it notices a silent broker in time, writes frames in one piece, reads deliveries without
copying them, and survives messages whose properties pika cannot parse.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from pika import exceptions, frame, spec
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.heartbeat import HeartbeatChecker

from dispatcher.broker.deliveries import UNREADABLE, delivery_at, is_under_way

CHECKS_PER_HEARTBEAT: Final = 10
"""How often we look whether anything came, within the time after which a silent connection is lost."""


class _Heartbeats(HeartbeatChecker):  # type: ignore[misc]  # pika 1.4 has no py.typed
    """Pika's heartbeats, but a silent connection ends after the timeout; pika itself may take more than twice as long.

    RabbitMQ sends one at every half of the timeout. This counts looks, not seconds: while our own process is stopped
    there are none, and what came meanwhile is read before the next one.
    """

    def __init__(self, connection: AsyncioConnection, timeout: int) -> None:
        self._check_seconds = timeout / CHECKS_PER_HEARTBEAT
        super().__init__(connection, timeout)

    def _start_check_timer(self) -> None:
        self._check_interval = self._check_seconds
        super()._start_check_timer()

    @property
    def connection_is_idle(self) -> bool:
        """Whether nothing came for so many looks in a row."""
        return bool(self._idle_byte_intervals >= CHECKS_PER_HEARTBEAT)


class PikaConnection(AsyncioConnection):  # type: ignore[misc]  # pika 1.4 has no py.typed
    """Pika's connection with our extensions. They depend on pika's internals, so each of them has its own test."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._frames: list[bytes] = []
        super().__init__(*arguments, **named)

    def abort(self) -> None:
        """Ends the connection at once. Pika's own `close` waits for an answer, which a blocked broker does not give."""
        if self.is_closed:
            return
        if self._opened:
            self._terminate_stream(exceptions.StreamLostError("dropped by us"))
        elif not self.is_closing:
            self.close()

    def _create_heartbeat_checker(self) -> HeartbeatChecker | None:
        return _Heartbeats(self, self.params.heartbeat) if self.params.heartbeat else None

    def _output_marshaled_frames(self, marshaled_frames: Sequence[bytes]) -> None:
        """Writes the frames of many messages in one piece: pika would make three system calls for each of them.

        Whatever the loop's present round has to say goes out together, in order, at the end of it.
        """
        self.emit(marshaled_frames)

    @property
    def most_body_octets(self) -> int:
        """Of a message that is one frame; known once it is open."""
        return int(self._body_max_length)

    def emit(self, frames: Sequence[bytes]) -> None:
        """Writes frames at the end of the loop's round."""
        if not self._frames:
            self.ioloop.call_soon(self._write_frames)
        self._frames.extend(frames)

    def _write_frames(self) -> None:
        data = b"".join(self._frames)
        self.bytes_sent += len(data)
        self.frames_sent += len(self._frames)
        self._frames.clear()
        if self._transport is not None:  # lost meanwhile
            self._adapter_emit_data(data)

    def _on_data_available(self, data_in: bytes) -> None:
        """Pika's own, with our way for deliveries before it; pika would also copy the rest of the buffer per frame."""
        self._frame_buffer += data_in
        while self._frame_buffer:
            self._take_deliveries()
            if is_under_way(self._frame_buffer):  # pika would take its first frame, and then has to take the others
                return
            consumed, value = self._read_frame()
            if not value:
                return
            self._trim_frame_buffer(consumed)
            self._process_frame(value)

    def _take_deliveries(self) -> None:
        """Hands over the deliveries with which the buffer begins, as far as we read them."""
        buffer, at = self._frame_buffer, 0
        while brought := delivery_at(buffer, at):
            channel = self._channels.get(brought.channel_number)
            consume = None if channel is None else channel._consumers.get(brought.consumer_tag)
            if consume is None or brought.consumer_tag in channel._cancelled:
                break
            at = brought.end
            self.frames_received += 3
            consume(channel, brought, brought, brought.body)
            if self._frame_buffer is not buffer:  # it was lost meanwhile
                return
        self._trim_frame_buffer(at)

    def _read_frame(self) -> Any:
        """The next frame, with empty properties where pika cannot read them.

        Else such a message would drop the connection, RabbitMQ would deliver it again, and the queue would stand still.
        """
        try:
            return super()._read_frame()
        except UNREADABLE:
            # Type, channel and size of the frame; class, weight and body size of the message (AMQP 0-9-1, 4.2).
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            if kind != spec.FRAME_HEADER:
                raise
            _, _, body_octets = struct.unpack_from(">HHQ", self._frame_buffer, spec.FRAME_HEADER_SIZE)
            end = spec.FRAME_HEADER_SIZE + size + spec.FRAME_END_SIZE
            return end, frame.Header(channel, body_octets, spec.BasicProperties())
