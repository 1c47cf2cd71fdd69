"""The adversary's actions with events of the provider."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from typing import Final
from uuid import UUID

from dispatcher.actions.held import Release
from dispatcher.domain.event import EventKind
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import DispatcherError
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import connect_async
from dispatcher.store.events import EventRow, store_events
from tests.chaos.reporter import TWILIO, event_of
from tests.chaos.stage import BROKEN, StormStage, rows_of
from tests.ops.dead_emails import decide

MAX_RELEASED: Final = 20
_HELD: Final = "select email_id from dispatcher.email_log where status = 'held' limit 200"


def release_reported(stage: StormStage, random: Random) -> bool:
    """Release held emails that the provider has accepted, and report an event about each before a worker can lease it.

    The release and the event are one commit, which leaves the settlement to the relay. No worker may send these emails.
    """
    if stage.reporter is None:
        return False
    accepted = stage.provider.delivered()
    chosen = [email_id for (email_id,) in rows_of(stage, _HELD) if accepted[email_id]][:MAX_RELEASED]
    random.shuffle(chosen)
    with suppress(*BROKEN, DispatcherError):
        asyncio.run(_release(stage, chosen))
        return bool(chosen)
    return False


def kill_api(stage: StormStage, random: Random) -> bool:
    """Kill the process that receives the events, so that some are stored and not answered."""
    return stage.reporter is not None and stage.reporter.source.kill()


async def _release(stage: StormStage, email_ids: Sequence[UUID]) -> None:
    sms = stage.sms()
    async with await connect_async(stage.ground.database_url, name="chaos operator") as session:
        hasher = AddressHasher(b"no recipient")
        for email_id in email_ids:
            async with session.transaction():
                released = Release(reason="an event arrives before the lease")
                if await decide(session, released, email_id, actor="chaos") == ["released"]:
                    provider = TWILIO if email_id in sms else stage.provider_name
                    event = event_of(email_id, EventKind.CLICKED, provider, datetime.now(UTC))
                    await store_events(session, [EventRow.of(event, hasher)], SuppressionRules())
