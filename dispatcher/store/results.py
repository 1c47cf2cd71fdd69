"""Converts an attempt's outcome, and the decision about the email, into the `Result` to record, without I/O."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, get_args

from dispatcher.domain.decision import Decision, MarkFailed, MarkHeld, Redeliver, RetryIn
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Uncertain, outcome_name
from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.domain.status import TRANSITIONS, Status
from dispatcher.host.ledger_format import InFlightAttempt
from dispatcher.store.leases import Result

_STATUS_AFTER: Final = {kind: TRANSITIONS[Status.SENDING, kind.transition] for kind in get_args(Decision)}


def storable(outcome: Outcome) -> Outcome:
    """The outcome without our secrets, and with each NUL and each lone surrogate replaced: PostgreSQL and JSON do not
    accept these characters. An adapter's text may contain any character, and an installed package's adapter may forget
    to `scrub`."""
    detail = _clean(outcome.detail)
    if isinstance(outcome, Accepted):
        message_id = _clean(outcome.provider_message_id)
        if message_id is outcome.provider_message_id and detail is outcome.detail:
            return outcome  # nearly always
        return replace(outcome, provider_message_id=message_id, detail=detail)
    return replace(outcome, detail=detail and OWN_SECRETS.without(detail), code=_clean(outcome.code))


def _clean(text: str | None) -> str | None:
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def result_of(
    flight: InFlightAttempt,
    outcome: Outcome,
    decision: Decision,
    *,
    lease_seconds: float | None = None,
    is_pinned: bool = False,
) -> Result:
    """The result to record for a completed attempt. If the attempt has no end time, its start time is recorded as its
    end time, too.

    `lease_seconds`: how long the extended lease lasts if the decision is to retry. None if the worker is dead; a
    decision to retry then makes the email pending. `is_pinned`: whether the email is pinned to this provider (see
    `domain.decision`); ignored unless the decision is to retry or to redeliver.
    """
    began = datetime.fromtimestamp(flight.started_at, UTC)
    ended = datetime.fromtimestamp(flight.finished_at or flight.started_at, UTC)
    if isinstance(outcome, Accepted):  # nearly always, and takes half the time
        email_id, token, number, provider = flight[:4]
        detail, name = outcome.detail, outcome.provider_message_id
        return Result(
            email_id, token, Status.SENT, number, began, ended, "accepted", provider, None, None, detail, None, name
        )
    partial = outcome.partial if isinstance(outcome, Deferred) else None
    # Record the outcome of a held email as uncertain, even if its last attempt was refused: an earlier attempt may have
    # been accepted.
    if isinstance(decision, MarkHeld):
        outcome = Uncertain(decision.detail, decision.code)
    is_orphan = isinstance(decision, RetryIn) and lease_seconds is None
    status = Status.PENDING if is_orphan else _STATUS_AFTER[type(decision)]
    reason = decision.reason if isinstance(decision, MarkFailed) else outcome.reason
    return Result(
        flight.email_id,
        flight.lease_token,
        status,
        flight.attempt_number,
        began,
        ended,
        outcome_name(outcome),
        flight.provider,
        lease_seconds if status is Status.SENDING else None,
        reason.value,
        outcome.detail,
        outcome.code,
        is_pinned=is_pinned and isinstance(decision, (RetryIn, Redeliver)),
        wait_seconds=decision.seconds if isinstance(decision, Redeliver) else None,
        recipient_outcomes=partial.codes if partial is not None and partial.has_progress else None,
    )
