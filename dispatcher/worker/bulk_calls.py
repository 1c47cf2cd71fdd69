"""Bulk calls: several emails in one call to their provider, each with a separate outcome.

    send ─▶ rendered as a part ─▶ collected until the event loop adds no more emails ─▶ bulk calls ─▶ one outcome
               │ must be sent alone                                                        │          per email
               └▶ the adapter's `send`                                                     └ refused as a whole: split
                                                                                             in halves until the faulty
                                                                                             email is alone

`BulkSender` is a provider like any other: each email keeps its lease, deadline, ledger slot and outcome. Before the
first byte of a call is sent, the ledger shows all emails of the call as on the wire. If the lease of an email is no
longer valid, the call is made without this email.

A call waits for further emails only until an iteration of the event loop has added no email.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Concern, Deferred, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.provider_text import without_echo, words_without_echo
from dispatcher.domain.values import dataclass
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, BulkLimits, BulkProvider, Provider
from dispatcher.telemetry import metrics

MAX_SUSPECTS: Final = 8
"""If the provider refuses a call because of at most this many emails, each of these emails is sent alone. Otherwise,
the call is split into halves."""


class _CallAborted(Exception):
    """Raised before a call is sent, because an email of the call must no longer be sent. Caught in this file."""


@dataclass(slots=True, eq=False)
class _Member:
    email: OutgoingEmail
    part: BulkEntry
    attempt: Attempt
    seconds: float
    outcome: asyncio.Future[Outcome]

    def end(self, outcome: Outcome | BaseException) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, asyncio.CancelledError):
            self.outcome.cancel()
        elif isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class BulkSender:
    """A provider that sends its emails in bulk calls; see `contract.Provider`."""

    def __init__(self, provider: BulkProvider, most_emails: int) -> None:
        limits = provider.limits
        self._provider = provider
        self._limits = BulkLimits(min(most_emails, limits.emails), limits.recipients, limits.octets)
        self._collected: list[_Member] = []
        self._seen_count = 0
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def capabilities(self) -> Capabilities:
        return self._provider.capabilities

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """Makes one attempt, in a bulk call if possible. If the provider refuses a call as a whole, the call's emails
        are sent again in smaller calls. Each call starts a new deadline."""
        outcome = self.begin(email, attempt)
        return await (self._provider.send(email, attempt) if outcome is None else outcome)

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        """Adds the email to a bulk call, and returns a future of its outcome; None if the email must be sent alone. To
        stop the email before it is on the wire, cancel the future."""
        with attempt.rendering:
            part = self._provider.bulk_entry_of(email)
        if part is None:
            return None
        loop = asyncio.get_running_loop()
        member = _Member(email, part, attempt, attempt.deadline - loop.time(), loop.create_future())
        if not self._collected:
            loop.call_soon(self._flush_when_idle)
        self._collected.append(member)
        return member.outcome

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._provider.close()

    def _flush_when_idle(self) -> None:
        """Starts calls for the collected emails when an iteration of the event loop adds no further email."""
        if len(self._collected) > self._seen_count:
            self._seen_count = len(self._collected)
            asyncio.get_running_loop().call_soon(self._flush_when_idle)
            return
        members, self._collected, self._seen_count = self._collected, [], 0
        plans: dict[object, _CallPlan] = {}  # by `BulkEntry.key`
        for member in members:
            plans.setdefault(member.part.key, _CallPlan(self._limits)).add(member)
        for plan in plans.values():
            for call in plan.calls:
                self._begin(call.members)

    def _begin(self, members: list[_Member]) -> None:
        call = asyncio.create_task(self._send_call(members))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _send_call(self, members: list[_Member]) -> None:
        """Makes one call. Afterwards, each member that was not cancelled has an outcome, or is in a new call."""
        members = [member for member in members if not member.outcome.done()]
        if not members:
            return
        try:
            if len(members) == 1:
                member = members[0]
                member.attempt.deadline = asyncio.get_running_loop().time() + member.seconds
                member.end(await self._provider.send(member.email, member.attempt))
            else:
                await self._send_together(members)
        except _CallAborted:
            self._begin(members)
        except ProviderFault as fault:
            words = fault.message
            for member in members:
                words = words_without_echo(words, member.email)
            _end_all(members, fault.with_message(words))
        except BaseException as error:  # noqa: BLE001 - passed on to the attempts, which handle it
            _end_all(members, error)

    async def _send_together(self, members: list[_Member]) -> None:
        seconds = min(member.seconds for member in members)
        call = _CallAttempt(members, seconds)
        answer = await self._provider.send_bulk([member.part for member in members], call)
        if isinstance(answer, BulkCallRefused):
            call.mark_not_sent()
            for call_members in _smaller_calls(members, answer.suspects):
                self._begin(call_members)
            return
        metrics.BULK_CALLS.add(1, self.name)
        metrics.BULK_CALL_EMAILS.add(len(members), self.name)
        _distribute(members, answer)


class _CallAttempt(Attempt):
    """The attempt of a whole bulk call. Passes what the adapter reports to the attempts of all its emails."""

    __slots__ = ("_members", "_seconds")

    def __init__(self, members: Sequence[_Member], seconds: float) -> None:
        super().__init__(members[0].attempt.number, asyncio.get_running_loop().time() + seconds)
        self._members = members
        self._seconds = seconds

    def mark_on_wire(self) -> None:
        """Marks every email as on the wire, or none: raises _CallAborted if some of them must not be sent."""
        allowed = []
        for member in self._members:
            if member.outcome.done():
                continue
            try:
                member.attempt.mark_on_wire()
            except Exception as refusal:  # noqa: BLE001 - passed on to the member's attempt, which handles it
                member.end(refusal)
            else:
                allowed.append(member)
        if len(allowed) < len(self._members):
            for member in allowed:
                member.attempt.mark_not_sent()
            raise _CallAborted

    def mark_not_sent(self) -> None:
        for member in self._members:
            member.attempt.mark_not_sent()

    def connection_acquired(self) -> None:
        self._members[0].attempt.connection_acquired()
        self.deadline = asyncio.get_running_loop().time() + self._seconds


def with_bulk_calls(provider: Provider, most_emails: int) -> Provider:
    """Makes a provider send up to `most_emails` emails per call, if it has bulk calls."""
    return BulkSender(provider, most_emails) if most_emails > 1 and isinstance(provider, BulkProvider) else provider


def _distribute(members: Sequence[_Member], outcomes: Sequence[Outcome | ProviderFault]) -> None:
    """Gives each member its outcome. The breaker counts a failure of the whole provider once, not once per email."""
    whole = outcomes[0]
    if not isinstance(whole, ProviderFault) and whole.detail and all(each is whole for each in outcomes):
        # The provider's text about the whole call may repeat content of any email. Remove the content of each email.
        for member in members:
            whole = without_echo(whole, member.email)
        outcomes = [whole] * len(members)
    reported: set[Reason] = set()
    for member, outcome in zip(members, outcomes, strict=True):
        if (
            isinstance(outcome, Deferred | Rejected)
            and outcome.concern is not Concern.EMAIL
            and not member.outcome.done()
        ):
            member.attempt.is_already_counted = outcome.reason in reported
            reported.add(outcome.reason)
        member.end(outcome)


def _end_all(members: Iterable[_Member], outcome: BaseException) -> None:
    for member in members:
        member.end(outcome)


def _smaller_calls(members: list[_Member], suspects: Collection[int]) -> list[list[_Member]]:
    """Splits a refused call: into a call for each suspect, by position, and one for all others; or into two halves."""
    if 0 < len(suspects) <= MAX_SUSPECTS and len(suspects) < len(members):
        others = [member for position, member in enumerate(members) if position not in suspects]
        return [*([members[position]] for position in sorted(suspects)), others]
    middle = len(members) // 2
    return [members[:middle], members[middle:]]


class _PlannedCall:
    __slots__ = ("members", "octets", "recipients")

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self.recipients = self.octets = 0

    def has_room(self, part: BulkEntry, limits: BulkLimits) -> bool:
        """Whether the part can be added to the call. The first part of a call always fits."""
        return not self.members or (
            len(self.members) < limits.emails
            and self.recipients + part.recipients <= limits.recipients
            and self.octets + part.octets <= limits.octets
        )


class _CallPlan:
    """The planned calls for emails with the same `BulkEntry.key`."""

    def __init__(self, limits: BulkLimits) -> None:
        self.calls: list[_PlannedCall] = []
        self._limits = limits
        self._next_by_address: dict[str, int] = {}

    def add(self, member: _Member) -> None:
        """Adds the email to the first call that has room, after the last call with one of its addresses: a call may
        contain an address only once, and emails to the same address keep their order."""
        at = max((self._next_by_address.get(each, 0) for each in member.part.addresses), default=0)
        while at < len(self.calls) and not self.calls[at].has_room(member.part, self._limits):
            at += 1
        if at == len(self.calls):
            self.calls.append(_PlannedCall())
        call = self.calls[at]
        call.members.append(member)
        call.recipients += member.part.recipients
        call.octets += member.part.octets
        for each in member.part.addresses:
            self._next_by_address[each] = at + 1
