"""The life of an email: every status, and every transition between two statuses, in one table.

    pending ──lease──▶ sending ──accepted──▶ sent
       ▲  ▲               │ ├─ deferred, attempts left: stays sending, is tried again under the same lease
       │  │               │ ├─ outcome unknown, but the provider has idempotency keys: the same, at this provider only
       │  │               │ ├─ rejected, or attempts used up ──▶ failed ──▶ DLQ
       │  └── released ───┘ └─ outcome unknown: policy hold ──▶ held ──▶ DLQ     policy resend ──▶ pending
       ├──────────────── replay (operator) ◀── failed | held         any status ──evidence──▶ sent
       └──────────────── recovered ◀── held by recovery, and the worker returns: not accepted (or ──▶ failed | waiting)

    waiting ──its time has come──▶ pending          pending ──reschedule──▶ waiting
    sending ──deferred, attempts used up, but redelivery is on; or released, a domain's ceiling is reached──▶ waiting
    waiting | pending ──cancel, or expired──▶ cancelled          held ──expired──▶ cancelled

Rules:

1. Only an operator or evidence changes the status of an email that is `failed` or `held`, except that a `held` email
   may expire. When a host is lost, recovery sets emails to `held` without evidence. If the worker or its ledger
   returns, its evidence replaces the status, unless the email has changed since.
2. `sent` is final. `cancelled` is final, too, unless evidence shows that the email was sent before.
3. A late acceptance, from a worker that lost its lease, is evidence, and so is an event that the provider reports after
   it accepted the email. Such evidence changes any status to `sent`. If a worker has leased the email, the event waits
   until the lease has ended. From the moment the event is stored, no worker may lease the email.
4. `pending` becomes `held` only after a failover of PostgreSQL lost commits, because a lost commit may have recorded
   that the email was sent.
5. A provider might report that it accepted an email, but then dropped it for every recipient. Such an email has not
   arrived: if it is `held`, it becomes `failed`; if it is `pending`, it may still be sent.
6. Only a `pending` email may be leased or published. A `waiting` email becomes `pending` when it is due. If the lease
   of a `sending` email expires, recovery decides the next status, because it is unknown whether the owner has sent the
   email.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Status(StrEnum):
    """The status of an email; the value of `email_log.status`."""

    PENDING = "pending"
    """The email is due: its message is on the send queue, or the relay will publish it."""
    WAITING = "waiting"
    """The email is not due yet: it is scheduled for later, or waits for a redelivery or for a recipient domain's
    ceiling."""
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    HELD = "held"
    CANCELLED = "cancelled"
    """The email will never be sent, because an operator or the application cancelled it, or because it has expired."""


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
    WAKE = "wake"
    RESCHEDULE = "reschedule"
    REDELIVER = "redeliver"
    WAIT_FOR_DOMAINS = "wait_for_domains"
    CANCEL = "cancel"
    EXPIRE = "expire"


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
        (Status.WAITING, Transition.EVIDENCE): Status.SENT,
        (Status.CANCELLED, Transition.EVIDENCE): Status.SENT,
        (Status.WAITING, Transition.WAKE): Status.PENDING,
        (Status.WAITING, Transition.RESCHEDULE): Status.WAITING,
        (Status.PENDING, Transition.RESCHEDULE): Status.WAITING,
        (Status.SENDING, Transition.REDELIVER): Status.WAITING,
        (Status.HELD, Transition.REDELIVER): Status.WAITING,
        (Status.SENDING, Transition.WAIT_FOR_DOMAINS): Status.WAITING,
        (Status.WAITING, Transition.CANCEL): Status.CANCELLED,
        (Status.PENDING, Transition.CANCEL): Status.CANCELLED,
        (Status.WAITING, Transition.EXPIRE): Status.CANCELLED,
        (Status.PENDING, Transition.EXPIRE): Status.CANCELLED,
        (Status.HELD, Transition.EXPIRE): Status.CANCELLED,
    }
)

FINISHED: Final = frozenset({Status.SENT, Status.FAILED, Status.HELD, Status.CANCELLED})
"""Statuses in which no process sends the email. Only an operator, evidence or the expiry of a held email changes these
statuses."""


class OnUncertain(StrEnum):
    """What happens to an email after an attempt with an unknown outcome: it is held, or sent again.

    The email, its lane or the host's settings choose the policy.
    """

    HOLD = "hold"
    RESEND = "resend"
