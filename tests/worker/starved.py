"""Reads an email's large content in a process with little free memory: `python -m tests.worker.starved DATABASE_URL
EMAIL_ID MEGABYTES…`.

This must be a separate process. In the test's process, memory that earlier tests have freed would still be available.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from uuid import UUID

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.status import OnUncertain
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.routing.routes import Routes
from dispatcher.store.connections import make_pool
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.worker.contents import ContentLoader, NoMemory
from dispatcher.worker.in_flight_email import InFlightEmail
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.window import Window


def address_space() -> int:
    """The size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


async def read(database_url: str, email_id: UUID, octets_left: int) -> str:
    """Tries to load the email's content with this number of free bytes; returns what happened."""
    pool = make_pool(database_url, name="test", size=1)
    await pool.open()
    store = LeaseStore(pool, worker="worker-1", slot="slot-1")
    octets = await store.find_content_octets(email_id)
    window = Window(Routes([]), 1, BatchQueue[None]())
    contents = ContentLoader(store, StoreOutage(), window, octets=2 * octets, copies=1, prefetch=1)
    lease = Lease(email_id, None, 1, 1, None, None, 0, octets_apart=octets)
    message = Delivery(1, 1, b"", redelivered=False)
    email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + octets_left, limits[1]))
    try:
        async with contents.loaded(email):
            return "unreadable" if email.content is None else "read"
    except NoMemory:
        return "released"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        await pool.close()


if __name__ == "__main__":
    for megabytes_left in sys.argv[3:]:
        print(asyncio.run(read(sys.argv[1], UUID(sys.argv[2]), int(megabytes_left) * 1_000_000)))
