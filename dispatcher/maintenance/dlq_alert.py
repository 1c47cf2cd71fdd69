"""Looks at the DLQ and at the flow of emails at intervals, on one host for all. `announcing` sends the alerts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

from dispatcher.alerts.wording import instant
from dispatcher.domain.alert import Alert, Kind
from dispatcher.domain.scrub import scrub
from dispatcher.domain.waiting import about, why
from dispatcher.errors import DispatcherError
from dispatcher.maintenance.alert_book import AlertBook
from dispatcher.maintenance.dlq_depth import Depth
from dispatcher.store.activity import MISSED_LOOKS
from dispatcher.store.alerts import AlertStore, TableFindings

MAX_CORRELATION_CHARACTERS: Final = 100
LONGEST_DUE_SECONDS: Final = 60.0
"""A dead letter reaches the DLQ within a second; one that waits for longer than this, and longer than a probe's
interval, is growing old."""

_OF_DEAD_LETTERS: Final = frozenset({Kind.DEAD_LETTERS, Kind.OLDEST_AGE_GROWING, Kind.PROBE_FAILED})


class Findings(NamedTuple):
    """What one look found.

    Attributes:
        depth: Messages on the DLQ; None if RabbitMQ did not say.
        fault: Why it did not.
        tables: None if PostgreSQL did not answer.
    """

    depth: int | None
    fault: str | None
    tables: TableFindings | None


class DlqAlert:
    """A service of each monitor; it works where the monitor has the turn.

    Attributes:
        alerts: How each kind of alert stands, as far as the last look could see; empty while another monitor looks.
    """

    def __init__(
        self,
        queue: str,
        depth: Depth,
        store: AlertStore,
        book: AlertBook,
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
        self.interval_seconds = interval_seconds
        self._queue = queue
        self._depth = depth
        self._store = store
        self._book = book
        self._host = host
        self._providers = providers
        self._lasting = Lasting(after_seconds)
        # A host that works reports about once per interval.
        self._silent = Lasting(max(after_seconds, MISSED_LOOKS * interval_seconds))
        self._raised_at: dict[Kind, datetime] = {}
        self._listeners: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """An event that is set after each look; whoever waits for it clears it."""
        self._listeners.append(asyncio.Event())
        return self._listeners[-1]

    async def run_once(self) -> None:
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
        depth = fault = tables = None
        try:
            depth = await self._depth()
        except DispatcherError as error:
            fault = scrub(str(error))
        if not self._book.is_alone:
            with suppress(DispatcherError):
                tables = await self._store.find()
        return Findings(depth, fault, tables)

    def _states(self, findings: Findings) -> dict[Kind, bool]:
        """What stands and what does not; what nobody could see, or is not known to have lasted, is left out."""
        states: dict[Kind, bool | None] = {Kind.PROBE_FAILED: findings.depth is None}
        if findings.depth is not None:
            states[Kind.DEAD_LETTERS] = findings.depth > 0
        if (tables := findings.tables) is None:
            self._forget_lasting()
        else:
            idle = [(Kind.NOTHING_SENT, tables.mark)] if tables.due else []  # a state that changes starts again
            unusable = [(Kind.PROVIDER_UNUSABLE, trouble.provider) for trouble in tables.troubles]
            self._lasting.note([*idle, *unusable])
            self._silent.note(tables.hosts.items())
            longest_seconds = max(LONGEST_DUE_SECONDS, self.interval_seconds)
            states |= {
                Kind.OLDEST_AGE_GROWING: (tables.dead_letter_due_seconds or 0.0) > longest_seconds,
                Kind.UNDECIDED_EXPIRING: tables.expiring > 0,
                Kind.NOTHING_SENT: self._lasting.has_lasted(idle),
                Kind.PROVIDER_UNUSABLE: self._lasting.has_lasted(unusable),
                Kind.HOST_VANISHED: self._silent.has_lasted(tables.hosts.items()),
            }
        return {kind: stands for kind, stands in states.items() if stands is not None}

    def _forget_lasting(self) -> None:
        self._lasting.forget()
        self._silent.forget()

    def _judge(self, kind: Kind, stands: bool, findings: Findings) -> Alert:
        now = datetime.now(UTC)
        known_at = self._book.raised_at(kind) or self._raised_at.get(kind, now)
        if stands:
            self._raised_at[kind] = known_at
        else:
            self._raised_at.pop(kind, None)
        # The correlation ids are those of the oldest dead letters. Applications choose them, some put addresses in.
        oldest = findings.tables.correlation_ids if findings.tables and stands and kind in _OF_DEAD_LETTERS else ()
        return Alert(
            kind,
            stands,
            self._queue,
            known_at,
            self._host,
            count=_count(kind, findings),
            oldest_age_seconds=_oldest_age(kind, findings, (now - known_at).total_seconds()) if stands else None,
            correlation_ids=tuple(scrub(one)[:MAX_CORRELATION_CHARACTERS] for one in oldest),
            reason=self._reason(kind, findings) if stands else None,
            is_alone=self._book.is_alone,
        )

    def _reason(self, kind: Kind, findings: Findings) -> str | None:
        """The alert's reason, for people."""
        tables = findings.tables
        match kind:
            case Kind.PROBE_FAILED:
                return findings.fault
            case Kind.NOTHING_SENT if tables and tables.waiting:
                return scrub(why(tables.waiting, providers=self._providers).detail)
            case Kind.PROVIDER_UNUSABLE if tables:
                lasting = [each for each in tables.troubles if self._lasting.has_lasted([(kind, each.provider)])]
                return scrub(" ".join(map(about, lasting))) or None
            case Kind.HOST_VANISHED if tables:
                gone = sorted(each for each in tables.hosts.items() if self._silent.has_lasted([each]))
                return "; ".join(f"{host} last reported at {instant(at)}" for host, at in gone) or None
            case _:
                return None


