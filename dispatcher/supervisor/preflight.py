"""What must hold before the first fork: settings that work, tables and queues as this release needs them.

A server that is away is waited for, because a host often starts before its servers do. What no waiting mends ends the
start, with everything that was found.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable

from dispatcher.broker.connection import vhost_of
from dispatcher.broker.inspection import find_faults
from dispatcher.broker.management import Management
from dispatcher.broker.topology import Topology, verify
from dispatcher.config import Settings
from dispatcher.domain.backoff import Backoff
from dispatcher.errors import (
    ConfigurationError,
    SchemaError,
    ServerUnavailable,
    TopologyError,
)
from dispatcher.providers.registry import open_provider
from dispatcher.store.connections import connected
from dispatcher.store.migrations import verify_schema
from dispatcher.store.server import verify_sessions, verify_writable
from dispatcher.telemetry.log import get_log

LONGEST_WAIT_SECONDS = 10.0


def raise_file_limit() -> None:
    """Raises the limit of open files to what the system allows this user; children inherit it.

    The usual soft limit of 1,024 is there for programs that use select(2), and none of ours does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare(settings: Settings) -> None:
    """Returns once a start can succeed; waits for servers that are away. Leaves no thread and no connection behind.

    Raises:
        ConfigurationError: with everything that an operator has to mend: settings, tables, queues.
    """
    raise_file_limit()
    for name in settings.providers:
        asyncio.run(_try_provider(name, settings))
    mistakes = _examine("store", lambda: _verify_store(settings))
    mistakes += _examine("broker", lambda: _verify_broker(settings), is_patient=not mistakes)
    if mistakes := mistakes or _inspect_broker(settings):
        raise ConfigurationError(mistakes)


def prepare_store(settings: Settings) -> None:
    """The same for a process that a RabbitMQ that is away, or not fit, does not keep from its work.

    Raises:
        ConfigurationError: the tables, or a pooler before them, are not fit.
    """
    raise_file_limit()
    if mistakes := _examine("store", lambda: _verify_store(settings)):
        raise ConfigurationError(mistakes)


async def _try_provider(name: str, settings: Settings) -> None:
    """Makes sure that its settings suffice; connects to nobody, so that a provider that is away stops no start."""
    await open_provider(name, settings).close()


def _verify_store(settings: Settings) -> None:
    asyncio.run(verify_sessions(settings.database_url, name="dispatcher run"))
    with connected(settings.database_url, name="dispatcher run") as connection:
        verify_writable(connection)
        verify_schema(connection)


def _verify_broker(settings: Settings) -> None:
    asyncio.run(verify(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))


def _inspect_broker(settings: Settings) -> list[str]:
    """What is to be mended, as RabbitMQ reports. A management API that is away stops no start: no email needs it."""
    if not settings.rabbitmq_management_url:
        get_log().info("topology.unverified", reason="DISPATCHER_RABBITMQ_MANAGEMENT_URL is not set")
        return []
    vhost = vhost_of(settings.amqp_url)
    management = Management(settings.rabbitmq_management_url, vhost=vhost, ca_file=settings.ca_file)
    try:
        return [str(fault) for fault in find_faults(management, Topology.of(settings))]
    except ServerUnavailable as error:
        get_log().warning("topology.unverified", reason=error.message)
        return []


def _examine(server: str, look: Callable[[], None], *, is_patient: bool = True) -> list[str]:
    """What is to be mended at a server, once it answers; without patience, nothing if it does not answer now."""
    backoff = Backoff(base_seconds=1.0, cap_seconds=LONGEST_WAIT_SECONDS)
    while True:
        try:
            look()
        except ServerUnavailable as error:
            if not is_patient:
                return []
            _wait(server, error, backoff)
        except ConfigurationError as error:
            return list(error.mistakes)
        except (SchemaError, TopologyError) as error:
            return [str(error)]
        else:
            if backoff.worked():
                get_log().info(f"{server}.connected")
            return []


def _wait(server: str, error: ServerUnavailable, backoff: Backoff) -> None:
    # Half of the wait is certain: a jitter down to nothing would fill the log.
    seconds = backoff.next_wait(lambda: 0.5 + random.random() / 2)  # noqa: S311
    reason = f"{error.message} {error.remedy or ''}".rstrip()
    get_log().warning(f"{server}.connection_lost", reason=reason, retry_in_seconds=round(seconds, 1))
    time.sleep(seconds)
