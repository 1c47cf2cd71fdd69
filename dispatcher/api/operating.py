"""The endpoints by which a person decides about emails that failed or are held; what they do is `ops/`'s."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeGuard
from uuid import UUID
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import Access, Caller
from dispatcher.api.bodies import Bodies, off_loop
from dispatcher.api.large_json import parsed
from dispatcher.api.problems import Flaw, Problem
from dispatcher.api.reading import MOST_TEXT_CHARACTERS, NOT_BLANK, TENANT, parameters, prints
from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, DispatcherError, InvalidEmail
from dispatcher.ops import replaying, verdicts
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import sweep
from dispatcher.ops.verdicts import Verdict
from dispatcher.store.connections import AsyncSession, Pool, connect_async, session
from dispatcher.store.emails import EmailStore
from dispatcher.store.failures import Selection
from dispatcher.store.replays import Replay, ReplayState
from dispatcher.telemetry.log import get_log

MOST_BYTES: Final = 256 * 1024
"""Of a body: a thousand ids have 40 KB."""
MOST_REASON_CHARACTERS: Final = 500
MOST_IDS: Final = 1000
MOST_PER_SECOND: Final = 10_000
MOST_SECONDS: Final = 10 * 366 * 86_400
REPLAYS_AT_ONCE: Final = 2
"""Of a tenant, in a process; more wait until one of them ends."""
_LARGEST_ID: Final = 2**63 - 1

Check = Callable[[object], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MOST_TEXT_CHARACTERS and prints(value)


def _is_tenant(value: object) -> bool:
    try:
        return bool(tenant(value))
    except InvalidEmail:
        return False


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_REASON_CHARACTERS and bool(re.fullmatch(NOT_BLANK, value))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_age(value: object) -> bool:
    return _is_number(value) and 0 < value <= MOST_SECONDS


def _is_pace(value: object) -> bool:
    return _is_number(value) and replaying.LEAST_PER_SECOND <= value <= MOST_PER_SECOND


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MOST_IDS and all(_id(item) is not None for item in value)


def _id(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


_REASON: Final[Mapping[str, tuple[Check, str]]] = {"reason": (_is_reason, "must be a text that says why")}
_REPLAY: Final[Mapping[str, tuple[Check, str]]] = {
    **_REASON,
    "tenant_id": (_is_tenant, "must be a tenant's id"),
    "error_type": (lambda value: value in tuple(Reason), f"must be one of: {', '.join(Reason)}"),
    "provider": (_is_text, "must be a text"),
    "status": (lambda value: value in ("failed", "held"), "must be failed or held"),
    "email_ids": (_is_ids, f"must be a list of 1 to {MOST_IDS} ids"),
    "older_than_seconds": (_is_age, "must be a number of seconds above 0"),
    "newer_than_seconds": (_is_age, "must be a number of seconds above 0"),
    "include_held": (lambda value: isinstance(value, bool), "must be true or false"),
    "per_second": (_is_pace, f"must be from {replaying.LEAST_PER_SECOND} to {MOST_PER_SECOND}"),
    "force": (lambda value: isinstance(value, bool), "must be true or false"),
}
_DECISION: Final = {**_REASON, "tenant_id": _REPLAY["tenant_id"]}


@dataclass(frozen=True, slots=True)
class Operating:
    """Lets a person decide.

    A replay runs in the process that took it; what it leaves, any other can resume. The dead letters of decided emails
    leave the DLQ after the answer; those that stay, because a server is away, are left to `dlq reconcile`.
    """

    access: Access
    bodies: Bodies
    emails: EmailStore
    pool: Pool
    settings: Settings
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _decided: set[UUID] = field(default_factory=set)
    _turns: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    async def confirm(self, request: Request) -> Response:
        """A held email did arrive."""
        return await self._judge(request, verdicts.confirm)

    async def release(self, request: Request) -> Response:
        """A held email shall be sent again."""
        return await self._judge(request, verdicts.release)

    async def create_replay(self, request: Request) -> Response:
        """Settles which emails, and begins."""
        async with self._asked(request, _REPLAY) as (caller, given), session(self.pool) as connection:
            act = _act(caller, given["reason"])
            selection = _selection(given, caller.tenant(given.get("tenant_id")))
            replay = await replaying.create(
                connection,
                selection,
                act,
                include_held=given.get("include_held", False),
                per_second=given.get("per_second", replaying.DEFAULT_PER_SECOND),
                force=given.get("force", False),
            )
        self._start_replay(replay)
        return _answer(document(replay), 202, {"Location": f"/v1/replays/{replay.replay_id}"})

    async def get_replay(self, request: Request) -> Response:
        """A replay as it stands."""
        async with self.access.admitted(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with session(self.pool) as connection:
                return _answer(document(await _found(connection, request, tenant)))

    async def stop_replay(self, request: Request) -> Response:
        """Lets a replay go no further; what was replayed stays so."""
        async with self.access.admitted(request, Scope.OPERATE) as caller:
            tenant = caller.tenant(parameters(request, {"tenant_id": TENANT}).get("tenant_id"))
            async with session(self.pool) as connection:
                replay = await _found(connection, request, tenant)
                stopped = await replaying.stop(connection, replay.replay_id, _act(caller, "stopped over HTTP"))
        return _answer(document(stopped or replay))

    async def resume_replay(self, request: Request) -> Response:
        """Lets a replay that was stopped or interrupted go on, in this process."""
        async with self._asked(request, _DECISION) as (caller, given), session(self.pool) as connection:
            replay = await _found(connection, request, caller.tenant(given.get("tenant_id")))
            act = _act(caller, given["reason"])
            resumed = await replaying.resume(connection, replay.replay_id, actor=act.actor, reason=act.reason)
        if resumed is not None and resumed.state is ReplayState.RUNNING:
            self._start_replay(replay)
        return _answer(document(resumed or replay), 202)

    async def stop(self) -> None:
        """Ends what runs here; it loses nothing by it."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start_replay(self, replay: Replay) -> None:
        self._start(f"replay {replay.replay_id}", partial(self._run, replay.replay_id, replay.selection["tenant_id"]))

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does it in the background, unless it is under way."""
        running = self._running.get(name)
        if running is None or running.done():
            task = self._running[name] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._running.get(name) is task:  # not another that began since it ended
            del self._running[name]

    async def _judge(
        self, request: Request, decide: Callable[[AsyncSession, UUID, Act], Awaitable[Verdict]]
    ) -> Response:
        async with self._asked(request, _DECISION) as (caller, given):
            email_id: UUID = request.path_params["email_id"]
            if await self.emails.find(caller.tenant(given.get("tenant_id")), email_id) is None:
                raise Problem("not-found")
            async with session(self.pool) as connection:
                verdict = await decide(connection, email_id, _act(caller, given["reason"]))
        if verdict not in (Verdict.CONFIRMED, Verdict.RELEASED):
            raise Problem("not-held", f"Nothing was changed: {verdict.value}.")
        self._decided.add(email_id)
        self._start("sweep", self._sweep)
        return _answer({"id": email_id, "verdict": verdict.value})

    @asynccontextmanager
    async def _asked(
        self, request: Request, known: Mapping[str, tuple[Check, str]]
    ) -> AsyncIterator[tuple[Caller, Mapping[str, Any]]]:
        """Who asks, and the fields of the body, each as it must be; with a slot for the block."""
        caller = await self.access.caller(request, Scope.OPERATE)
        async with self.bodies.read(request, caller) as body:
            given = await off_loop(len(body), lambda: parsed(body))
            if not isinstance(given, dict):
                raise Problem("invalid-body", flaws=[Flaw("pointer", "#", "must be an object")])
            flaws = [] if "reason" in given else [Flaw("pointer", "#/reason", "is missing")]
            if given.keys() - known.keys():
                flaws.append(Flaw("pointer", "#", f"has fields beside {', '.join(known)}"))
            flaws += [
                Flaw("pointer", f"#/{name}", why) for name, (fits, why) in known.items() if not _fits(given, name, fits)
            ]
            if flaws:
                raise Problem("invalid-body", flaws=flaws)
            yield caller, given

    async def _run(self, replay_id: int, tenant: str) -> None:
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(REPLAYS_AT_ONCE))
        try:
            async with turns, AsyncExitStack() as opened:
                name = "dispatcher api replay"
                connection = await connect_async(self.settings.database_url, name=name)
                await opened.enter_async_context(connection)
                dlq = await self._dead_letters(opened)
                ended = await replaying.run(connection, dlq, replay_id)
            if ended.locked:
                words = f"Replay {replay_id} left {ended.locked} emails that somebody's transaction holds."
                get_log().error("error.unexpected", where="replay", error=words)
        except replaying.ReplayBusy:
            return  # another process is at it
        except DispatcherError as error:
            get_log().error("error.unexpected", where="replay", error=error.message)

    async def _sweep(self) -> None:
        """Takes the dead letters of decided emails off the DLQ: one look for all that were decided before it."""
        while self._decided:
            email_ids = frozenset(self._decided)
            self._decided.clear()
            try:
                async with AsyncExitStack() as opened:
                    connection = await connect_async(self.settings.database_url, name="dispatcher api sweep")
                    await opened.enter_async_context(connection)
                    await sweep(connection, await self._open_dlq(opened, "sweep"), email_ids)
            except DispatcherError as error:
                get_log().error("error.unexpected", where="sweep", error=error.message)

    async def _dead_letters(self, opened: AsyncExitStack) -> DeadLetterQueue | None:
        """None while RabbitMQ is away: then the letters stay until they are swept."""
        try:
            return await self._open_dlq(opened, "replay")
        except BrokerUnavailable:
            return None

    async def _open_dlq(self, opened: AsyncExitStack, why: str) -> DeadLetterQueue:
        url, ca_file = self.settings.amqp_url, self.settings.ca_file
        broker = await open_connection(url, name=f"dispatcher api {why}", ca_file=ca_file)
        await opened.enter_async_context(broker)
        return DeadLetterQueue(broker, self.settings.dlq)


def _fits(given: Mapping[str, Any], name: str, fits: Check) -> bool:
    return name not in given or fits(given[name])


def _act(caller: Caller, reason: str) -> Act:
    actor = "api" if caller.key is None else f"api key ed_{caller.key.key_id} ({caller.key.name})"
    return Act.of(actor, reason)


def _selection(given: Mapping[str, Any], tenant: str) -> Selection:
    """Always of one tenant, so that a replay is its tenant's to see."""
    ids = given.get("email_ids")
    return Selection(
        status=Status(given["status"]) if "status" in given else None,
        error_type=given.get("error_type"),
        provider=given.get("provider"),
        tenant_id=tenant,
        older_than_seconds=given.get("older_than_seconds"),
        newer_than_seconds=given.get("newer_than_seconds"),
        email_ids=None if ids is None else tuple(UUID(item) for item in ids),
    )


async def _found(connection: AsyncSession, request: Request, tenant: str) -> Replay:
    text = request.path_params["replay_id"]
    replay = None
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST_ID:
        replay = await replaying.find(connection, int(text))
    if replay is None or replay.selection.get("tenant_id") != tenant:
        raise Problem("not-found", "There is no such replay of this tenant.")
    return replay


def document(replay: Replay) -> dict[str, Any]:
    """A replay as it is told."""
    return {
        "id": replay.replay_id,
        "state": replay.state.value,
        "is_active": replay.is_active,
        "total": replay.total,
        "waiting": replay.waiting,
        "outcomes": {outcome.value: count for outcome, count in replay.outcomes.items()},
        "include_held": replay.include_held,
        "per_second": replay.per_second,
        "paced_with": list(replay.paced_with),
        "reason": replay.reason,
        "created_at": replay.created_at,
        "changed_at": replay.changed_at,
    }


def _answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
