"""The probe of the DLQ's depth by the management API or AMQP returns a number or raises an error, within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from dispatcher.broker.management import Management
from dispatcher.broker.topology import Topology
from dispatcher.config import load
from dispatcher.dev.servers import Servers
from dispatcher.errors import BrokerUnavailable, TopologyError
from dispatcher.monitor.dlq_depth import Depth, by_management, depth_of_dlq
from tests.broker.rabbit import Rabbit
from tests.providers.listeners import listening
from tests.waiting import until_answer

FIGURES = b'{"messages": 4, "messages_ready": 3, "messages_unacknowledged": 1, "consumers": 1}'
BARE = b'{"name": "new.dlq"}'


def answering(*bodies: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """The server function of a fake management API, which sends these responses, one per connection."""
    left = list(bodies)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = left.pop(0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    return answer


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a response that never ends, with only short pauses."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.01)


def probe_at(port: int, *, seconds: float = 5, lag_seconds: float = 0) -> Depth:
    """A probe that uses the management API on this port."""
    management = Management(f"http://u:p@127.0.0.1:{port}", timeout_seconds=seconds)
    return by_management(management, "new.dlq", lag_seconds=lag_seconds)


async def test_messages_that_a_consumer_holds_are_counted_too() -> None:
    async with listening(answering(FIGURES)) as port:
        assert await probe_at(port)() == 4


async def test_missing_figures_are_requested_again() -> None:
    async with listening(answering(BARE, FIGURES)) as port:
        assert await probe_at(port)() == 4


async def test_figures_that_stay_missing_are_an_error_and_not_zero() -> None:
    async with listening(answering(BARE, BARE)) as port:
        with pytest.raises(BrokerUnavailable, match="no message counts"):
            await probe_at(port)()


async def test_a_response_that_drips_for_ever_fails_at_the_total_deadline() -> None:
    began_at = time.monotonic()
    async with listening(drip) as port:
        with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.3 s"):
            await probe_at(port, seconds=0.3)()

    # Each byte arrives in time. Without a total deadline, the read would never end.
    assert time.monotonic() - began_at < 15


async def test_without_the_management_api_amqp_counts_and_that_is_logged_once(
    servers: Servers, topology: Topology, rabbit: Rabbit
) -> None:
    with capture_logs() as logs:
        probe = depth_of_dlq(
            load(
                {
                    "DISPATCHER_AMQP_URL": servers.amqp_url,
                    "DISPATCHER_EXCHANGE": topology.exchange,
                    "DISPATCHER_QUEUE": topology.queue,
                    "DISPATCHER_DLQ": topology.dlq,
                }
            )
        )
        await rabbit.publish(topology.dlq, b"dead")

        async def counted() -> bool:
            return await probe() == 1

        await until_answer(counted)

    assert [log["event"] for log in logs] == ["dlq.depth_inexact"]


async def test_a_deleted_queue_is_an_error_either_way(servers: Servers, topology_names: Topology) -> None:
    names = {"AMQP_URL": servers.amqp_url, "QUEUE": topology_names.queue, "DLQ": topology_names.dlq}
    by_amqp = depth_of_dlq(load({f"DISPATCHER_{name}": value for name, value in names.items()}))
    by_http = by_management(Management(servers.management_url), topology_names.dlq, lag_seconds=0)

    for probe in (by_amqp, by_http):
        with pytest.raises(TopologyError, match="no queue"):
            await probe()
