"""What can become of an email: every status, and every transition between two of them, in one table.

    pending ──lease──▶ sending ──accepted──▶ sent
       ▲  ▲               │ ├─ deferred, attempts left: stays sending (same lease), tries again in process
       │  │               │ ├─ rejected, or attempts used up ──▶ failed ──▶ DLQ
       │  └── released ───┘ └─ outcome unknown: policy hold ──▶ held ──▶ DLQ     policy resend ──▶ pending
       ├──────────────── replay (a person) ◀── failed | held         whatever it is ──evidence──▶ sent
       └──────────────── recovered ◀── held by a rescue whose worker comes back: nothing was accepted (or ──▶ failed)

Rules:

1. `failed` and `held` are left only by a person's decision or by evidence; no machine picks them up again. A rescue
   holds without evidence. When the worker or its ledger comes back, its evidence replaces the rescue, unless the
   email has changed since.
2. `sent` is final.
3. An acceptance that comes late, from an owner that lost its lease, is evidence; it proves `sent` from any status.
4. `pending` becomes `held` only after PostgreSQL lost commits by a failover: the email may have been sent in them.
5. Only `pending` may be leased. The rescue decides about an expired `sending`: its owner may or may not have sent it.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Status(StrEnum):
    """Where an email stands; the value is what `email_log.status` holds."""

    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    HELD = "held"


class Transition(StrEnum):
    """Why an email's status changed."""

    LEASE = "lease"
    RELEASE = "release"
    DEFER = "defer"
    ACCEPT = "accept"
    FAIL = "fail"
    HOLD = "hold"
    RESEND = "resend"
    REPLAY = "replay"
    EVIDENCE = "evidence"
    RECOVER = "recover"


TRANSITIONS: Final = MappingProxyType(
    {
        (Status.PENDING, Transition.LEASE): Status.SENDING,
        (Status.PENDING, Transition.HOLD): Status.HELD,
        (Status.SENDING, Transition.RELEASE): Status.PENDING,
        (Status.SENDING, Transition.DEFER): Status.SENDING,
        (Status.SENDING, Transition.ACCEPT): Status.SENT,
        (Status.SENDING, Transition.FAIL): Status.FAILED,
        (Status.SENDING, Transition.HOLD): Status.HELD,
        (Status.SENDING, Transition.RESEND): Status.PENDING,
        (Status.FAILED, Transition.REPLAY): Status.PENDING,
        (Status.HELD, Transition.REPLAY): Status.PENDING,
        (Status.HELD, Transition.RECOVER): Status.PENDING,
        (Status.HELD, Transition.FAIL): Status.FAILED,
        (Status.SENDING, Transition.EVIDENCE): Status.SENT,
        (Status.HELD, Transition.EVIDENCE): Status.SENT,
        (Status.FAILED, Transition.EVIDENCE): Status.SENT,
        (Status.PENDING, Transition.EVIDENCE): Status.SENT,
    }
)

FINISHED: Final = frozenset({Status.SENT, Status.FAILED, Status.HELD})
"""No machine does anything more about an email in one of these."""


class OnUncertain(StrEnum):
    """What to do where nobody can know whether the provider accepted: the promise's policy, per email or by default."""

    HOLD = "hold"
    RESEND = "resend"
