"""Delivers the feed's events to webhooks. One monitor per database does this. Each webhook has its own rounds.

A round posts a batch of events, several at the same time, and then saves the results in one commit. If the process dies
before this commit, the next round posts the batch again. So every event arrives at least once, always with the same id.
A slow or failing receiver delays only its own webhook.

    the receiver …                                       what the monitor does
    accepts at least some events                         moves the cursor forward; stores each refused event, and posts
                                                         it again (`SCHEDULE_SECONDS`), while it delivers later events
    cannot be reached, or answers 429, 502, 503 or 504,  keeps the cursor, and tries again after a wait, with a few
    or refuses everything                                events; disables the webhook after about 27 hours
    answers 410                                          disables the webhook
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from typing import Final
from uuid import UUID

import orjson

from dispatcher.domain.event import OutgoingEvent
from dispatcher.domain.scrub import scrub
from dispatcher.domain.values import dataclass
from dispatcher.domain.webhook import WebhookState, next_attempt, next_probe
from dispatcher.errors import StoreUnavailable
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.name_lookup import resolve
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.named_locks import acquire
from dispatcher.store.outgoing_events import Position, read_slice
from dispatcher.store.recipients import find_recipients
from dispatcher.store.webhooks import (
    MAX_RETRIES,
    Deliveries,
    DueWebhook,
    RefusedEvent,
    find_due_retries,
    find_due_webhooks,
    restore_feed,
    save_deliveries,
)
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.transport.destination import NoAnswer, Resolve
from dispatcher.transport.signed_post import SignedPoster

LOCK_NAME: Final = "webhooks"
PRIVATE_SETTING: Final = "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE"
POLL_SECONDS: Final = 1.0
STANDBY_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 60.0
"""PostgreSQL ends a session that is idle for longer than this, so that another host delivers if this host is frozen."""
POST_SECONDS: Final = 15.0
BATCH_EVENTS: Final = 100
CONCURRENT_POSTS: Final = 8
"""The most concurrent posts to one receiver. The number is halved when the receiver asks us to slow down, and then
grows by one with each round."""
REFUSALS_IN_A_ROW: Final = 10
"""If a receiver refuses this many events of a round and accepts none, the receiver counts as failing."""
SLOW_DOWN_SECONDS: Final = 5.0
_BUSY: Final = frozenset({429, 502, 503, 504})
_GONE: Final = 410
_utc_now: Final = partial(datetime.now, UTC)


class Reaction(Enum):
    """What a receiver did with one event."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    """The receiver was not reached, or asked us to come back later."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class EventPost:
    event: OutgoingEvent
    position: Position | None = None  # in the feed; None if this post repeats a refused event
    failed_at: datetime | None = None  # when the receiver first refused the event; None if this is its first post


@dataclass(frozen=True, slots=True)
class PostResult:
    post: EventPost
    reaction: Reaction
    error: str | None = None
    retry_after_seconds: float = 0.0


