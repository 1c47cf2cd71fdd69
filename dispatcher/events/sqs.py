"""Receives the events of Amazon SES from an SQS queue, for hosts that no provider can reach.

SES publishes to SNS or to EventBridge, and these services write to the queue. Every host may poll the queue, without a
leader: SQS gives each message to one poller, and a message that is received again changes nothing.

A message is deleted after its events are committed. While PostgreSQL is unavailable, a poller keeps the messages that
it has received, and receives no more. Otherwise it would receive the same messages again and again, and SQS, which
counts this, would soon move them to the queue's dead-letter queue.

The queue's access policy decides who may write to the queue. So the signatures of SNS are not verified here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dispatcher.config import Settings
from dispatcher.domain.retry import Backoff
from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.events import ses
from dispatcher.events.aws import region_in
from dispatcher.events.contract import EventSink, ParsedEvents, SourceUnavailable
from dispatcher.events.intake import EventBatcher, EventIntake, report_skipped, suppression_rules
from dispatcher.host.daemon_thread import in_daemon_thread
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.telemetry.log import get_log

POLLERS: Final = 4
"""Concurrent pollers per host. One poller would be slow, because it receives at most ten messages per round trip."""
WAIT_SECONDS: Final = 20
"""How long SQS waits for a message before it answers. This is the longest wait that SQS allows."""
MAX_MESSAGES: Final = 10
"""The most messages per call. SQS does not allow more."""
SESSIONS: Final = 2
_CALL_SECONDS: Final = 10
FIRST_WAIT_SECONDS: Final = 1.0
_LONGEST_WAIT_SECONDS: Final = 60.0

Message = Mapping[str, Any]


class Queue:
    """An SQS queue. Its methods block the calling thread."""

    def __init__(self, url: str, *, ca_file: Path | None = None, wait_seconds: int = WAIT_SECONDS) -> None:
        """Opens no connection yet. The first call loads boto3, which searches for credentials."""
        self._url = url
        self._ca_file = ca_file
        self._wait_seconds = wait_seconds
        self._client: Any = None

    def receive(self) -> Sequence[Message]:
        """Receives up to MAX_MESSAGES messages. Waits up to `wait_seconds` for the first message."""
        limits = {"MaxNumberOfMessages": MAX_MESSAGES, "WaitTimeSeconds": self._wait_seconds}
        found: Sequence[Message] = self._call("receive_message", **limits).get("Messages", [])
        return found

    def delete(self, messages: Sequence[Message]) -> None:
        entries = [{"Id": str(at), "ReceiptHandle": each["ReceiptHandle"]} for at, each in enumerate(messages)]
        self._call("delete_message_batch", Entries=entries)

    def _open(self) -> Any:
        import boto3.session  # imported here, because it takes 200 ms and 20 MB, and few hosts need it
        from botocore.config import Config

        for name in ("botocore", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # at level DEBUG, they log the SQS messages
        parts = urlsplit(self._url)
        timeouts = Config(connect_timeout=_CALL_SECONDS, read_timeout=self._wait_seconds + _CALL_SECONDS)
        return boto3.session.Session().client(
            "sqs",
            region_name=region_in(parts.hostname or ""),
            endpoint_url=f"{parts.scheme}://{parts.netloc}",
            verify=None if self._ca_file is None else str(self._ca_file),
            config=timeouts,
        )

    def _call(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if self._client is None:
                self._client = self._open()
            found: Mapping[str, Any] = getattr(self._client, name)(QueueUrl=self._url, **arguments)
        except ClientError as error:
            self._client = None  # the next call searches for credentials again: these may have ended
            words = error.response.get("Error", {}).get("Code", "no code")
            raise SourceUnavailable(f"Amazon SQS refuses the call: {words}.") from error
        except (BotoCoreError, ValueError) as error:
            raise SourceUnavailable(f"Amazon SQS cannot be used: {type(error).__name__}.") from error
        return found


class QueuePoller:
    """Receives messages from an SQS queue, stores their events, and deletes the messages."""

    def __init__(
        self,
        queue: Queue,
        sink: EventSink,
        *,
        topics: Collection[str] = (),
        first_wait_seconds: float = FIRST_WAIT_SECONDS,
    ) -> None:
        """`topics`: see `ses.events_of_message`. `first_wait_seconds`: doubles with each further failure."""
        self._queue = queue
        self._sink = sink
        self._topics = frozenset(topics)
        self._first_wait_seconds = first_wait_seconds
        self._backoff = self._new_backoff()

    async def run(self) -> None:
        """Polls the queue until cancelled. Repeats a failed call after a wait."""
        while True:
            try:
                await self.run_once()
            except SourceUnavailable as error:
                seconds = self._backoff.next_wait(lambda: 1.0)
                fields = {"provider": ses.NAME, "reason": error.message, "retry_in_seconds": seconds}
                get_log().warning("events.source_unavailable", **fields)
                await asyncio.sleep(seconds)
            else:
                self._backoff.reset()

    async def run_once(self) -> None:
        messages = await in_daemon_thread(self._queue.receive, "sqs")
        if not messages:
            return
        parsed = [ses.events_of_message(each["Body"], self._topics) for each in messages]
        done = [each for each, is_stored in zip(messages, await self._store_all(parsed), strict=True) if is_stored]
        if done:
            await in_daemon_thread(partial(self._queue.delete, done), "sqs")
        for each in parsed:
            report_skipped(ses.NAME, each)

    async def _store_all(self, parsed: Sequence[ParsedEvents]) -> list[bool]:
        """Waits while PostgreSQL is unavailable. Returns for each message whether its events are stored."""
        backoff = self._new_backoff()
        while True:
            try:
                return await asyncio.gather(*map(self._store, parsed))
            except StoreUnavailable as error:
                seconds = backoff.next_wait(lambda: 1.0)
                get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds)
                await asyncio.sleep(seconds)

    def _new_backoff(self) -> Backoff:
        return Backoff(base_seconds=self._first_wait_seconds, cap_seconds=_LONGEST_WAIT_SECONDS)

    async def _store(self, parsed: ParsedEvents) -> bool:
        try:
            await self._sink.store(parsed.events)
        except StoreBusy:
            return False  # another transaction has locked the email: SQS delivers the message again
        return True


class QueuePolling:
    """Runs the pollers of one host."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def run(self) -> None:
        settings, name = self._settings, "dispatcher events"
        pool = make_pool(settings.database_url, name=name, size=SESSIONS, lock_seconds=BATCH_LOCK_SECONDS)
        await pool.open()
        try:
            batcher = EventBatcher(EventIntake(pool, suppression_rules(settings)))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(POLLERS):
                    queue = Queue(settings.ses_events_queue_url, ca_file=settings.ca_file)
                    tasks.create_task(QueuePoller(queue, batcher, topics=settings.ses_events_topics).run())
        finally:
            await pool.close()
