"""Executes the store's statements in random order on two emails, and compares each email with its model (`known`).

Each step first brings one email into the state that the step needs. So the first owner often writes after it has lost
the lease, or after another worker has a new lease. Everything else that happened to the emails before the step is
random. After every step the tables must match the model. To make leases expire without a wait, the test changes their
end in the table. These ends are in the past and differ only by microseconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from psycopg_pool import AsyncConnectionPool

from dispatcher.actions.batch import Judged
from dispatcher.actions.dlq import DiscardDead
from dispatcher.domain.event import EventKind, OutgoingKind, ProviderEvent
from dispatcher.domain.failures import ItemOutcome
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession, Pool
from dispatcher.store.events import EventRow, store_events
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.store.queries import ids_within
from dispatcher.store.replays import create_replay, get_replay, replay_next
from dispatcher.store.settlement import (
    FoundLease,
    find_expiring,
    find_leases,
    find_recovered,
    note_crashes,
    release_found,
)
from dispatcher.store.statements import fetch
from tests.ops.dead_emails import decide
from tests.store.books import Books
from tests.store.known import Known
from tests.store.results import RECORDABLE, result

T = TypeVar("T")

NEVER: Final = datetime.now(UTC) + timedelta(days=300)
EXPIRED: Final = datetime(2020, 1, 1, tzinfo=UTC)
WORKERS: Final = ("worker-1", "worker-2")
RELAY: Final = "slot-1:relay"
PERSON: Final[dict[str, Any]] = {"actor": "ann@ops-1", "reason": "test", "is_test": False}
LONG_SECONDS: Final = 600
HASHER: Final = AddressHasher(b"k" * 32)
EMPTIED: Final = (
    b"delete from email_log",
    b"delete from email_idempotency",
    b"delete from email_attempt",
    b"delete from email_hourly",
    b"delete from outgoing_event",
    b"update outgoing_feed set is_on = true",
    b"delete from email_event",
)

NUMBER: Final = st.integers(0, 1)
WORKER: Final = st.sampled_from(WORKERS)
STATUS: Final = st.sampled_from(Status)
RECORDED: Final = st.sampled_from(sorted(RECORDABLE))
"""The statuses that a worker's record may give an email."""


Write = Callable[["Machine", Known, str, Lease, Status], None]
"""A worker's statement about an email, under a lease that the worker has or had. Some statements use the status."""


WRITES: Final = (
    "_renew",
    # These three statements come before the statements that end the current lease or prove that the email was sent,
    # because no lease is left to settle afterwards.
    "_record_as_seen",
    "_release_as_seen",
    "_rescue_as_seen",
    "_release",
    "_release_unanswered",
    "_record",
    "_recover",
    "_blame",
    "_renew",
    "_give_back",
    "_lease_too",
)


@dataclass(frozen=True)
class Loss:
    """What happens between a worker's lease and the worker's next statement: the relay finds the expired lease, another
    statement follows, and `next_worker` leases the email. In most cases the worker loses the lease."""

    number: int
    worker: str
    is_expired: bool
    happen: Write
    status: Status
    is_leased_again: bool
    next_worker: str
    is_expired_again: bool


class Sessions:
    """The sessions that all runs share. Commits do not wait for the disk, because no process dies in these tests."""

    def __init__(self, url: str, books: Books) -> None:
        self.loop = asyncio.new_event_loop()
        self.books = books
        self.pool: Pool = AsyncConnectionPool(url, kwargs={"autocommit": True}, min_size=1, open=False)
        self.run(self.pool.open())
        self.relay: AsyncSession = self.run(psycopg.AsyncConnection.connect(url, autocommit=True))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def store(self, worker: str) -> LeaseStore:
        return LeaseStore(self.pool, worker=worker, slot=worker)

    def close(self) -> None:
        self.run(self.relay.close())
        self.run(self.pool.close())
        self.loop.close()


