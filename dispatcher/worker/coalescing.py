"""Several emails in one call to their provider, each with an outcome of its own.

    send ─▶ rendered as a part ─▶ gathered: what is ready at the same moment ─▶ calls ─▶ each email's own outcome
               │ has to travel alone                                              │ refused together: halves, until the
               └▶ the adapter's own `send`                                        └ culprit is alone

To whoever makes attempts this is a provider like any other: each email keeps its own lease, deadline, ledger slot and
outcome. All slots of a call say *on the wire* before its first byte leaves. An email whose lease does not allow that is
left behind, and the others travel without it.

Nothing waits for company: a call leaves as soon as a turn of the loop brings nobody new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.echo import without_echo, words_without_echo
from dispatcher.domain.outcome import CONCERNS_PROVIDER, Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, BulkProvider, CallLimits, Part, Provider, RefusedTogether
from dispatcher.telemetry import metrics

MOST_NAMED: Final = 8
"""So many culprits that the provider names are tried one by one at once; more are looked for by halves."""


class _LeftBehind(Exception):
    """Raised where a call would leave that holds an email which may not: nothing of it left. Never leaves this file."""


@dataclass(slots=True, eq=False)
class _Rider:
    """An email that waits for its call, and for what becomes of it.

    Attributes:
        seconds: How long a call may take that it is in.
    """

    email: OutgoingEmail
    part: Part
    attempt: Attempt
    seconds: float
    outcome: asyncio.Future[Outcome]

    def end(self, outcome: Outcome | BaseException) -> None:
        """Tells its attempt, which may have been cancelled meanwhile."""
        if self.outcome.done():
            return
        if isinstance(outcome, asyncio.CancelledError):
            self.outcome.cancel()
        elif isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class Coalescing:
    """A provider whose emails share calls; see `contract.Provider`."""

    def __init__(self, provider: BulkProvider, most_emails: int) -> None:
        """
        Args:
            most_emails: Of a call; the provider's own limit may be lower.
        """
        limits = provider.limits
        self._provider = provider
        self._limits = CallLimits(min(most_emails, limits.emails), limits.recipients, limits.octets)
        self._gathered: list[_Rider] = []
        self._seen_count = 0
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The provider's."""
        return self._provider.name

    @property
    def capabilities(self) -> Capabilities:
        """The provider's."""
        return self._provider.capabilities

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt, perhaps in a call with others; more than one call where the provider refuses them together.

        The attempt's deadline is each call's: the second begins anew.
        """
        outcome = self.begin(email, attempt)
        return await (self._provider.send(email, attempt) if outcome is None else outcome)

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        """What `send` waits for, so that an email in a call needs no task; None if it has to travel alone.

        Cancelling it before the email leaves keeps the email here.
        """
        with attempt.rendering:
            part = self._provider.part_of(email)
        if part is None:
            return None
        loop = asyncio.get_running_loop()
        rider = _Rider(email, part, attempt, attempt.deadline - loop.time(), loop.create_future())
        if not self._gathered:
            loop.call_soon(self._look)
        self._gathered.append(rider)
        return rider.outcome

    async def close(self) -> None:
        """Ends the provider's idle connections, and calls that nobody waits for any more."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._provider.close()

    def _look(self) -> None:
        """Lets go who has gathered, once a turn of the loop has brought nobody more."""
        if len(self._gathered) > self._seen_count:
            self._seen_count = len(self._gathered)
            asyncio.get_running_loop().call_soon(self._look)
            return
        riders, self._gathered, self._seen_count = self._gathered, [], 0
        for together in _calls(riders, self._limits):
            self._begin(together)

    def _begin(self, riders: list[_Rider]) -> None:
        call = asyncio.create_task(self._carry(riders))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _carry(self, riders: list[_Rider]) -> None:
        """One call for those whose attempts still wait; returns when each has its outcome, or is in another call."""
        riders = [rider for rider in riders if not rider.outcome.done()]
        if not riders:
            return
        try:
            if len(riders) == 1:
                await self._carry_one(riders[0])
            else:
                await self._carry_many(riders)
        except _LeftBehind:
            self._begin(riders)
        except ProviderFault as fault:
            shared = ProviderFault(fault.provider, _without_echoes(fault.message, riders), remedy=fault.remedy)
            _end_all(riders, shared)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the outcomes, and judges it
            _end_all(riders, error)

    async def _carry_one(self, rider: _Rider) -> None:
        rider.attempt.deadline = asyncio.get_running_loop().time() + rider.seconds
        rider.end(await self._provider.send(rider.email, rider.attempt))

    async def _carry_many(self, riders: list[_Rider]) -> None:
        seconds = min(rider.seconds for rider in riders)
        call = _Call(riders, seconds)
        answer = await self._provider.send_many([rider.part for rider in riders], call)
        if isinstance(answer, RefusedTogether):
            for rider in riders:
                rider.attempt.came_back()
            for fewer in _fewer(riders, answer.suspects):
                self._begin(fewer)
            return
        metrics.BULK_CALLS.add(1, self.name)
        metrics.BULK_CALL_EMAILS.add(len(riders), self.name)
        _tell(riders, answer)


