"""A scripted provider that counts the emails that it accepts."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, BulkLimits

ANYTHING = Capabilities(templates=True, inline_parts=True, calendar=True, raw_mime=True, copies=6)
Act = Callable[["ScriptedProvider", OutgoingEmail, Attempt], Awaitable[Outcome]]


class ScriptedProvider:
    """Does with each email what `script` says next, and then `always`. An email `accepted` twice is a duplicate. Emails
    whose call waits for `let_go` are `waiting`."""

    def __init__(self, name: str = "scripted", capabilities: Capabilities = ANYTHING) -> None:
        self._name = name
        self._capabilities = capabilities
        self.script: defaultdict[UUID, deque[Act]] = defaultdict(deque)
        self.always: Act = accept
        self.calls: list[UUID] = []
        self.accepted: Counter[UUID] = Counter()
        self.waiting: set[UUID] = set()
        self._let_go = asyncio.Event()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        self.calls.append(email.email_id)
        script = self.script[email.email_id]
        act = script.popleft() if script else self.always
        return await act(self, email, attempt)

    async def close(self) -> None:
        """Does nothing."""

    def let_go(self) -> None:
        self._let_go.set()

    async def wait(self, email_id: UUID) -> None:
        self.waiting.add(email_id)
        try:
            await self._let_go.wait()
        finally:
            self.waiting.discard(email_id)

    def accept(self, email_id: UUID) -> Accepted:
        self.accepted[email_id] += 1
        return Accepted(f"<{email_id}>", "250 ok")


class ScriptedPrompt(ScriptedProvider):
    """Begins each attempt without a task, unless `is_idle` is False; then puts the email on the wire, if `leaves`. A
    test sets the outcomes of the attempts, which are in `begun`."""

    def __init__(self, *, is_idle: bool = True, leaves: bool = True) -> None:
        super().__init__()
        self._is_idle = is_idle
        self._leaves = leaves
        self.begun: list[asyncio.Future[Outcome]] = []

    def begin(self, _: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        if not self._is_idle:
            return None
        if self._leaves:
            attempt.mark_on_wire()
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


class ScriptedBulk(ScriptedProvider):
    limits = BulkLimits(1000, 1000, 1_000_000)

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        """The same key for every email, so that any emails may be in one call."""
        return BulkEntry("all", 1, 100, email)

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        attempt.mark_on_wire()
        return [self.accept(part.content.email_id) for part in parts]


async def accept(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    attempt.mark_on_wire()
    await asyncio.sleep(0)
    return provider.accept(email.email_id)


def answer(outcome: Outcome) -> Act:
    async def act(_provider: ScriptedProvider, _email: OutgoingEmail, attempt: Attempt) -> Outcome:
        attempt.mark_on_wire()
        await asyncio.sleep(0)
        return outcome

    return act


def answer_when_let_go(outcome: Outcome) -> Act:
    async def act(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        attempt.mark_on_wire()
        await provider.wait(email.email_id)
        return provider.accept(email.email_id) if isinstance(outcome, Accepted) else outcome

    return act


accept_when_let_go = answer_when_let_go(Accepted())
throttle_when_let_go = answer_when_let_go(
    Deferred(Reason.THROTTLED, "slow down", "429", 1.0)  # one email with this retry time starts a pause
)


async def leave_when_let_go(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    await provider.wait(email.email_id)
    return await accept(provider, email, attempt)


async def accept_and_never_answer(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    attempt.mark_on_wire()
    provider.accept(email.email_id)
    await asyncio.Event().wait()
    raise AssertionError


async def never_leave(_provider: ScriptedProvider, _email: OutgoingEmail, _attempt: Attempt) -> Outcome:
    """Waits for ever, as for a connection."""
    await asyncio.Event().wait()
    raise AssertionError


def fail(error: BaseException, *, after_leaving: bool) -> Act:
    """Raises this error; with `after_leaving`, only after the email is on the wire."""

    async def act(_provider: ScriptedProvider, _email: OutgoingEmail, attempt: Attempt) -> Outcome:
        if after_leaving:
            attempt.mark_on_wire()
        await asyncio.sleep(0)
        raise error

    return act
