"""The adversary cancels, reschedules and releases emails, and pauses and resumes sending, as an operator does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from typing import Final
from uuid import UUID

import orjson

from dispatcher.actions.held import Release
from dispatcher.domain.event import EventKind
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import DispatcherError
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import connect_async
from dispatcher.store.events import EventRow, store_events
from tests.acceptance.outages import POSTGRES
from tests.chaos.reporter import TWILIO, event_of
from tests.chaos.stage import BROKEN, StormStage, rows_of
from tests.ops.dead_emails import decide

COMMAND_SECONDS: Final = 20.0
RETRY_SECONDS: Final = 1.0
MOST: Final = 12
_RECENT: Final = """
    (select email_id from dispatcher.email_log where status in ('pending', 'waiting', 'sending')
        order by random() limit 60)
    union
    (select email_id from dispatcher.email_log order by email_id desc limit 20)
"""
MAX_RELEASED: Final = 20
_HELD: Final = "select email_id from dispatcher.email_log where status = 'held' limit 200"


def cancel(stage: StormStage, random: Random) -> bool:
    chosen = _chosen(stage, random)
    if not chosen:
        return False
    stage.diary.cancelling.update(chosen)
    answered = _run(stage, "cancel", *map(str, chosen), "--reason", "chaos", "--json")
    if answered is None:
        return True
    now = time.time()
    unchanged = {UUID(email_id): each["result"] for email_id, each in orjson.loads(answered)["unchanged"].items()}
    for email_id in chosen:
        if email_id not in unchanged:
            stage.diary.cancelled_at.setdefault(email_id, now)
        elif unchanged[email_id] == "too_late":
            stage.diary.too_late.add(email_id)
    return True


def reschedule(stage: StormStage, random: Random) -> bool:
    chosen = _chosen(stage, random)
    when = random.choice([("--now",), ("--send-in", "1s"), ("--send-in", "4s")])
    if chosen:
        _run(stage, "reschedule", *map(str, chosen), *when, "--reason", "chaos", "--json")
    return bool(chosen)


def pause(stage: StormStage, random: Random) -> bool:
    scope = random.choice([("all",), ("lane", "normal"), ("tenant", "default"), ("provider", stage.provider_name)])
    lasting = random.choice([(), ("--for", "2s")])
    if stage.outages.is_away(POSTGRES):
        return False
    if _run(stage, "pause", *scope, *lasting, "--reason", "chaos") is None:
        stage.diary.note_event("pause without an answer", scope=scope)

    def resume() -> None:
        if _run(stage, "resume", *scope) is None:
            stage.later(RETRY_SECONDS, resume)

    stage.later(random.uniform(0.5, 4.0), resume)
    return True


def _chosen(stage: StormStage, random: Random) -> list[UUID]:
    found = sorted(email_id for (email_id,) in rows_of(stage, _RECENT))
    return random.sample(found, min(MOST, len(found)))


def _run(stage: StormStage, *words: str) -> str | None:
    """What the command printed; None if it failed, because a server is away. A pause that has ended is an answer."""
    providers = "DISPATCHER_SMS_PROVIDERS" if stage.provider_name == "twilio" else "DISPATCHER_PROVIDERS"
    settings = {"DISPATCHER_DATABASE_URL": stage.clock.url, providers: stage.provider_name}
    command = [sys.executable, "-m", "dispatcher.cli.main", *words]
    env = {"PATH": os.defpath, **settings}
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        is_answered = ended.returncode == 0 or (
            ended.returncode in (1, 3) and (ended.stdout.startswith("{") or "not paused" in ended.stderr)
        )
        stage.diary.note_event("command", words=words, code=ended.returncode, printed=ended.stderr[-300:])
        return ended.stdout if is_answered else None
    return None


def release_reported(stage: StormStage, random: Random) -> bool:
    """Release held emails that the provider has accepted, and report an event about each in the same commit, which
    leaves the settlement to the relay. No worker may send these emails."""
    if stage.reporter is None:
        return False
    accepted = stage.provider.delivered()
    chosen = [email_id for (email_id,) in rows_of(stage, _HELD) if accepted[email_id]][:MAX_RELEASED]
    random.shuffle(chosen)
    with suppress(*BROKEN, DispatcherError):
        asyncio.run(_release(stage, chosen))
        return bool(chosen)
    return False


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