class _Call(Attempt):
    """One call for several emails: what the adapter reports of it counts for each of them."""

    __slots__ = ("_riders", "_seconds")

    def __init__(self, riders: Sequence[_Rider], seconds: float) -> None:
        super().__init__(riders[0].attempt.number, asyncio.get_running_loop().time() + seconds)
        self._riders = riders
        self._seconds = seconds

    def leaving(self) -> None:
        """Every email is on the wire now; all come back if one of them may not leave."""
        allowed = [rider for rider in self._riders if _may_leave(rider)]
        if len(allowed) < len(self._riders):
            for rider in allowed:
                rider.attempt.came_back()
            raise _LeftBehind

    def admitted(self) -> None:
        """Any of the emails can say whether the provider may be tried."""
        self._riders[0].attempt.admitted()
        self.deadline = asyncio.get_running_loop().time() + self._seconds


def coalesced(provider: Provider, most_emails: int) -> Provider:
    """The provider, its emails sharing calls of at most so many, if it can do that and more than one is allowed."""
    return Coalescing(provider, most_emails) if most_emails > 1 and isinstance(provider, BulkProvider) else provider


def _may_leave(rider: _Rider) -> bool:
    if rider.outcome.done():
        return False
    try:
        rider.attempt.leaving()
    except Exception as refusal:  # noqa: BLE001 - its own attempt knows what it means
        rider.end(refusal)
        return False
    return True


def _tell(riders: Sequence[_Rider], outcomes: Sequence[Outcome | ProviderFault]) -> None:
    """Each its outcome; what the call says of the provider as a whole is told by one of them."""
    whole = outcomes[0]
    if not isinstance(whole, ProviderFault) and whole.detail and all(each is whole for each in outcomes):
        # Words about all of them may repeat any of them.
        for rider in riders:
            whole = without_echo(whole, rider.email)
        outcomes = [whole] * len(riders)
    told: set[Reason] = set()
    for rider, outcome in zip(riders, outcomes, strict=True):
        if isinstance(outcome, Deferred) and outcome.reason in CONCERNS_PROVIDER and not rider.outcome.done():
            rider.attempt.is_told_already = outcome.reason in told
            told.add(outcome.reason)
        rider.end(outcome)


def _without_echoes(words: str, riders: Iterable[_Rider]) -> str:
    for rider in riders:
        words = words_without_echo(words, rider.email)
    return words


def _end_all(riders: Iterable[_Rider], outcome: BaseException) -> None:
    for rider in riders:
        rider.end(outcome)


def _fewer(riders: list[_Rider], suspects: Collection[int]) -> list[list[_Rider]]:
    """Those that were refused together, in smaller calls: those that the provider named alone, or else halves."""
    if 0 < len(suspects) <= MOST_NAMED and len(suspects) < len(riders):
        others = [rider for position, rider in enumerate(riders) if position not in suspects]
        return [*([riders[position]] for position in sorted(suspects)), others]
    middle = len(riders) // 2
    return [riders[:middle], riders[middle:]]


def _calls(riders: Iterable[_Rider], limits: CallLimits) -> list[list[_Rider]]:
    """Who travels with whom, in the order of arrival: equal keys, no address twice, as many as a call takes."""
    by_key: dict[object, _Queue] = {}
    for rider in riders:
        by_key.setdefault(rider.part.key, _Queue(limits)).add(rider)
    return [call.riders for queue in by_key.values() for call in queue.calls]


class _Filling:
    """A call that fills."""

    __slots__ = ("octets", "recipients", "riders")

    def __init__(self) -> None:
        self.riders: list[_Rider] = []
        self.recipients = self.octets = 0

    def has_room(self, part: Part, limits: CallLimits) -> bool:
        """Whether one more fits; one alone always does."""
        return not self.riders or (
            len(self.riders) < limits.emails
            and self.recipients + part.recipients <= limits.recipients
            and self.octets + part.octets <= limits.octets
        )


class _Queue:
    """The calls of one key."""

    def __init__(self, limits: CallLimits) -> None:
        self.calls: list[_Filling] = []
        self._limits = limits
        self._next_by_address: dict[str, int] = {}

    def add(self, rider: _Rider) -> None:
        """Puts it into the first call that comes after those which hold an address of its own, and has room."""
        at = max((self._next_by_address.get(each, 0) for each in rider.part.addresses), default=0)
        while at < len(self.calls) and not self.calls[at].has_room(rider.part, self._limits):
            at += 1
        if at == len(self.calls):
            self.calls.append(_Filling())
        call = self.calls[at]
        call.riders.append(rider)
        call.recipients += rider.part.recipients
        call.octets += rider.part.octets
        for each in rider.part.addresses:
            self._next_by_address[each] = at + 1
