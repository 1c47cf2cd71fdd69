"""Both queues, looked at again and again over one connection."""

from __future__ import annotations

from pathlib import Path

from dispatcher.broker.connection import Connection, open_connection
from dispatcher.broker.topology import FoundQueue, Topology, find_queues, verify_on


class QueueWatch:
    """Looks at the queues, and makes sure that they are as `init` makes them whenever it has connected."""

    def __init__(self, amqp_url: str, topology: Topology, *, name: str, ca_file: Path | None = None) -> None:
        """Connects to nothing yet.

        Args:
            name: What RabbitMQ's management shows for the connection.
        """
        self._amqp_url = amqp_url
        self._topology = topology
        self._name = name
        self._ca_file = ca_file
        self._connection: Connection | None = None

    async def look(self) -> dict[str, FoundQueue]:
        """The queues as they are now, by name.

        Raises:
            TopologyError: something is missing or has other arguments.
            BrokerUnavailable: RabbitMQ cannot be reached.
        """
        try:
            if self._connection is None:
                self._connection = await open_connection(self._amqp_url, name=self._name, ca_file=self._ca_file)
                await verify_on(self._connection, self._topology)
            return await find_queues(self._connection, self._topology)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes the connection; the next look opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
