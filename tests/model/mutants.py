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
    "leases_not_voided": Rules(voids=False, faults=_NONE),
    "proven_emails_leased": Rules(policy=OnUncertain.RESEND, proof_stops_leases=False, faults=frozenset({Fault.EVENT})),
    "pinned_email_fails_over": Rules(keys=True, pins=False, faults=_NONE),
    "mark_ignores_expiry": Rules(expiry_stops_sends=False, faults=_EXPIRY),
    "cancel_ignores_lease": Rules(cancel_takes=UNSENT | {Status.SENDING}, faults=_CANCEL),
    "cancel_ignores_waiting": Rules(cancel_takes=frozenset({Status.PENDING}), faults=_CANCEL | _RESCHEDULE),
    "waiting_never_wakes": Rules(wakes=False, faults=_RESCHEDULE),
    "redelivered_never_wakes": Rules(redelivers=True, wakes=False, faults=_NONE),
}
MUTANTS |= {
    f"without_{state.name}_{event.name}".lower(): Rules(
        table={row: after for row, after in TRANSITIONS.items() if row != (state, event)},
        faults=frozenset({Fault.REFUSAL, Fault.REPLY}),
    )
    for state, event in TRANSITIONS
}
"""One mutant for each row of the product's table of email states. The mutant lacks that row."""
