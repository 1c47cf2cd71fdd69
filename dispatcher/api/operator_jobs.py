"""The endpoints for replays, and the background work of an API process that runs replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from starlette.responses import Response

from dispatcher.actions.action import Action, Page
from dispatcher.actions.dlq import CreateReplay
from dispatcher.admission.access import Caller
from dispatcher.api.face import ActionEndpoints
from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.config import Settings
from dispatcher.domain.failures import Replay, ReplayState
from dispatcher.errors import DispatcherError
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.store.connections import connect_async, disable_statement_timeout
from dispatcher.telemetry.log import get_log

CONCURRENT_REPLAYS: Final = 2
"""The most concurrent replays per tenant and process. Further replays wait until a running replay ends."""


@dataclass(frozen=True, slots=True)
class OperatorJobs:
    """The background work of one API process.

    A replay runs in the process that created or resumed it. If that process exits, any other can resume the replay.
    """

    settings: Settings
    _running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _replay_slots: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    def start_replay(self, replay: Replay) -> None:
        """Runs a replay in the background, unless it is done or stopped, or this process already runs it.

        At most CONCURRENT_REPLAYS replays of one tenant run at the same time; further replays wait. The replays that
        are not limited to one tenant have the same limit together.
        """
        if replay.state in (ReplayState.DONE, ReplayState.STOPPED):
            return
        work = partial(self._run_replay, replay.id, str(replay.selection.get("tenant_id", "")))
        self._start(_replay_name(replay.id), work)

    async def create_replay(
        self, asked: CreateReplay, act: Act, *, at_most: int, within_seconds: float
    ) -> Replay | None:
        """Creates a replay of any size over a connection without a statement timeout, and runs it.

        None if its creation takes longer than `within_seconds`; it then continues, and its errors are logged. Raises
        `SelectionGrown` if the selection now has more than `at_most` emails, which the operator was shown.
        """

        async def create() -> Replay:
            async with await connect_async(self.settings.database_url, name="dispatcher api replay") as connection:
                await disable_statement_timeout(connection)
                replay = await replaying.create(
                    connection,
                    asked.selected(),
                    act,
                    include_held=asked.include_held,
                    per_second=asked.per_second,
                    at_most=at_most,
                )
            self.start_replay(replay)
            return replay

        task = asyncio.create_task(create())
        name = f"creation {id(task)}"
        self._running[name] = task
        task.add_done_callback(partial(self._forget, name))
        done, _ = await asyncio.wait({task}, timeout=within_seconds)
        if not done:
            task.add_done_callback(_log_failure)
            return None
        return task.result()

    def seen(self, replay: Replay) -> Replay:
        """The replay; running if this process will run it as soon as another replay ends."""
        is_queued = replay.state is ReplayState.INTERRUPTED and _replay_name(replay.id) in self._running
        return replace(replay, state=ReplayState.RUNNING) if is_queued else replay

    async def stop(self) -> None:
        """Cancels all work. The interrupted replays can be resumed."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @asynccontextmanager
    async def open_dlq(self, purpose: str) -> AsyncIterator[DeadLetterQueue]:
        """Opens the DLQ over a connection that is closed at the end of the block."""
        url, ca_file = self.settings.amqp_url, self.settings.ca_file
        async with await open_connection(url, name=f"dispatcher api {purpose}", ca_file=ca_file) as broker:
            yield DeadLetterQueue(broker, self.settings.dlq)

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = self._running.get(name)
        if running is None or running.done():
            task = self._running[name] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._running.get(name) is task:  # false if a new task with this name has started
            del self._running[name]

    async def _run_replay(self, replay_id: int, tenant: str) -> None:
        slots = self._replay_slots.setdefault(tenant, asyncio.Semaphore(CONCURRENT_REPLAYS))
        try:
            async with slots, await connect_async(self.settings.database_url, name="dispatcher api replay") as session:
                ended = await replaying.run(session, replay_id)
            if ended.locked:
                text = (
                    f"Replay {replay_id} skipped {ended.locked} rows that other transactions have locked. "
                    "Resume the replay."
                )
                get_log().error("error.unexpected", where="replay", error=text)
        except replaying.ReplayBusy:
            return  # another process runs this replay
        except DispatcherError as error:
            get_log().error("error.unexpected", where="replay", error=error.message)


@dataclass(frozen=True)
class ReplayEndpoints(ActionEndpoints):
    """Lists, creates, shows, stops and resumes replays, which `jobs` runs in the background."""

    jobs: OperatorJobs = field(kw_only=True)

    def answer(self, asked: Action[Any], caller: Caller, result: Any) -> Response:
        if asked.is_background:
            self.jobs.start_replay(result)
        if isinstance(result, list):
            return super().answer(asked, caller, result)
        if isinstance(result, Page):
            return super().answer(
                asked, caller, replace(result, rows=[self._seen(each, caller) for each in result.rows])
            )
        return super().answer(asked, caller, self._seen(result, caller))

    def _seen(self, replay: Replay, caller: Caller) -> Replay:
        """The replay as the caller may see it. A tenant does not see the name, the reason and the filters of another
        operator."""
        seen, tenant_id = self.jobs.seen(replay), None if caller.key is None else caller.key.tenant_id
        if tenant_id is not None and not self.access.is_own_act(replay.actor, tenant_id):
            return replace(seen, actor=None, reason=None, selection={})
        return seen


def _log_failure(task: asyncio.Task[Replay]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        text = error.message if isinstance(error, DispatcherError) else type(error).__name__
        get_log().error("error.unexpected", where="replay", error=text)


def _replay_name(replay_id: int) -> str:
    return f"replay {replay_id}"
