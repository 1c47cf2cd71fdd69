"""Keeps look-ups by recipient fast: repairs the index of the recipients, hourly, on one host at a time."""

from __future__ import annotations

from typing import Final

from dispatcher.store.connections import connect_async, disable_statement_timeout
from dispatcher.store.named_locks import named_lock
from dispatcher.store.recipients import summarize_recipients
from dispatcher.telemetry.log import get_log

LOCK_NAME: Final = "recipient summaries"


class RecipientSummaries:
    """Creates missing summaries in the index of the recipients, and replaces unfinished ones. A service of monitors.

    Uses a separate session, because creating the summaries of a million emails takes about a second.
    """

    interval_seconds = 3600.0

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url

    async def run_once(self) -> None:
        """Repairs the summaries of each partition, unless another host is doing so.

        Raises:
            StoreUnavailable: PostgreSQL cannot be reached, or the session was lost.
        """
        async with (
            await connect_async(self._database_url, name="dispatcher summaries") as opened,
            named_lock(opened, LOCK_NAME) as is_ours,
        ):
            if is_ours:
                await disable_statement_timeout(opened)
                if names := await summarize_recipients(opened):
                    get_log().info("partition.summarized", names=names)
