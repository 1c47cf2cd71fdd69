"""What the monitor does, in one list."""

from __future__ import annotations

from dispatcher.config import Settings
from dispatcher.monitor.keeping import Task
from dispatcher.store.connections import Pool


def tasks_of(settings: Settings, pool: Pool) -> list[Task]:  # noqa: ARG001 - the tasks to come use both
    """Everything that runs in this host's monitor.

    Args:
        pool: The monitor's few sessions; it may never have reached PostgreSQL.
    """
    return []
