"""List emails whose outcome is unknown, and resolve each: confirm (it arrived) or release (send it again).

A held email may have been transmitted, but the provider's answer is not known. The dispatcher does not guess whether
the email arrived. To find out, search for the email's id at the provider: the id is in SendGrid's custom argument
`email_id`, in the tag `email_id` of SES and Resend, and in the Message-ID of SMTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final
from uuid import UUID

from dispatcher.actions.action import Paged, field
from dispatcher.actions.batch import Batch, Verdict
from dispatcher.actions.dlq import PENDING_AGAIN, ROWS, TWICE, FailureFilter
from dispatcher.domain.failures import HeldEmail
from dispatcher.domain.status import Status

_HELD: Final = {"status": Status.HELD, "discarded": None}
"""Held emails, whether or not their dead letter was discarded."""


class ListHeld(FailureFilter[Any], Paged[HeldEmail], name="held list", http="GET /v1/held", query="list_held"):
    """List held emails, newest first, with what shows if they arrived."""

    key: ClassVar = {"email_id": UUID}
    limit: int = field(ROWS, "The most emails.", default=50)

    constants: ClassVar = {**_HELD, "email_ids": None}
    plural = "emails"
    nothing = "No held email matches."
    examples = ("held list --provider ses --older-than 1h", "held list --json | jq -r '.emails[].email_id'")

    def for_tenant(self, rows: Sequence[HeldEmail]) -> Sequence[HeldEmail]:
        """Without the names of hosts."""
        return [replace(each, worker=None) for each in rows]


class HeldDecision(FailureFilter[Any], Batch):
    """Decides about held emails."""

    count, find = "count_dead", "find_dead_ids"
    others = "not held"
    statuses = frozenset({Status.HELD})
    is_final = True
    none_selected = "No held email matches."

    def selection(self) -> dict[str, Any]:
        return super().selection() | _HELD


def _not_held(name: str, words: str, detail: str, *, is_success: bool = False) -> Verdict:
    detail = f"Nothing was changed: {detail}"
    return Verdict(name, f"not changed: {words}", is_success=is_success, code="not-held", detail=detail)


CANCELLED = _not_held("cancelled", "cancelled.", "the email's status is cancelled.")
FAILED = _not_held(
    "failed",
    "failed, not held. `dispatcher dlq replay` sends it again.",
    "the email's status is failed. Replay the email instead.",
)
SENT = _not_held("already_sent", "already sent.", "the email's status is sent.", is_success=True)
UNDER_WAY = ("under_way", "no longer held, but pending, waiting or sending.", "the email's status is {status}.")


class Confirm(HeldDecision, name="held confirm", http="POST /v1/held/confirm", query="confirm_held"):
    """Mark held emails as `sent`, because they did arrive. This cannot be undone.

    Give the ids or message keys of the emails, select emails by a filter, or select all with --all. With a filter or
    --all, the command first shows the number of selected emails and the ids of a few, and asks for confirmation. A
    monitor removes the dead letters of confirmed emails from the DLQ. The command is safe to repeat.

    Exit codes: 0 all selected emails now have the status `sent`, or no email matches; 1 no selected email has the
    status `sent`; 2 confirmation needs a terminal or --yes; 3 only some have the status `sent`.
    """

    http_one = "POST /v1/held/{email_id:uuid}/confirm"
    on_one = (
        "Records that the email arrived: its status becomes sent, and it is never sent again. This cannot be undone."
    )
    done = "The status of the email is now sent."
    verdicts = (
        Verdict("confirmed", "confirmed; the status is now sent.", is_success=True, after=Status.SENT),
        SENT,
        _not_held(*UNDER_WAY),
        CANCELLED,
        FAILED,
    )
    examples = (
        'held confirm 0198c2f4-0000-7000-8000-000000000000 --reason "the provider shows it as delivered"',
        'held confirm --provider ses --older-than 1d --reason "SES shows all of them as delivered"',
    )


class Release(HeldDecision, name="held release", http="POST /v1/held/release", query="release_held"):
    """Send held emails again, although they may have arrived.

    Give the ids or message keys of the emails, select emails by a filter, or select all with --all. With a filter or
    --all, the command first shows the number of selected emails and the ids of a few, and asks for confirmation. A
    monitor removes the dead letters of released emails from the DLQ. The command is safe to repeat: it does not change
    emails that are already pending, waiting, sending or sent.

    All released emails become due immediately. To send them at a limited rate, use `dispatcher dlq replay --status held
    --held` instead: --status selects held emails, and --held permits the replay to send them.

    Exit codes: 0 all selected emails are now pending, waiting, sending or sent, or no email matches; 1 no selected
    email has one of these statuses; 2 confirmation needs a terminal or --yes; 3 only some have one of these statuses.
    """

    http_one = "POST /v1/held/{email_id:uuid}/release"
    on_one = f"Sends the email again, although it may have arrived. {TWICE}"
    done = PENDING_AGAIN
    verdicts = (
        Verdict(
            "released",
            "released; the status is now pending, and the email will be sent again.",
            is_success=True,
            after=Status.PENDING,
        ),
        SENT,
        _not_held(*UNDER_WAY, is_success=True),
        CANCELLED,
        FAILED,
        _not_held(
            "expired",
            "the email has expired, and is never sent again.",
            "the email has expired, and is never sent again.",
        ),
        _not_held(
            "content_pruned",
            "the email cannot be sent again, because its content was deleted.",
            "the email's content has been deleted, so it cannot be sent again.",
        ),
    )
    examples = (
        'held release login-code-4711 --tenant shop --reason "the customer asks for it"',
        'held release --text "lease expired" --newer-than 1h --reason "the host lost its network"',
    )


ACTIONS = (ListHeld, Confirm, Release)
