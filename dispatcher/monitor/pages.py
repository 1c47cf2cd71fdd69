"""The monitor's three pages: /metrics for Prometheus, /healthz and /readyz for whoever watches or balances."""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest

from dispatcher.broker.topology import QueueWatch, Topology
from dispatcher.config import Settings
from dispatcher.host.process_table import ProcessTable
from dispatcher.host.services import Task
from dispatcher.host.web_server import WebResponse, WebServer
from dispatcher.monitor.health import Health
from dispatcher.monitor.looking import Poll
from dispatcher.monitor.readings import Readings
from dispatcher.store.connections import Pool, session
from dispatcher.store.counts import Stock, take_stock
from dispatcher.store.migrations import verify_schema_async
from dispatcher.telemetry.scrape import CONTENT_TYPE, ProcessCollector


def pages_of(settings: Settings, pool: Pool, process_table: ProcessTable) -> list[Task]:
    """The looks at the servers and the web server that tells of them; nothing where it is switched off.

    Args:
        process_table: What the processes of this host say of themselves.
    """
    if not settings.metrics_address.host:
        return []

    parent = os.getppid()

    async def ask_store() -> Stock:
        async with session(pool) as connection:
            await verify_schema_async(connection)
            return await take_stock(connection)

    queues = QueueWatch(settings.amqp_url, Topology.of(settings), name="dispatcher monitor", ca_file=settings.ca_file)
    store, broker = Poll(ask_store), Poll(queues.look, close=queues.close)
    processes = ProcessCollector(settings.metrics_folder)
    health = Health(settings, store, broker, processes, process_table.unready, process_table.statuses)
    registry = CollectorRegistry()
    registry.register(processes)
    registry.register(Readings(settings, store, broker, health))

    async def metrics() -> WebResponse:
        """Everything that this host's processes counted, and what the monitor has read."""
        return WebResponse(generate_latest(registry), CONTENT_TYPE)

    async def healthz() -> WebResponse:
        """200 while the parent lives; that somebody answers says that the monitor does."""
        is_live = os.getppid() == parent
        return _json({"status": "ok" if is_live else "orphaned"}, is_ok=is_live)

    async def readyz() -> WebResponse:
        """200 if this host can do its work, 503 with the reasons if it cannot."""
        reasons = health.reasons()
        is_ready = not any(reasons.values())
        checks = {name: {"ok": reason is None, "reason": reason} for name, reason in reasons.items()}
        return _json({"status": "ok" if is_ready else "degraded", "checks": checks}, is_ok=is_ready)

    served = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    return [store, broker, WebServer(settings.metrics_address, served)]


def _json(words: dict[str, Any], *, is_ok: bool) -> WebResponse:
    status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return WebResponse(orjson.dumps(words, option=orjson.OPT_APPEND_NEWLINE), "application/json", status)
