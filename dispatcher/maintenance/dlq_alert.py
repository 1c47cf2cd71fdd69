"""Looks at the DLQ and at the flow of emails at intervals, on one host for all. `announcing` sends the alerts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

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

_OF_DEAD_LETTERS: Final = frozenset({Kind.DEAD_LETTERS, Kind.DEAD_LETTERS_UNPUBLISHED, Kind.PROBE_FAILED})


@dataclass(frozen=True, slots=True)
class _State:
    """How one kind of alert stands.

    Attributes:
        stands: None if that is unknown: nobody could see it, or it is not known to have lasted.
    """

    stands: bool | None
    count: int | None = None
    age_seconds: float | None = None
    reason: str | None = None


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
        self._oldest: Sequence[str] = ()
        self._raised_at: dict[Kind, datetime] = {}
        self._listeners: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """An event that is set after each look; whoever waits for it clears it."""
        self._listeners.append(asyncio.Event())
        return self._listeners[-1]

    async def run_once(self) -> None:
        """One look, if it is ours to look."""
        if await self._book.consult():
            states = await self._find()
            self.alerts = {kind: self._alert(kind, state) for kind, state in states.items() if state.stands is not None}
        else:
            self._forget_lasting()
            self.alerts = {}
        for listener in self._listeners:
            listener.set()

    async def _find(self) -> dict[Kind, _State]:
        """How the kinds of alerts stand that one look could see."""
        depth = fault = tables = None
        try:
            depth = await self._depth()
        except DispatcherError as error:
            fault = scrub(str(error))
        if not self._book.is_alone:
            with suppress(DispatcherError):
                tables = await self._store.find()
        oldest_seconds = tables.oldest_age_seconds if tables else None
        self._oldest = tables.correlation_ids if tables else ()
        states = {Kind.PROBE_FAILED: _State(depth is None, depth, oldest_seconds, fault)}
        if depth is not None:
            states[Kind.DEAD_LETTERS] = _State(depth > 0, depth, oldest_seconds)
        if tables is None:
            self._forget_lasting()
            return states
        due_seconds = tables.dead_letter_due_seconds
        is_growing = (due_seconds or 0.0) > max(LONGEST_DUE_SECONDS, self.interval_seconds)
        states[Kind.DEAD_LETTERS_UNPUBLISHED] = _State(is_growing, depth, due_seconds)
        states[Kind.UNDECIDED_EXPIRING] = _State(tables.expiring > 0, tables.expiring, oldest_seconds)
        return states | self._lasting_states(tables)

    def _lasting_states(self, tables: TableFindings) -> dict[Kind, _State]:
        """The kinds that count only once they have lasted. A state that changes starts again."""
        idle = [(Kind.NOTHING_SENT, tables.mark)] if tables.due else []
        unusable = {(Kind.PROVIDER_UNUSABLE, trouble.provider): trouble for trouble in tables.troubles}
        hosts = sorted(tables.hosts.items())
        self._lasting.note([*idle, *unusable])
        self._silent.note(hosts)
        waits = scrub(why(tables.waiting, providers=self._providers).detail) if tables.waiting else None
        lost = [about(trouble) for state, trouble in unusable.items() if self._lasting.has_lasted([state])]
        gone = [f"{host} last reported at {instant(at)}" for host, at in hosts if self._silent.has_lasted([(host, at)])]
        return {
            Kind.NOTHING_SENT: _State(self._lasting.has_lasted(idle), tables.due, reason=waits),
            Kind.PROVIDER_UNUSABLE: _State(self._lasting.has_lasted(unusable), reason=scrub(" ".join(lost)) or None),
            Kind.HOST_VANISHED: _State(self._silent.has_lasted(hosts), reason="; ".join(gone) or None),
        }

    def _forget_lasting(self) -> None:
        self._lasting.forget()
        self._silent.forget()

    def _alert(self, kind: Kind, state: _State) -> Alert:
        now = datetime.now(UTC)
        known_at = self._book.raised_at(kind) or self._raised_at.get(kind, now)
        if not state.stands:
            self._raised_at.pop(kind, None)
            return Alert(kind, False, self._queue, known_at, self._host, state.count, is_alone=self._book.is_alone)
        self._raised_at[kind] = known_at
        age_seconds = state.age_seconds
        if age_seconds is None and kind is Kind.DEAD_LETTERS:
            # Messages that point to no email have no age but what we saw of it.
            age_seconds = max(0.0, (now - known_at).total_seconds())
        # Applications choose correlation ids, and some put addresses into them.
        named = [scrub(one)[:MAX_CORRELATION_CHARACTERS] for one in self._oldest] if kind in _OF_DEAD_LETTERS else ()
        return Alert(
            kind,
            True,
            self._queue,
            known_at,
            self._host,
            count=state.count,
            oldest_age_seconds=age_seconds,
            correlation_ids=tuple(named),
            reason=state.reason,
            is_alone=self._book.is_alone,
        )


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
