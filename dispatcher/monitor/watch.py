"""Looks at the DLQ and at the flow of emails at intervals. `announcing` sends the alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

from dispatcher.alerts.wording import instant
from dispatcher.domain.alert import Alert, Kind
from dispatcher.domain.scrub import scrub
from dispatcher.domain.waiting import about, why
from dispatcher.errors import DispatcherError
from dispatcher.monitor.lasting import Lasting
from dispatcher.monitor.patience import within
from dispatcher.monitor.probe import Probe
from dispatcher.monitor.toldbook import STORE_SECONDS, ToldBook
from dispatcher.store.activity import MISSED_LOOKS
from dispatcher.store.alerts import Flow, OldestDeadLetters
from dispatcher.store.retention import Expiring

MAX_CORRELATION_CHARACTERS: Final = 100
LONGEST_DUE_SECONDS: Final = 60.0
"""A dead letter reaches the DLQ within a second; one that waits for longer than this, and longer than a probe's
interval, is growing old."""


_OF_DEAD_LETTERS: Final = frozenset({Kind.DEAD_LETTERS, Kind.OLDEST_AGE_GROWING, Kind.PROBE_FAILED})
_AGED: Final = _OF_DEAD_LETTERS | {Kind.UNDECIDED_EXPIRING}


class Tables(Protocol):
    """What PostgreSQL knows of dead letters; each raises a DispatcherError where it does not answer."""

    async def find_oldest(self) -> OldestDeadLetters:
        """The oldest emails that failed or are held."""
        ...

    async def longest_due_seconds(self) -> float | None:
        """How long a dead letter has waited for its place on the DLQ; None if none waits."""
        ...

    async def find_flow(self) -> Flow:
        """Whether emails are sent, and what stops them."""
        ...

    async def count_expiring(self) -> Expiring | None:
        """Undecided emails that are about to lose their content; None where they are kept for ever."""
        ...


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look found.

    Attributes:
        depth: None if the probe failed.
        fault: Why it did.
        oldest: None if PostgreSQL did not say.
        due_seconds: How long a dead letter waits that is not on the DLQ yet; None if none is known to.
        expiring: How many undecided emails are about to lose their content; None if PostgreSQL did not say.
        flow: Whether emails are sent; None if PostgreSQL did not answer.
    """

    depth: int | None
    fault: str | None
    oldest: OldestDeadLetters | None
    due_seconds: float | None
    expiring: int | None
    flow: Flow | None


