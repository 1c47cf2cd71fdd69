"""At intervals, checks the DLQ, and whether emails are being sent. Only one host at a time makes these checks.

`alert_sender` sends the notices.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from dispatcher.domain.alert import Alert, Kind
from dispatcher.domain.controls import PauseScope
from dispatcher.domain.scrub import scrub
from dispatcher.domain.values import dataclass, replace
from dispatcher.domain.waiting import describe_problem, explain_wait
from dispatcher.errors import DispatcherError
from dispatcher.monitor.alert_state import AlertState
from dispatcher.monitor.alert_words import instant
from dispatcher.monitor.dlq_depth import Depth
from dispatcher.store.activity import MISSED_REPORTS
from dispatcher.store.alerts import AlertStore, TableFindings
from dispatcher.telemetry.log import get_log

MAX_CORRELATION_CHARACTERS: Final = 100
LONGEST_DUE_SECONDS: Final = 60.0
"""Dead letters normally reach the DLQ within a second. If a dead letter is due for longer than this, and for longer
than the probe interval, the alert `dead_letters_unpublished` is raised."""

_OF_DEAD_LETTERS: Final = frozenset({Kind.DEAD_LETTERS, Kind.DEAD_LETTERS_UNPUBLISHED, Kind.PROBE_FAILED})


@dataclass(frozen=True, slots=True)
class _State:
    """The state of one kind of alert. `is_firing` is None if the condition already existed at the first check: it may
    have begun long before."""

    is_firing: bool | None
    count: int | None = None
    age_seconds: float | None = None
    reason: str | None = None


class AlertChecks:
    """Raises and resolves alerts. A service of each monitor, but only one monitor at a time makes the checks.

    `alerts` is the result of the last check: one alert, active or resolved, for each kind whose state is known. Empty
    while another monitor makes the checks.
    """

    def __init__(
        self,
        queue: str,
        depth: Depth,
        store: AlertStore,
        alert_state: AlertState,
        *,
        host: str,
        interval_seconds: float,
        after_seconds: float,
        reminder_seconds: float = math.inf,
        providers: Collection[str] = (),
    ) -> None:
        """`after_seconds` without a sent email, a usable provider or a host's report raise an alert; so does a pause
        without an end after `reminder_seconds`."""
        self.alerts: dict[Kind, Alert] = {}
        self.interval_seconds = interval_seconds
        self._queue = queue
        self._depth = depth
        self._store = store
        self._alert_state = alert_state
        self._host = host
        self._providers = providers
        self._reminder_seconds = reminder_seconds
        self._durations = StateDurations(after_seconds)
        # A running host reports about once per interval, so a host counts as silent only after several missed reports.
        self._host_silence = StateDurations(max(after_seconds, MISSED_REPORTS * interval_seconds))
        self._shared_names: set[str] = set()
        self._oldest: Sequence[str] = ()
        self._raised_at: dict[Kind, datetime] = {}
        self._listeners: list[asyncio.Event] = []

    def subscribe(self) -> asyncio.Event:
        """Returns an `asyncio.Event`, which is set after each check. The caller must clear it."""
        self._listeners.append(asyncio.Event())
        return self._listeners[-1]

    async def run_once(self) -> None:
        """Makes one check, unless another monitor makes the checks."""
        if await self._alert_state.refresh():
            states = await self._check()
            self.alerts = {
                kind: self._alert(kind, state) for kind, state in states.items() if state.is_firing is not None
            }
            if not self._alert_state.is_alone:  # the operators' page shows the result of the check
                probe, active = states[Kind.PROBE_FAILED], [each for each in self.alerts.values() if each.is_firing]
                with suppress(DispatcherError):
                    await self._store.save_check(self._host, probe.count, probe.reason, active)
        else:
            self._reset_durations()
            self.alerts = {}
        for listener in self._listeners:
            listener.set()

    async def _check(self) -> dict[Kind, _State]:
        """Makes one check. Returns a state for each kind of alert that could be checked."""
        depth = fault = tables = None
        try:
            depth = await self._depth()
        except DispatcherError as error:
            fault = scrub(str(error))
        if not self._alert_state.is_alone:
            with suppress(DispatcherError):
                tables = await self._store.find()
        oldest_seconds = tables.oldest_age_seconds if tables else None
        self._oldest = tables.correlation_ids if tables else ()
        states = {Kind.PROBE_FAILED: _State(depth is None, depth, oldest_seconds, fault)}
        if depth is not None:
            states[Kind.DEAD_LETTERS] = _State(depth > 0, depth, oldest_seconds)
        if tables is None:
            self._reset_durations()
            return states
        due_seconds = tables.dead_letter_due_seconds
        is_growing = (due_seconds or 0.0) > max(LONGEST_DUE_SECONDS, self.interval_seconds)
        states[Kind.DEAD_LETTERS_UNPUBLISHED] = _State(is_growing, depth, due_seconds)
        states[Kind.UNDECIDED_EXPIRING] = _State(tables.expiring > 0, tables.expiring, oldest_seconds)
        disabled = "; ".join(
            f"webhook {each.webhook_id} ({each.tenant_id or 'all tenants'}): {each.last_error}"
            for each in tables.webhooks
        )
        states[Kind.WEBHOOK_DISABLED] = _State(bool(tables.webhooks), len(tables.webhooks), reason=disabled or None)
        strange = "; ".join(
            f"{count} event{'' if count == 1 else 's'} of {provider} in the last day, such as about email {email_id}"
            for provider, count, email_id in tables.impossible_events
        )
        states[Kind.IMPOSSIBLE_EVENTS] = _State(bool(strange), reason=strange or None)
        ages = [(pause, (datetime.now(UTC) - pause.began_at).total_seconds()) for pause in tables.pauses]
        forgotten = [p.describe() for p, seconds in ages if p.until is None and seconds >= self._reminder_seconds]
        states[Kind.PAUSED] = _State(bool(forgotten), reason=scrub(" ".join(forgotten)) or None)
        return states | self._timed_states(tables)

    def _timed_states(self, tables: TableFindings) -> dict[Kind, _State]:
        """The states of the alerts for a condition that lasts. For `NOTHING_SENT`, the time starts again whenever a
        provider accepts an email; for `HOST_VANISHED`, whenever the host reports."""
        paused = {pause.name for pause in tables.pauses if pause.scope is PauseScope.PROVIDER}
        can_send = not self._providers or not paused.issuperset(self._providers)
        idle = [(Kind.NOTHING_SENT, tables.mark)] if tables.due and can_send else []
        troubles = [trouble for trouble in tables.troubles if trouble.provider not in paused]
        unusable = {(Kind.PROVIDER_UNUSABLE, trouble.provider): trouble for trouble in troubles}
        hosts = sorted(tables.hosts.items())
        self._durations.record([*idle, *unusable])
        self._host_silence.record([*hosts, *tables.shared_names])
        waits = scrub(explain_wait(tables.waiting, providers=self._providers).detail) if tables.waiting else None
        lost = [describe_problem(trouble) for state, trouble in unusable.items() if self._durations.has_lasted([state])]
        vanished = [
            f"{host} last reported at {instant(at)}"
            for host, at in hosts
            if self._host_silence.has_lasted([(host, at)])
        ]
        # A name that was shared only for a moment may be that of a host that has lost its network and connects again.
        shared = {name for name in tables.shared_names if self._host_silence.has_lasted([name])}
        for name in sorted(shared - self._shared_names):
            get_log().warning("host.name_shared", host=name)
        self._shared_names = shared
        return {
            Kind.NOTHING_SENT: _State(self._durations.has_lasted(idle), tables.due, reason=waits),
            Kind.PROVIDER_UNUSABLE: _State(self._durations.has_lasted(unusable), reason=scrub(" ".join(lost)) or None),
            Kind.HOST_VANISHED: _State(self._host_silence.has_lasted(hosts), reason="; ".join(vanished) or None),
        }

    def _reset_durations(self) -> None:
        self._durations.clear()
        self._host_silence.clear()

    def _alert(self, kind: Kind, state: _State) -> Alert:
        now = datetime.now(UTC)
        known_at = self._alert_state.raised_at(kind) or self._raised_at.get(kind, now)
        is_alone, is_firing = self._alert_state.is_alone, bool(state.is_firing)
        alert = Alert(kind, is_firing, self._queue, known_at, self._host, state.count, is_alone=is_alone)
        if not is_firing:
            self._raised_at.pop(kind, None)
            return alert
        self._raised_at[kind] = known_at
        age_seconds = state.age_seconds
        if age_seconds is None and kind is Kind.DEAD_LETTERS:
            # A message that points to no email has no known age. Use the time since the alert was raised.
            age_seconds = max(0.0, (now - known_at).total_seconds())
        # Applications choose the correlation ids, and might put addresses into them. `scrub` removes the addresses.
        named = [scrub(one)[:MAX_CORRELATION_CHARACTERS] for one in self._oldest] if kind in _OF_DEAD_LETTERS else ()
        return replace(alert, oldest_age_seconds=age_seconds, correlation_ids=tuple(named), reason=state.reason)


class StateDurations:
    """Measures how long the states that the checks find have lasted, such as "provider ses is unusable": from the first
    check that finds it to the first that does not. `has_lasted` means at least `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began_at: float | None = None
        self._since: dict[Hashable, float] = {}

    def record(self, states: Collection[Hashable]) -> None:
        now = time.monotonic()
        if self._began_at is None:
            self._began_at = now
        self._since = {state: self._since.get(state, now) for state in states}

    def clear(self) -> None:
        """Deletes all states, because a check was not made here: a state may have ended and begun again in the
        meantime."""
        self._began_at = None
        self._since = {}

    def has_lasted(self, states: Collection[Hashable]) -> bool | None:
        """Whether at least one of these states has lasted long enough. None if that is unknown, because the oldest of
        these states already existed at the first check."""
        since = [self._since[state] for state in states if state in self._since]
        if since and time.monotonic() - min(since) >= self._seconds:
            return True
        return None if self._began_at in since else False
