"""The monitor's pages: /metrics for Prometheus, /healthz and /readyz for health checks and load balancers."""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest

from dispatcher.broker.topology import FoundQueue, QueueWatch, Topology
from dispatcher.config import Settings
from dispatcher.host.process_table import ProcessTable
from dispatcher.host.services import Task
from dispatcher.host.web_server import WebResponse, WebServer
from dispatcher.monitor.health import Health
from dispatcher.monitor.polling import Poll
from dispatcher.monitor.server_gauges import ServerGauges
from dispatcher.store.connections import Pool, session
from dispatcher.store.figures import MonitorCounts, count_for_monitor
from dispatcher.store.migrations import verify_schema_async
from dispatcher.telemetry.scrape import CONTENT_TYPE, ProcessCollector


def poll_of_queues(settings: Settings) -> Poll[dict[str, FoundQueue]]:
    queues = QueueWatch(settings.amqp_url, Topology.of(settings), name="dispatcher monitor", ca_file=settings.ca_file)
    return Poll(queues.look, close=queues.close)


def pages_of(
    settings: Settings, pool: Pool, process_table: ProcessTable, broker: Poll[dict[str, FoundQueue]]
) -> list[Task]:
    """The tasks that poll PostgreSQL and serve the pages; none if DISPATCHER_METRICS_ADDRESS is off. The caller runs
    the poll of the `broker`."""
    if not settings.metrics_address.host:
        return []

    parent = os.getppid()

    async def ask_store() -> MonitorCounts:
        async with session(pool) as connection:
            await verify_schema_async(connection)
            return await count_for_monitor(connection)

    store = Poll(ask_store)
    processes = ProcessCollector(settings.metrics_folder)
    health = Health(settings, store, broker, processes, process_table.unready, process_table.statuses)
    registry = CollectorRegistry()
    registry.register(processes)
    registry.register(ServerGauges(settings, store, broker, health))

    async def metrics() -> WebResponse:
        return WebResponse(generate_latest(registry), CONTENT_TYPE)

    async def healthz() -> WebResponse:
        """Answers 200 while the parent process of this host runs, and 503 after it has died."""
        is_live = os.getppid() == parent
        return _json({"status": "ok" if is_live else "orphaned"}, is_ok=is_live)

    async def readyz() -> WebResponse:
        """Answers 200 if all checks pass; otherwise 503, with the reasons."""
        reasons = health.reasons()
        is_ready = not any(reasons.values())
        checks = {name: {"ok": reason is None, "reason": reason} for name, reason in reasons.items()}
        return _json({"status": "ok" if is_ready else "degraded", "checks": checks}, is_ok=is_ready)

    served = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    return [store, WebServer(settings.metrics_address, served)]


def _json(words: dict[str, Any], *, is_ok: bool) -> WebResponse:
    status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return WebResponse(orjson.dumps(words, option=orjson.OPT_APPEND_NEWLINE), "application/json", status)