def _count(kind: Kind, findings: Findings) -> int | None:
    if kind in _OF_DEAD_LETTERS:
        return findings.depth
    if findings.tables is None:
        return None
    return {Kind.UNDECIDED_EXPIRING: findings.tables.expiring, Kind.NOTHING_SENT: findings.tables.due}.get(kind)


def _oldest_age(kind: Kind, findings: Findings, known_seconds: float) -> float | None:
    tables = findings.tables
    if kind is Kind.OLDEST_AGE_GROWING:
        return tables.dead_letter_due_seconds if tables else None
    if kind not in _OF_DEAD_LETTERS | {Kind.UNDECIDED_EXPIRING}:
        return None
    if tables is not None and tables.oldest_age_seconds is not None:
        return tables.oldest_age_seconds
    # Messages that point to no email have no age but what we saw of it.
    return max(0.0, known_seconds) if kind is Kind.DEAD_LETTERS else None


class Lasting:
    """Since which look each state has been found, by a steady clock. A look that does not find a state ends it."""

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: How long a state must last before it counts.
        """
        self._seconds = seconds
        self._began_at: float | None = None
        self._since: dict[Hashable, float] = {}

    def note(self, states: Collection[Hashable]) -> None:
        """Takes the states that a look found."""
        now = time.monotonic()
        if self._began_at is None:
            self._began_at = now
        self._since = {state: self._since.get(state, now) for state in states}

    def forget(self) -> None:
        """Forgets everything after a missed look: a state may have ended and begun again meanwhile."""
        self._began_at = None
        self._since = {}

    def has_lasted(self, states: Collection[Hashable]) -> bool | None:
        """Whether one of these states has lasted long enough; None if unknown, because the first look found it."""
        since = [self._since[state] for state in states if state in self._since]
        if since and time.monotonic() - min(since) >= self._seconds:
            return True
        return None if self._began_at in since else False