@dataclasses.dataclass(eq=False, repr=False)
class WebhookDelivery:
    """Delivers the feed's events to all webhooks, if this monitor holds the lock LOCK_NAME in PostgreSQL.
    `allow_private`: whether events may be posted to addresses that are not public, such as 10.0.0.1. `retry_seconds`:
    the wait after a round that failed."""

    database_url: str
    _: dataclasses.KW_ONLY
    allow_private: bool
    context: ssl.SSLContext
    now: Callable[[], datetime] = _utc_now
    poll_seconds: float = POLL_SECONDS
    post_seconds: float = POST_SECONDS
    retry_seconds: float = STANDBY_SECONDS
    resolver: Resolve = resolve

    def __post_init__(self) -> None:
        self._rounds: dict[int, asyncio.Task[None]] = {}
        self._concurrency: dict[int, int] = {}
        self._hasher: AddressHasher | None = None
        self._wake = asyncio.Event()
        self._log = get_log()

    async def run(self) -> None:
        """Until cancelled, delivers events, or waits while another host's monitor delivers."""
        while True:
            try:
                async with await connect_async(
                    self.database_url, name="dispatcher webhooks", idle_seconds=IDLE_SECONDS
                ) as session:
                    while not await acquire(session, LOCK_NAME):  # noqa: ASYNC110
                        await asyncio.sleep(STANDBY_SECONDS)  # PostgreSQL does not notify when a lock is released
                    await self._lead(session)
            except StoreUnavailable as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=STANDBY_SECONDS)
            await asyncio.sleep(STANDBY_SECONDS)

    async def _lead(self, session: AsyncSession) -> None:
        """Starts rounds until the session ends. Only this session, which holds the lock LOCK_NAME, writes cursors."""
        try:
            if await restore_feed(session):
                self._log.warning("webhook.feed_restored")
            while True:
                self._wake.clear()
                await self.start_rounds(session)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds_to_tick(self.poll_seconds)):
                        await self._wake.wait()
        finally:
            await self.stop()

    async def start_rounds(self, session: AsyncSession) -> list[asyncio.Task[None]]:
        """Starts a round for each webhook that has something to deliver and no round in progress."""
        started = []
        for webhook in await find_due_webhooks(session, now=self.now(), busy=list(self._rounds)):
            task = asyncio.create_task(self._run_round(session, webhook))
            self._rounds[webhook.webhook_id] = task
            started.append(task)
        return started

    async def stop(self) -> None:
        """Cancels the rounds in progress. Later rounds deliver the events of the cancelled rounds again."""
        running = list(self._rounds.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run_round(self, session: AsyncSession, webhook: DueWebhook) -> None:
        try:
            await self._round(session, webhook)
            self._wake.set()
        except StoreUnavailable as error:
            # Nothing was saved, so the next round posts the same events again. Wait before that round. Otherwise, while
            # PostgreSQL can be read but not written (for example because its disk is full), the receiver would get
            # these events without end.
            self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=self.retry_seconds)
            await asyncio.sleep(self.retry_seconds)
        except Exception as error:  # noqa: BLE001 - one webhook must not delay the others
            self._log.error("error.unexpected", where=f"webhook {webhook.webhook_id}", error=type(error).__name__)
            await asyncio.sleep(self.retry_seconds)
        finally:
            del self._rounds[webhook.webhook_id]

    async def _round(self, session: AsyncSession, webhook: DueWebhook) -> None:
        is_failing = webhook.failing_since is not None
        limit = REFUSALS_IN_A_ROW if is_failing else BATCH_EVENTS
        retries = await find_due_retries(session, webhook.webhook_id, now=self.now(), limit=limit)
        part = await read_slice(session, webhook.position, tenant=webhook.tenant_id, kinds=webhook.kinds, limit=limit)
        posts = [EventPost(event, failed_at=failed_at) for failed_at, event in retries]
        posts += [EventPost(event, position) for position, event in part.events]
        poster = SignedPoster(
            webhook.url,
            private_setting=None if self.allow_private else PRIVATE_SETTING,
            context=self.context,
            total_seconds=self.post_seconds,
            resolver=self.resolver,
        )
        bodies = await self._bodies(session, webhook, [post.event for post in posts])
        concurrency = 1 if is_failing else self._concurrency.get(webhook.webhook_id, CONCURRENT_POSTS)
        results = await _post_all(poster, webhook.secrets, posts, bodies, concurrency)
        deliveries = settle(webhook, posts, results, end=part.end, now=self.now(), draw=random.random)
        if await save_deliveries(session, webhook, deliveries):
            self._report(webhook, results, deliveries)

    async def _bodies(
        self, session: AsyncSession, webhook: DueWebhook, events: Sequence[OutgoingEvent]
    ) -> dict[UUID, bytes]:
        found = await find_recipients(session, {e.email_id for e in events}) if webhook.with_recipients else {}
        if found and self._hasher is None:
            self._hasher = await AddressHasher.open(session)
        bodies = {}
        for event in events:
            recipients = found.get(event.email_id)
            if recipients is not None and event.address_hash is not None and self._hasher is not None:
                recipients = [each for each in recipients if self._hasher.hash(each) == event.address_hash]
            bodies[event.event_id] = orjson.dumps(event.document(recipients), option=orjson.OPT_UTC_Z)
        return bodies

    def _report(self, webhook: DueWebhook, results: Sequence[PostResult], deliveries: Deliveries) -> None:
        number = str(webhook.webhook_id)
        delivered = sum(result.reaction is Reaction.DELIVERED for result in results)
        metrics.WEBHOOK_EVENTS.add(delivered, number, "delivered")
        metrics.WEBHOOK_EVENTS.add(len(results) - delivered, number, "failed")
        slower = any(result.reaction is Reaction.UNAVAILABLE for result in results)
        before = self._concurrency.get(webhook.webhook_id, CONCURRENT_POSTS)
        self._concurrency[webhook.webhook_id] = max(1, before // 2) if slower else min(before + 1, CONCURRENT_POSTS)
        fields = {"webhook": webhook.webhook_id, "reason": deliveries.last_error}
        if deliveries.state is WebhookState.DISABLED:
            self._log.error("webhook.disabled", **fields)
        elif deliveries.failing_since and webhook.failing_since is None:
            self._log.warning("webhook.failing", **fields)
        elif webhook.failing_since and deliveries.failing_since is None:
            self._log.info("webhook.recovered", webhook=webhook.webhook_id)
        for each in deliveries.refused:
            if each.due_at is None:
                fields = {"webhook": webhook.webhook_id, "event_id": str(each.event_id), "reason": each.error}
                self._log.warning("webhook.event_given_up", **fields)


async def _post_all(
    poster: SignedPoster, secrets: list[str], posts: Sequence[EventPost], bodies: dict[UUID, bytes], concurrency: int
) -> list[PostResult]:
    """Posts events, several at once, those of one email in order, until all are posted or the receiver fails."""
    # Returns one result per posted event, in the order of `posts`; the last events are missing if the receiver fails.
    results: dict[int, PostResult] = {}
    latest: dict[UUID, asyncio.Future[None]] = {}
    waiting: Iterator[tuple[int, EventPost]] = iter(enumerate(posts))

    def must_stop() -> bool:
        found = results.values()
        if any(result.reaction in (Reaction.UNAVAILABLE, Reaction.GONE) for result in found):
            return True
        return len(found) >= REFUSALS_IN_A_ROW and all(result.reaction is Reaction.REFUSED for result in found)

    async def post_next() -> None:
        while not must_stop() and (item := next(waiting, None)) is not None:
            index, post = item
            before = latest.get(post.event.email_id)
            done = latest[post.event.email_id] = asyncio.get_running_loop().create_future()
            try:
                if before is not None:
                    await before
                results[index] = await _post(poster, secrets, post, bodies[post.event.event_id])
            finally:
                done.set_result(None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(posts))):
            group.create_task(post_next())
    return [results[index] for index in sorted(results)]