class Watch:
    """A task of the monitor.

    Attributes:
        alerts: How each kind of alert stands, as far as the last look could see; empty while another monitor looks.
    """

    def __init__(
        self,
        queue: str,
        probe: Probe,
        tables: Tables,
        book: ToldBook,
        *,
        host: str,
        interval_seconds: float,
        after_seconds: float,
        providers: Collection[str] = (),
    ) -> None:
        """
        Args:
            after_seconds: Alerts when, for so long, nothing is sent, a provider cannot be used, or a host is silent.
            providers: The configured providers.
        """
        self.alerts: dict[Kind, Alert] = {}
        self._queue = queue
        self._probe = probe
        self._tables = tables
        self._book = book
        self._host = host
        self._interval_seconds = interval_seconds
        self._providers = providers
        self._lasting = Lasting(after_seconds)
        # A host that works reports about once per interval.
        self._silent = Lasting(max(after_seconds, MISSED_LOOKS * interval_seconds))
        self._raised_at: dict[Kind, datetime] = {}
        self._listeners: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """An event that is set after each look; whoever waits for it clears it."""
        listener = asyncio.Event()
        self._listeners.append(listener)
        return listener

    async def run(self) -> None:
        """Looks at once and after each interval, until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._interval_seconds)
        finally:
            await self._book.release()

    async def look(self) -> None:
        """One look, if it is ours to look."""
        if await self._book.consult():
            findings = await self._find()
            self.alerts = {kind: self._judge(kind, stands, findings) for kind, stands in self._states(findings).items()}
        else:
            self._forget_lasting()
            self.alerts = {}
        for listener in self._listeners:
            listener.set()

    async def _find(self) -> Findings:
        try:
            depth, fault = await self._probe.depth(), None
        except DispatcherError as error:
            depth, fault = None, scrub(str(error))
        return Findings(depth, fault, *await self._ask_tables())

    async def _ask_tables(self) -> tuple[OldestDeadLetters | None, float | None, int | None, Flow | None]:
        if self._book.is_alone:
            return None, None, None, None
        try:
            oldest = await within(STORE_SECONDS, self._tables.find_oldest())
            due_seconds = await within(STORE_SECONDS, self._tables.longest_due_seconds())
            expiring = await within(STORE_SECONDS, self._tables.count_expiring())
            flow = await within(STORE_SECONDS, self._tables.find_flow())
        except (DispatcherError, TimeoutError):
            return None, None, None, None
        return oldest, due_seconds, expiring.emails if expiring else 0, flow

    def _states(self, findings: Findings) -> dict[Kind, bool]:
        """What stands and what does not; what nobody could see is left out."""
        states = {Kind.PROBE_FAILED: findings.depth is None}
        if findings.depth is not None:
            states[Kind.DEAD_LETTERS] = findings.depth > 0
        if findings.oldest is not None:
            longest_seconds = max(LONGEST_DUE_SECONDS, self._interval_seconds)
            states[Kind.OLDEST_AGE_GROWING] = (findings.due_seconds or 0.0) > longest_seconds
        if findings.expiring is not None:
            states[Kind.UNDECIDED_EXPIRING] = findings.expiring > 0
        return states | self._lasting_states(findings.flow)

    def _lasting_states(self, flow: Flow | None) -> dict[Kind, bool]:
        """The states that count only once they have lasted; leaves out those of which that is still unknown."""
        if flow is None:
            self._forget_lasting()
            return {}
        signs = _signs(flow)
        hosts = list(flow.hosts.items())
        self._lasting.note([sign for found in signs.values() for sign in found])
        self._silent.note(hosts)
        judged = {kind: self._lasting.has_lasted(found) for kind, found in signs.items()}
        judged[Kind.HOST_VANISHED] = self._silent.has_lasted(hosts)
        return {kind: stands for kind, stands in judged.items() if stands is not None}

    def _forget_lasting(self) -> None:
        self._lasting.forget()
        self._silent.forget()

    def _reason(self, kind: Kind, findings: Findings) -> str | None:
        """The alert's reason, for people."""
        flow = findings.flow
        match kind:
            case Kind.PROBE_FAILED:
                return findings.fault
            case Kind.NOTHING_SENT if flow and flow.waiting:
                return scrub(why(flow.waiting, providers=self._providers).detail)
            case Kind.PROVIDER_UNUSABLE if flow:
                lasting = [each for each in flow.troubles if self._lasting.has_lasted([(kind, each.provider)])]
                return scrub(" ".join(map(about, lasting))) or None
            case Kind.HOST_VANISHED if flow:
                gone = [(host, at) for host, at in flow.hosts.items() if self._silent.has_lasted([(host, at)])]
                return "; ".join(f"{host} last reported at {instant(at)}" for host, at in sorted(gone)) or None
            case _:
                return None

    def _judge(self, kind: Kind, stands: bool, findings: Findings) -> Alert:
        now = datetime.now(UTC)
        known_at = self._book.raised_at(kind) or self._raised_at.get(kind, now)
        if stands:
            self._raised_at[kind] = known_at
        else:
            self._raised_at.pop(kind, None)
        return Alert(
            kind,
            stands,
            self._queue,
            known_at,
            self._host,
            count=_count(kind, findings),
            oldest_age_seconds=_oldest_age(kind, stands, findings, (now - known_at).total_seconds()),
            # The correlation ids are those of the oldest dead letters.
            correlation_ids=_correlation_ids(findings) if stands and kind in _OF_DEAD_LETTERS else (),
            reason=self._reason(kind, findings) if stands else None,
            is_alone=self._book.is_alone,
        )


def _signs(flow: Flow) -> dict[Kind, list[Hashable]]:
    """The states that a look found, by alert. A state that changes starts again."""
    return {
        Kind.NOTHING_SENT: [(Kind.NOTHING_SENT, flow.mark)] if flow.due else [],
        Kind.PROVIDER_UNUSABLE: [(Kind.PROVIDER_UNUSABLE, trouble.provider) for trouble in flow.troubles],
    }


def _count(kind: Kind, findings: Findings) -> int | None:
    if kind is Kind.UNDECIDED_EXPIRING:
        return findings.expiring
    if kind is Kind.NOTHING_SENT:
        return findings.flow.due if findings.flow else None
    return findings.depth if kind in _OF_DEAD_LETTERS else None


def _oldest_age(kind: Kind, stands: bool, findings: Findings, known_seconds: float) -> float | None:
    if not stands or kind not in _AGED:
        return None
    if kind is Kind.OLDEST_AGE_GROWING:
        return findings.due_seconds
    if findings.oldest is not None and findings.oldest.age_seconds is not None:
        return findings.oldest.age_seconds
    # Messages that point to no email have no age but what we saw of it.
    return max(0.0, known_seconds) if kind is Kind.DEAD_LETTERS else None


def _correlation_ids(findings: Findings) -> tuple[str, ...]:
    """Applications choose these, and some put addresses into them."""
    found = () if findings.oldest is None else findings.oldest.correlation_ids
    return tuple(scrub(one)[:MAX_CORRELATION_CHARACTERS] for one in found)
