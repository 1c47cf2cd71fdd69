"""The checks before the first fork: whether the settings work, and whether tables and queues fit this release.

The start waits for unreachable servers, because a host often starts before its servers. Other errors cannot be fixed by
waiting, so they end the start: an exception lists all of them.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
from collections.abc import Callable
from functools import partial

from dispatcher.broker.connection import vhost_of
from dispatcher.broker.inspection import find_faults
from dispatcher.broker.management import Management
from dispatcher.broker.topology import Topology, verify
from dispatcher.config import Settings
from dispatcher.domain.retry import Backoff
from dispatcher.errors import ConfigurationError, SchemaError, ServerUnavailable, TopologyError
from dispatcher.providers.registry import open_provider
from dispatcher.store.connections import connected
from dispatcher.store.migrations import verify_schema
from dispatcher.store.server import show_server, verify_sessions
from dispatcher.telemetry.log import get_log

LONGEST_WAIT_SECONDS = 10.0


def raise_file_limit() -> None:
    """Raises the open-file limit to the maximum for this user. Children inherit it. The usual soft limit of 1,024
    exists for programs that use select(2), which our children do not use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare(settings: Settings) -> None:
    """Checks everything that a start needs, and waits for servers that are unreachable. Leaves no thread and no
    connection behind, because the parent forks next.

    Raises ConfigurationError, which lists all errors of settings, tables and queues.
    """
    raise_file_limit()
    for name in settings.providers:
        asyncio.run(_try_provider(name, settings))
    mistakes = _check("store", lambda: _verify_store(settings))
    topology = Topology.of(settings)
    verifying = partial(verify, settings.amqp_url, topology, ca_file=settings.ca_file)
    mistakes += _check("broker", lambda: asyncio.run(verifying()), waits=not mistakes)
    if mistakes := mistakes or _inspect_broker(settings):
        raise ConfigurationError(mistakes)


def prepare_store(settings: Settings) -> None:
    """Like `prepare`, for the API: checks only PostgreSQL, because the API also works while RabbitMQ is unreachable."""
    raise_file_limit()
    if mistakes := _check("store", lambda: _verify_store(settings)):
        raise ConfigurationError(mistakes)


async def _try_provider(name: str, settings: Settings) -> None:
    """Checks a provider's settings without connecting, so that an unreachable provider does not prevent the start."""
    await open_provider(name, settings).close()


def _verify_store(settings: Settings) -> None:
    asyncio.run(verify_sessions(settings.database_url, name="dispatcher run"))
    with connected(settings.database_url, name="dispatcher run") as connection:
        show_server.sync(connection).verify_writable()
        verify_schema(connection)


def _inspect_broker(settings: Settings) -> list[str]:
    """Errors that RabbitMQ's management API shows. Empty if the API is unreachable: sending does not need it."""
    if not settings.rabbitmq_management_url:
        get_log().info("topology.unverified", reason="DISPATCHER_RABBITMQ_MANAGEMENT_URL is not set")
        return []
    vhost = vhost_of(settings.amqp_url)
    management = Management(settings.rabbitmq_management_url, vhost=vhost, ca_file=settings.ca_file)
    try:
        return [str(fault) for fault in asyncio.run(find_faults(management, Topology.of(settings)))]
    except ServerUnavailable as error:
        get_log().warning("topology.unverified", reason=error.message)
        return []


def _check(server: str, check: Callable[[], None], *, waits: bool = True) -> list[str]:
    """Runs a check, and returns the errors that it finds: none for an unreachable server, unless `waits`."""
    backoff = Backoff(base_seconds=1.0, cap_seconds=LONGEST_WAIT_SECONDS)
    while True:
        try:
            check()
        except ServerUnavailable as error:
            if not waits:
                return []
            # A start may wait for days, and each try creates garbage, so `run` collects it from the first wait on.
            gc.enable()
            # Wait at least half of the backoff, because retries after very short waits would fill the log.
            seconds = backoff.next_wait(lambda: 0.5 + random.random() / 2)  # noqa: S311
            reason = f"{error.message} {error.remedy or ''}".rstrip()
            get_log().warning(f"{server}.connection_lost", reason=reason, retry_in_seconds=round(seconds, 1))
            time.sleep(seconds)
        except ConfigurationError as error:
            return list(error.mistakes)
        except (SchemaError, TopologyError) as error:
            return [str(error)]
        else:
            if backoff.reset():
                get_log().info(f"{server}.connected")
            return []