async def _post(poster: SignedPoster, secrets: list[str], post: EventPost, body: bytes) -> PostResult:
    try:
        answer = await poster.post(str(post.event.event_id), secrets, body)
    except NoAnswer as error:
        return PostResult(post, Reaction.UNAVAILABLE, scrub(error.reason))
    if answer.is_success:
        return PostResult(post, Reaction.DELIVERED)
    words = f"the receiver answered {answer.status}"
    if answer.status in _BUSY:
        return PostResult(post, Reaction.UNAVAILABLE, words, answer.retry_after_seconds)
    return PostResult(post, Reaction.GONE if answer.status == _GONE else Reaction.REFUSED, words)


def settle(
    webhook: DueWebhook,
    posts: Sequence[EventPost],
    results: Sequence[PostResult],
    *,
    end: Position,
    now: datetime,
    draw: Callable[[], float],
) -> Deliveries:
    """Decides what to save after a round.

    `results`: in the order of `posts`; the last are missing if the receiver failed. `end`: the position of the last
    event that was read for the round, which may be of a kind or tenant that the webhook does not get.
    """
    delivered = [result.post for result in results if result.reaction is Reaction.DELIVERED]
    failed = [result for result in results if result.reaction is not Reaction.DELIVERED]
    delivered_at = now if delivered else webhook.delivered_at
    has_room = webhook.retries + len(failed) <= MAX_RETRIES
    only_refused = all(result.reaction is Reaction.REFUSED for result in failed)
    is_working = has_room and (bool(delivered) or (only_refused and len(failed) < REFUSALS_IN_A_ROW))
    last_error = failed[-1].error if failed else None
    retry_after = max((result.retry_after_seconds for result in failed), default=0.0)
    refused = [_refused(result, now, draw()) for result in failed if is_working or result.post.failed_at]
    state, next_at, failing_since = WebhookState.ACTIVE, now, webhook.failing_since
    if delivered and is_working:
        failing_since = None
    if not is_working:
        failing_since = failing_since or now
        probe = next_probe(failing_since, now, retry_after_seconds=retry_after, draw=draw())
        state, next_at = (WebhookState.DISABLED, now) if probe is None else (state, probe)
    elif not only_refused:
        next_at = now + timedelta(seconds=max(SLOW_DOWN_SECONDS, retry_after))
    if any(result.reaction is Reaction.GONE for result in failed):
        state = WebhookState.DISABLED
    if any(each.due_at is None and (delivered_at or each.failed_at) <= each.failed_at for each in refused):
        # The receiver refused one of these events for the first time about 27 hours ago, and has accepted nothing
        # since. So disable the webhook.
        state = WebhookState.DISABLED
    # The cursor passes refused events, which are stored for a retry, if the receiver works. Otherwise it stops before
    # the first event that was not delivered.
    position = webhook.position
    for result in results:
        if result.reaction is not Reaction.DELIVERED and not is_working and result.post.position is not None:
            break
        position = result.post.position or position
    else:
        position = end if len(results) == len(posts) else position
    return Deliveries(
        position=position,
        state=state,
        failing_since=failing_since,
        next_attempt_at=next_at,
        last_error=last_error,
        delivered_at=delivered_at,
        delivered_ids=[post.event.event_id for post in delivered],
        refused=refused,
    )


def _refused(result: PostResult, now: datetime, draw: float) -> RefusedEvent:
    failed_at = result.post.failed_at or now
    return RefusedEvent(
        result.post.event.event_id, failed_at, next_attempt(failed_at, now, draw=draw), result.error or ""
    )