class Machine(RuleBasedStateMachine):
    """One run. The tables are empty at its start."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__()
        self.run, self.relay, self.books = sessions.run, sessions.relay, sessions.books
        self.outbox = Outbox(sessions.relay)
        self.stores = {name: sessions.store(name) for name in (*WORKERS, RELAY)}
        for statement in EMPTIED:
            self.books.connection.execute(statement)
        self.instant = 0
        self.known: dict[UUID, Known] = {}
        self.counted: Counter[str] = Counter()
        self.expired: list[FoundLease] = []

    @initialize(policy=st.sampled_from([None, *OnUncertain]))
    def begin(self, policy: OnUncertain | None) -> None:
        self.two = [self._enqueued(policy), self._enqueued(None)]

    # Methods that bring an email into a state.

    def _enqueued(self, policy: OnUncertain | None, *, is_scheduled: bool = False, has_expiry: bool = False) -> Known:
        times = {
            "send_at": NEVER if is_scheduled else None,
            "expires_at": NEVER + timedelta(days=1) if has_expiry else None,
        }
        email_id = self.books.enqueue_one(on_uncertain=policy, **times)
        self.known[email_id] = known = Known(email_id, self.books.key(email_id), policy, self._now(), times)
        known.has_expiry = has_expiry
        if is_scheduled:
            known.status, known.due_since = Status.WAITING, None
        return known

    def _now(self) -> int:
        self.instant += 1
        return self.instant

    def _prepared(self, number: int, status: Status, worker: str = WORKERS[0]) -> Known:
        """Brings an email into this status, and returns the email. Replaces an email that is finished for ever, or has
        expired, by a new email."""
        known = self.two[number]
        if known.is_settleable:
            self._settle_proven()
        if known.status is status and not known.is_over:
            return known
        if known.status in (Status.SENT, Status.CANCELLED) or known.is_over:
            self.two[number] = known = self._enqueued(known.policy)
        if known.status is Status.WAITING and status not in (Status.WAITING, Status.CANCELLED):
            self._reschedule(known, EXPIRED)
            self._wake()
        if status in (Status.WAITING, Status.CANCELLED):
            known = self._prepared(number, Status.PENDING)
            if status is Status.WAITING:
                self._reschedule(known, NEVER)
            else:
                self._cancel(known)
            return known
        if known.is_dead:
            self._replay(known, include_held=True)
        if known.status is Status.PENDING and status is not Status.PENDING:
            self._lease([known], worker)
        if known.status is not status:
            self._record(known, *known.leases[-1], status)
        return known

    # Statements about emails that are not sent yet.

    def _cancel(self, known: Known, tenant_id: str | None = None) -> None:
        parameters = {**ids_within([known.email_id]), "tenant_id": tenant_id, **PERSON}
        verdict = "already_cancelled" if known.status is Status.CANCELLED else "too_late"
        expected = Judged(known.email_id, "cancelled" if known.is_unsent else verdict, known.status)
        assert self.run(fetch(self.relay, "cancel_emails", parameters, into=Judged)) == [expected]
        if known.is_unsent:
            known.cancel("cancelled", self._now())

    def _reschedule(self, known: Known, send_at: datetime) -> None:
        expires_first = known.is_unsent and (known.is_over or (known.has_expiry and send_at > NEVER))
        is_moved = known.is_unsent and not expires_first
        parameters = {**ids_within([known.email_id]), "send_at": send_at, "tenant_id": None, **PERSON}
        verdict = "rescheduled" if is_moved else "expires_first" if expires_first else "too_late"
        expected = Judged(known.email_id, verdict, known.status)
        assert self.run(fetch(self.relay, "reschedule_emails", parameters, into=Judged)) == [expected]
        if is_moved:
            known.reschedule(self._now(), is_overdue=send_at < NEVER)

    def _wake(self) -> None:
        due = [known for known in self.known.values() if known.status is Status.WAITING and known.is_overdue]
        assert self.run(self.outbox.wake(100)) == len(due)
        for known in due:
            known.close(Status.PENDING, self._now())

    def _cancel_expired(self) -> None:
        over = [
            known
            for known in self.known.values()
            if known.is_over and known.proven_by is None and (known.is_unsent or known.status is Status.HELD)
        ]
        cancelled = {email.email_id: email.previous_status for email in self.run(self.outbox.cancel_expired(100))}
        assert cancelled == {known.email_id: known.status for known in over}
        for known in over:
            known.cancel("expired", self._now())

    # Statements of a worker, under a lease that the worker has or had.

    def _lease(self, asked: list[Known], worker: str, key: str | None = None) -> None:
        keys = {known.email_id: key or known.key for known in asked}
        found = {lease.email_id: lease for lease in self.run(self.stores[worker].lease(keys, 60))}
        wanted = [known for known in asked if not key and known.may_be_leased]
        assert set(found) == {known.email_id for known in wanted}
        for known in wanted:
            lease = found[known.email_id]
            known.lease(worker)
            known.leases.append((worker, lease))
            assert (lease.token, lease.attempt_number) == (known.token, known.attempts)

    def _lease_too(self, known: Known, worker: str, _: Lease, __: Status) -> None:
        self._lease([known], worker, "another")
        self._lease([known], _other(worker))

    def _expire(self, known: Known) -> None:
        if known.status is Status.SENDING:
            known.expired_at = EXPIRED + timedelta(microseconds=known.expiries)
            known.expiries += 1
            self.books.change(known.email_id, locked_until=known.expired_at)

    def _renew(self, known: Known, worker: str, lease: Lease, _: Status) -> None:
        before = self.books.row(known.email_id)["locked_until"]
        ours = self.run(self.stores[worker].renew({lease.email_id: lease.token}, 60))
        assert bool(ours) == (known.is_under(lease) and known.proven_by is None)
        if known.is_under(lease):
            known.expired_at = None
            assert self.books.row(known.email_id)["locked_until"] > before

    def _release(self, known: Known, worker: str, lease: Lease, _: Status) -> None:
        ours = self.run(self.stores[worker].release({lease.email_id: lease.token}))
        assert bool(ours) == known.is_under(lease)
        if ours:
            known.release(self._now(), token_moves=False)
        elif known.rescued_token == lease.token:
            known.recover(self._now())

    def _release_unanswered(self, known: Known, worker: str, _: Lease, __: Status) -> None:
        self.run(self.stores[worker].release_unanswered([known.email_id]))
        if known.owner == worker:
            known.release(self._now(), token_moves=False)
        elif known.rescued_token is not None and known.rescue_of is not None and known.rescue_of[0] == worker:
            known.recover(self._now())

    def _record(self, known: Known, worker: str, lease: Lease, status: Status, error_type: str | None = None) -> None:
        lease_seconds = LONG_SECONDS if status is Status.SENDING else None
        code = "250" if len(known.rows) % 2 else None  # then `record`, not `record_accepted`, stores an acceptance
        closing = result(lease, status, lease_seconds=lease_seconds, error_type=error_type, provider_code=code)
        ours = self.run(self.stores[worker].record([closing]))
        is_evidence = status is Status.SENT and known.status is not Status.SENT
        is_stopped = status is Status.SENDING and known.proven_by is not None
        assert bool(ours) == ((known.is_under(lease) and not is_stopped) or is_evidence)
        assert self.run(self.stores[worker].is_recorded(closing))
        known.rows.append((closing.attempt_number, closing.outcome, worker))
        if ours:
            self.counted[closing.outcome] += 1
            known.record(status, closing.outcome, self._now())
            if error_type == Reason.SUPPRESSED:
                known.dead_letter_since = None
                known.announced[-1] = "suppressed"
        elif known.rescued_token == lease.token and not is_stopped:
            self.counted[closing.outcome] += 1
            known.record_after_rescue(status, closing.outcome, self._now())

    # Statements of the relay about dead or frozen workers.

    def _give_back(self, _: Known, worker: str, __: Lease, ___: Status) -> None:
        gone = [known for known in self.known.values() if known.owner == worker]
        leases = self.run(find_leases(self.relay, worker))
        assert {lease.email_id for lease in leases} == {known.email_id for known in gone}
        assert self.run(release_found(self.relay, leases)) == {known.email_id for known in gone}
        for known in gone:
            known.release(self._now(), token_moves=True)

    def _recover(self, _: Known, worker: str, __: Lease, ___: Status) -> None:
        gone = [
            k for k in self.known.values() if k.rescued_token is not None and k.rescue_of and k.rescue_of[0] == worker
        ]
        found = self.run(find_recovered(self.relay, worker))
        assert found == {known.email_id: known.rescued_token for known in gone}
        if found:
            assert self.run(self.stores[RELAY].revert_recovery(found)) == set(found)
        for known in gone:
            known.recover(self._now())

    def _blame(self, known: Known, worker: str, lease: Lease, status: Status) -> None:
        most_crashes = 1 if status is Status.FAILED else 3
        for dead in (_other(worker), worker):
            crashed = self.run(note_crashes(self.relay, dead, {lease.email_id: lease.token}, most_crashes))
            assert bool(crashed) == (known.is_under(lease) and known.owner == dead)
            if crashed:
                known.crash(self._now(), most_crashes)

    def _look(self, worker: str) -> None:
        self.expired = self.run(find_expiring(self.relay, [worker]))
        wanted = {known.email_id for known in self.known.values() if known.expired_at and known.owner == worker}
        assert {lease.email_id for lease in self.expired} == wanted

    def _release_as_seen(self, *_: object) -> None:
        if self.expired:
            released = self.run(release_found(self.relay, self.expired))
            wanted = [known for lease in self.expired for known in self._as_seen(lease)]
            assert released == {known.email_id for known in wanted}
            for known in wanted:
                known.release(self._now(), token_moves=True)

    def _rescue_as_seen(self, *_: object) -> None:
        rescued = self.run(self.outbox.recover_expired(OnUncertain.RESEND, 5, self.expired))
        wanted = [known for lease in self.expired for known in self._as_seen(lease)]
        assert {row.email_id for row in rescued} == {known.email_id for known in wanted}
        for known in wanted:
            known.rescue(OnUncertain.RESEND, 5, self._now())

    def _record_as_seen(self, _: Known, __: str, ___: Lease, status: Status) -> None:
        for seen in self.expired if status is not Status.SENDING else []:
            lease = Lease(seen.email_id, None, seen.token, 9, None, None)
            closing = result(lease, status, expired_at=seen.expired_at)
            recorded = self.run(self.stores[RELAY].record([closing]))
            wanted = self._as_seen(seen)
            assert recorded == {known.email_id for known in wanted}
            for known in wanted:
                known.rows.append((9, closing.outcome, RELAY))
                self.counted[closing.outcome] += 1
                known.record(status, closing.outcome, self._now())

    def _as_seen(self, lease: FoundLease) -> list[Known]:
        known = self.known[lease.email_id]
        return [known] if (known.token, known.expired_at) == (lease.token, lease.expired_at) else []

    def _rescue(
        self,
        *_: object,
        default: OnUncertain = OnUncertain.RESEND,
        max_attempts: int = 5,
        here: tuple[str, ...] = (),
        grace_seconds: float = 0.0,
    ) -> None:
        found = self.run(self.outbox.find_expiring(here, within_seconds=10 * LONG_SECONDS))
        leased = [known for known in self.known.values() if known.status is Status.SENDING and known.owner not in here]
        assert {lease.email_id: lease.has_run_out for lease in found} == {
            known.email_id: bool(known.expired_at) for known in leased
        }
        gone = [known for known in leased if known.expired_at and not grace_seconds]
        rescue = self.outbox.recover_expired(default, max_attempts, found, grace_seconds=grace_seconds)
        assert {row.email_id for row in self.run(rescue)} == {known.email_id for known in gone}
        for known in gone:
            known.rescue(default, max_attempts, self._now())

    # Statements of an operator.

    def _replay(self, known: Known, *, include_held: bool) -> None:
        way: dict[str, Any] = {"source": "ids", "selection": "{}", "per_second": None, "force": False, **PERSON}
        # A list of one email is replayed at once; the emails of a longer list, one by one.
        ids = [known.email_id] if include_held else [known.email_id, UUID(int=2**128 - 1)]
        replay_id = self.run(create_replay(self.relay, email_ids=ids, include_held=include_held, **way))
        outcome = known.replay_outcome(include_held=include_held)
        if len(ids) > 1:
            assert self.run(replay_next(self.relay, replay_id=replay_id, after=None)) == (known.email_id, outcome)
        assert self.run(get_replay(self.relay, replay_id)).outcomes == {outcome: 1}
        if outcome is ItemOutcome.REPLAYED:
            known.replay(self._now())

    # The steps, which run in random order.

    def _lost(self, loss: Loss) -> tuple[Known, str, Lease]:
        """Makes the events of `loss` happen. Returns the email, the worker that had the first lease, and that lease."""
        known = self._prepared(loss.number, Status.SENDING, loss.worker)
        owner, lease = known.leases[-1]
        if loss.is_expired:
            self._expire(known)
            self._look(_other(owner))
            self._look(owner)
        loss.happen(self, known, owner, lease, loss.status)
        if loss.is_leased_again:
            self._prepared(loss.number, Status.SENDING, loss.next_worker)
        if loss.is_expired_again:
            self._expire(known)
        self.tables_are_as_known()
        return known, owner, lease

    losses = st.builds(
        Loss,
        number=NUMBER,
        worker=WORKER,
        is_expired=st.booleans(),
        happen=st.sampled_from(
            [_renew, _release, _record, _lease_too, _give_back, _blame, _release_as_seen, _record_as_seen, _rescue]
        ),
        status=RECORDED,
        is_leased_again=st.booleans(),
        next_worker=WORKER,
        is_expired_again=st.booleans(),
    )

    @rule(loss=losses, first=st.sampled_from(WRITES), status=RECORDED, is_proved=st.booleans())
    def write_late(self, loss: Loss, first: str, status: Status, is_proved: bool) -> None:
        """No statement under a lost lease changes the email, unless the statement is evidence."""
        known, owner, lease = self._lost(loss)
        for name in (first, *WRITES):
            getattr(self, name)(known, owner, lease, status)
        for _ in range(2 * is_proved):
            self._record(known, owner, lease, Status.SENT)

    @rule(
        number=NUMBER,
        happen=st.sampled_from([_renew, _give_back, _release]),
        is_expired_again=st.booleans(),
        settle=st.sampled_from([_record_as_seen, _release_as_seen, _rescue_as_seen]),
        status=st.sampled_from([Status.SENT, Status.FAILED]),
    )
    def settle_late(self, number: int, happen: Write, is_expired_again: bool, settle: Write, status: Status) -> None:
        """The relay settles a lease that changed after the relay read it."""
        worker = WORKERS[0]
        loss = Loss(number, worker, True, happen, status, True, worker, is_expired_again)
        settle(self, *self._lost(loss), status)

    @rule(number=NUMBER, is_reported=st.booleans(), then=st.sampled_from([_renew, _release_unanswered, _give_back]))
    def defer(self, number: int, is_reported: bool, then: Write) -> None:
        known = self._prepared(number, Status.SENDING)
        if is_reported:
            self._report(known, EventKind.DELIVERED)
        self._record(known, *known.leases[-1], Status.SENDING)
        then(self, known, *known.leases[-1], Status.SENDING)

    @rule(number=NUMBER, worker=WORKER, status=STATUS, is_expired=st.booleans(), key=st.sampled_from([None, "another"]))
    def lease(self, number: int, worker: str, status: Status, is_expired: bool, key: str | None) -> None:
        known = self._prepared(number, status)
        if is_expired:
            self._expire(known)
        self._lease(self.two, worker, key)

    @rule(
        number=NUMBER,
        status=STATUS,
        kinds=st.lists(
            st.sampled_from([EventKind.ACCEPTED, EventKind.DELIVERED, EventKind.REJECTED]), min_size=1, unique=True
        ),
        is_leased=st.booleans(),
        then=st.sampled_from([_record, _release, _renew, _rescue, _lease_too]),
        recorded=RECORDED,
        is_settled=st.booleans(),
    )
    def report(
        self,
        number: int,
        status: Status,
        kinds: list[EventKind],
        is_leased: bool,
        then: Write,
        recorded: Status,
        is_settled: bool,
    ) -> None:
        """The provider reports each event twice. Other statements may come before the events settle the email."""
        known = self._prepared(number, status)
        for kind in kinds:
            self._report(known, kind)
        self.tables_are_as_known()
        if is_leased:
            self._lease([known], WORKERS[0])
        if known.leases:
            then(self, known, *known.leases[-1], recorded)
        if is_settled:
            self._settle_proven()

    def _report(self, known: Known, kind: EventKind) -> None:
        event = ProviderEvent(
            email_id=known.email_id, provider="smtp", kind=kind, happened_at=EXPIRED, recipient="ann@example.org"
        )
        row = EventRow.of(event, HASHER)
        is_new = kind not in known.reported | known.impossible
        is_possible = is_new and known.may_be_accepted
        (stored,) = self.run(store_events(self.relay, [row, row], SuppressionRules()))
        assert (stored.new, stored.impossible, stored.duplicates) == (is_possible, is_new - is_possible, 2 - is_new)
        if is_new and not is_possible:
            known.impossible.add(kind)
        if is_possible:
            known.report(kind, "smtp")
            assert stored.settleable == ([known.email_id] if known.is_settleable else [])

    def _settle_proven(self) -> None:
        settled = {email.email_id: email.status for email in self.run(self.outbox.settle_proven(100))}
        changed = {}
        for known in self.known.values():
            if known.is_settleable:
                before = known.status
                known.settle(self._now())
                self.counted["accepted"] += known.status is Status.SENT
                if known.status is not before:
                    changed[known.email_id] = known.status
        assert settled == changed

    @rule(
        number=NUMBER,
        is_scheduled=st.booleans(),
        has_expiry=st.booleans(),
        send_at=st.sampled_from([None, EXPIRED, NEVER, NEVER + timedelta(days=2)]),
        is_woken=st.booleans(),
    )
    def schedule(
        self, number: int, is_scheduled: bool, has_expiry: bool, send_at: datetime | None, is_woken: bool
    ) -> None:
        """A new email. It is rescheduled, and woken if its time has come."""
        policy = self.two[number].policy
        self.two[number] = known = self._enqueued(policy, is_scheduled=is_scheduled, has_expiry=has_expiry)
        self._lease([known], WORKERS[0])
        if send_at is not None:
            self._reschedule(known, send_at)
        if is_woken:
            self._wake()

    @rule(
        number=NUMBER,
        status=STATUS,
        is_first=st.booleans(),
        then=st.sampled_from([_record, _release, _renew, _lease_too, _release_unanswered, _give_back]),
        recorded=RECORDED,
        is_rescheduled=st.booleans(),
    )
    def cancel(
        self, number: int, status: Status, is_first: bool, then: Write, recorded: Status, is_rescheduled: bool
    ) -> None:
        """The row decides whether it is too late. Afterwards, a worker writes under a lease that it has or had."""
        known = self._prepared(number, Status.SENDING if is_first else status)
        if is_first:
            self._release(known, *known.leases[-1], Status.PENDING)
        if is_rescheduled:
            self._reschedule(known, NEVER)
        self._cancel(known)
        self.tables_are_as_known()
        if known.leases:
            then(self, known, *known.leases[-1], recorded)
        self._reschedule(known, NEVER)
        self._cancel(known)

    @rule(
        number=NUMBER,
        status=STATUS,
        is_proven=st.booleans(),
        then=st.sampled_from([_record, _release, _renew, _lease_too]),
        recorded=RECORDED,
        is_cancelled=st.booleans(),
        include_held=st.booleans(),
    )
    def expire(
        self,
        number: int,
        status: Status,
        is_proven: bool,
        then: Write,
        recorded: Status,
        is_cancelled: bool,
        include_held: bool,
    ) -> None:
        """An email expires. No worker leases it, no operator replays it, and the relay cancels it."""
        known = self._prepared(number, status)
        if is_proven:
            self._report(known, EventKind.DELIVERED)
        self.books.change(known.email_id, expires_at=EXPIRED)
        known.has_expiry = known.is_over = True
        self._lease([known], WORKERS[0])
        self._reschedule(known, EXPIRED)
        self.publish(1 - number, is_late=False)
        if known.is_dead:
            self._replay(known, include_held=include_held)
        if is_cancelled:
            self._cancel_expired()
        if known.leases:
            then(self, known, *known.leases[-1], recorded)
        self._cancel_expired()

    @rule(number=NUMBER, is_late=st.booleans())
    def publish(self, number: int, is_late: bool) -> None:
        due = self.run(self.outbox.find_publish_due(100))
        wanted = [known for known in self.known.values() if known.due_since and not known.is_over]
        assert {row.email_id for row in due} == {known.email_id for known in wanted}
        looked = self._now()
        if is_late:
            known = self._prepared(number, Status.SENDING)
            self._release(known, *known.leases[-1], known.status)
        if due:
            self.run(self.outbox.mark_published({row.email_id: row.due_at for row in due}))
        for known in wanted:
            known.due_since = known.due_since if known.due_since and known.due_since > looked else None

    @rule(
        number=NUMBER,
        is_in_doubt=st.booleans(),
        touch=st.sampled_from([None, None, Status.PENDING, Status.SENDING, Status.HELD]),
        write=st.sampled_from([_record, _release, _release_unanswered, _recover]),
        status=RECORDED,
        again=st.sampled_from([_record, _release, _release_unanswered, _recover]),
        is_older=st.booleans(),
        is_discarded=st.booleans(),
    )
    def owner_returns(
        self,
        number: int,
        is_in_doubt: bool,
        touch: Status | None,
        write: Write,
        status: Status,
        again: Write,
        is_older: bool,
        is_discarded: bool,
    ) -> None:
        """The worker that had the last lease or an older lease returns after a recovery. An operator may have replayed
        or discarded the email before."""
        known = self._prepared_after_doubt(number, Status.SENDING, is_in_doubt)
        owner, lease = known.leases[0 if is_older else -1]
        self._expire(known)
        self._rescue(default=OnUncertain.HOLD)
        if is_discarded:
            self._discard(known)
        if touch is not None and known.is_dead:
            self._replay(known, include_held=True)
            self._prepared(number, touch, _other(owner))
        self._release_unanswered(known, _other(owner), lease, status)
        self.tables_are_as_known()
        write(self, known, owner, lease, status)
        self.tables_are_as_known()
        again(self, known, owner, lease, status)

    @rule(number=NUMBER)
    def suppress_every_recipient(self, number: int) -> None:
        known = self._prepared(number, Status.SENDING)
        self._record(known, *known.leases[-1], Status.FAILED, Reason.SUPPRESSED.value)
        known.announced[-1] = OutgoingKind.SUPPRESSED

    @rule(number=NUMBER, status=STATUS, is_late=st.booleans())
    def publish_dead_letters(self, number: int, status: Status, is_late: bool) -> None:
        known = self._prepared(number, status)
        due = self.run(self.outbox.find_dead_letter_due(100))
        wanted = [known for known in self.known.values() if known.dead_letter_since]
        assert {row.email_id for row in due} == {known.email_id for known in wanted}
        looked = self._now()
        if is_late:
            self._prepared(number, Status.PENDING)
            self._prepared(number, Status.FAILED)
        if due:
            self.run(self.outbox.mark_dead_lettered({row.email_id: row.failed_at for row in due}))
        for known in wanted:
            since = known.dead_letter_since
            known.dead_letter_since = since if since and since > looked else None

    @rule(
        number=NUMBER,
        worker=WORKER,
        is_replayed=st.booleans(),
        is_expired=st.booleans(),
        default=st.sampled_from(OnUncertain),
        max_attempts=st.integers(1, 3),
        here=st.sampled_from([(), *((worker,) for worker in WORKERS)]),
        grace_seconds=st.sampled_from([0.0, 0.0, 1e10]),
    )
    def rescue(
        self,
        number: int,
        worker: str,
        is_replayed: bool,
        is_expired: bool,
        default: OnUncertain,
        max_attempts: int,
        here: tuple[str, ...],
        grace_seconds: float,
    ) -> None:
        if is_replayed:
            self._prepared(number, Status.FAILED)
        known = self._prepared(number, Status.SENDING, worker)
        if is_expired:
            self._expire(known)
        self._rescue(default=default, max_attempts=max_attempts, here=here, grace_seconds=grace_seconds)

    @rule(number=NUMBER, status=STATUS, is_out=st.booleans(), age_seconds=st.sampled_from([0.0, 1e6]))
    def republish_vanished_emails(self, number: int, status: Status, is_out: bool, age_seconds: float) -> None:
        self._prepared(number, status)
        if is_out:
            self.publish(number, is_late=False)
        everything = [] if age_seconds else self.known.values()
        gone = [known for known in everything if known.status is Status.PENDING and not known.due_since]
        assert bool(self.run(self.outbox.find_lost_messages(age_seconds))) == bool(gone)
        republished = self.run(self.outbox.republish_lost(["normal"], age_seconds, 100, OnUncertain.HOLD, 5))
        assert republished == (len(gone), [])
        for known in gone:
            known.due_since = self._now()

    def _prepared_after_doubt(self, number: int, status: Status, is_in_doubt: bool) -> Known:
        """Like `_prepared`, but if `is_in_doubt`, the email had an uncertain attempt before."""
        if is_in_doubt:
            known = self._prepared(number, Status.SENDING)
            self._record(known, *known.leases[-1], Status.PENDING)
        return self._prepared(number, status)

    @rule(number=NUMBER, status=STATUS, is_in_doubt=st.booleans(), include_held=st.booleans())
    def replay(self, number: int, status: Status, is_in_doubt: bool, include_held: bool) -> None:
        self._replay(self._prepared_after_doubt(number, status, is_in_doubt), include_held=include_held)

    @rule(number=NUMBER, status=STATUS)
    def discard_a_dead_letter(self, number: int, status: Status) -> None:
        known = self._prepared(number, status)
        for _ in range(2):
            self._discard(known)

    def _discard(self, known: Known) -> None:
        (verdict,) = self.run(decide(self.relay, DiscardDead(reason=PERSON["reason"]), known.email_id))
        discarded = verdict == "discarded"
        assert discarded == (known.is_dead and not known.is_discarded)
        if discarded:
            known.is_discarded, known.dead_letter_since = True, None

    @invariant()
    def tables_are_as_known(self) -> None:
        rows = {row["email_id"]: row for row in self.books.rows()}
        for known in self.known.values():
            assert _told(rows[known.email_id]) == _expected(known)

    @invariant()
    def the_feed_has_each_event_once(self) -> None:
        found: dict[UUID, list[str]] = {known.email_id: [] for known in self.known.values()}
        for row in self.books.select("select email_id, kind from outgoing_event order by made_in, position"):
            found[row["email_id"]].append(row["kind"])
        assert found == {known.email_id: known.announced for known in self.known.values()}

    @invariant()
    def other_tables_agree(self) -> None:
        assert Counter(self.books.hourly()) == self.counted
        attempts = self.books.select("select email_id, attempt_number, outcome, worker from every_attempt")
        wanted = Counter((known.email_id, *row) for known in self.known.values() for row in known.rows)
        assert Counter(tuple(row.values()) for row in attempts) == wanted


def _other(worker: str) -> str:
    return WORKERS[worker == WORKERS[0]]


def _told(row: dict[str, Any]) -> dict[str, Any]:
    lasts = row["status"] == Status.SENDING and row["locked_until"] > datetime.now(UTC)
    return {
        "status": row["status"],
        "token": row["lease_token"],
        "attempts": (row["attempt_count"], row["attempt_base"], row["crash_count"]),
        "lock": (row["locked_by"], "lasts" if lasts else row["locked_until"].timestamp()),
        "due": (row["publish_due_at"] is not None, row["dead_letter_due_at"] is not None),
        "waits": row["wait_until"] and row["wait_until"] <= datetime.now(UTC),
        "cancelled": row["error_type"] if row["status"] == Status.CANCELLED else None,
        "sent": row["sent_at"] is not None,
        "discarded": row["dead_letter_discarded_at"] is not None,
        "proven": row["proven_by"],
        "uncertain": row["was_uncertain"],
        "rescued": (row["rescued_from"], row["rescued_token"], row["rescued_in_doubt"]),
    }


def _expected(known: Known) -> dict[str, Any]:
    ended = known.expired_at.timestamp() if known.expired_at else 0.0
    lasts = known.status is Status.SENDING and not known.expired_at
    return {
        "status": known.status,
        "token": known.token,
        "attempts": (known.attempts, known.attempt_base, known.crashes),
        "lock": (known.owner, "lasts" if lasts else ended),
        "due": (known.due_since is not None, known.dead_letter_since is not None),
        "waits": known.is_overdue if known.status is Status.WAITING else None,
        "cancelled": known.cancelled_by if known.status is Status.CANCELLED else None,
        "sent": known.status is Status.SENT,
        "discarded": known.is_discarded,
        "proven": known.proven_by,
        "uncertain": known.was_uncertain,
        "rescued": known.rescue_of or (None, None, None),
    }
