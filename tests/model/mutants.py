"""Mutants of the protocol. Each mutant lacks one rule, and allows just enough faults to show why the rule is needed."""

from __future__ import annotations

from typing import Final

from dispatcher.domain.status import OnUncertain, Status
from dispatcher.worker.in_flight_email import TRANSITIONS
from tests.model.protocol import UNSENT, Fault, Rules

_NONE: Final = frozenset[Fault]()
_CANCEL: Final = frozenset({Fault.CANCEL})
_RESCHEDULE: Final = frozenset({Fault.RESCHEDULE})
_EXPIRY: Final = frozenset({Fault.EXPIRY})

MUTANTS = {
    "ledger_off": Rules(ledger=False, faults=_NONE),
    "token_fence_off": Rules(tokens=False, faults=_NONE),
    "ack_before_commit": Rules(ack_after_commit=False, faults=frozenset({Fault.DEATH})),
    "check_before_slot": Rules(slot_before_check=False, faults=_NONE),
    "leases_not_voided": Rules(voids=False, faults=_NONE),
    "settled_by_token_alone": Rules(fenced_settlement=False, faults=_NONE),
    "released_by_name": Rules(fenced_release=False, faults=frozenset({Fault.LATE})),
    "recovery_not_confirmed": Rules(confirms_recovery=False, faults=frozenset({Fault.RELAY, Fault.DEATH})),
    "recovery_undone_unfenced": Rules(fenced_undo=False, faults=frozenset({Fault.RELAY})),
    "proven_emails_leased": Rules(policy=OnUncertain.RESEND, proof_stops_leases=False, faults=frozenset({Fault.EVENT})),
    "proven_emails_retried": Rules(proof_stops_retries=False, faults=frozenset({Fault.EVENT, Fault.OPERATOR})),
    "proven_emails_resumed": Rules(proof_stops_waits=False, faults=frozenset({Fault.EVENT, Fault.OPERATOR})),
    "recorded_under_the_workers_name": Rules(own_name=False, faults=frozenset({Fault.REPLY})),
    "pinned_email_fails_over": Rules(keys=True, pins=False, faults=_NONE),
    "pin_not_durable": Rules(keys=True, durable_pins=False, faults=_NONE),
    "refusal_ends_the_doubt": Rules(keys=True, doubts=False, faults=_NONE),
    "lease_ignores_cancel": Rules(lease_takes=frozenset({Status.PENDING, Status.CANCELLED}), faults=_CANCEL),
    "lease_ignores_schedule": Rules(lease_takes=UNSENT, faults=_RESCHEDULE),
    "lease_ignores_expiry": Rules(expiry_stops_leases=False, faults=_EXPIRY),
    "mark_ignores_expiry": Rules(expiry_stops_sends=False, faults=_EXPIRY),
    "cancel_ignores_lease": Rules(cancel_takes=UNSENT | {Status.SENDING}, faults=_CANCEL),
    "cancel_ignores_waiting": Rules(cancel_takes=frozenset({Status.PENDING}), faults=_CANCEL | _RESCHEDULE),
    "cancel_of_finished_emails": Rules(cancel_takes=UNSENT | {Status.HELD}, faults=_CANCEL),
    "cancel_keeps_due": Rules(cancel_clears_due=False, faults=_CANCEL),
    "cancel_ignores_proof": Rules(policy=OnUncertain.RESEND, proof_stops_cancels=False, faults=_CANCEL | {Fault.EVENT}),
    "cancel_ignores_doubt": Rules(doubt_stops_changes=False, faults=_CANCEL | {Fault.PROMOTION}),
    "reschedule_ignores_doubt": Rules(doubt_stops_changes=False, faults=_RESCHEDULE | {Fault.PROMOTION}),
    "cancel_without_clocks": Rules(policy=OnUncertain.RESEND, clocks=False, faults=_CANCEL | {Fault.RELAY}),
    "reschedule_ignores_lease": Rules(reschedule_takes=UNSENT | {Status.SENDING}, faults=_RESCHEDULE),
    "waiting_never_wakes": Rules(wakes=False, faults=_RESCHEDULE),
    "redelivered_never_wakes": Rules(redelivers=True, wakes=False, faults=_NONE),
    "expiry_ignores_waiting": Rules(
        expiry_cancels=frozenset({Status.PENDING, Status.HELD}), wakes=False, faults=_EXPIRY | _RESCHEDULE
    ),
    "expiry_ignores_pending": Rules(expiry_cancels=frozenset({Status.WAITING, Status.HELD}), faults=_EXPIRY),
    "expiry_ignores_lease": Rules(expiry_cancels=UNSENT | {Status.HELD, Status.SENDING}, faults=_EXPIRY),
    "expiry_keeps_dead_letter": Rules(expiry_clears_dead_letter=False, faults=_EXPIRY),
}
MUTANTS |= {
    f"without_{state.name}_{event.name}".lower(): Rules(
        table={row: after for row, after in TRANSITIONS.items() if row != (state, event)},
        faults=frozenset({Fault.REFUSAL, Fault.REPLY}),
    )
    for state, event in TRANSITIONS
}
"""One mutant for each row of the product's table of email states. The mutant lacks that row."""
