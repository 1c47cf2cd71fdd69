"""Cancel and reschedule emails that are not sent yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dispatcher.actions.action import field
from dispatcher.actions.batch import Batch, Verdict
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import MAX_DAYS_AHEAD
from dispatcher.domain.kinds import AGE, FILTER_TEXT, FLAG, METADATA, SEND_AT, one_of, seconds
from dispatcher.domain.status import Status

SEND_IN: Final = seconds(0, MAX_DAYS_AHEAD * 86_400)


class Unsent(Batch):
    """Changes pending and waiting emails."""

    status: Status | None = field(
        one_of(Status, "pending", "waiting"), "Only this status: pending (due) or waiting (not due yet).", default=None
    )
    lane: str | None = field(FILTER_TEXT, "Only emails of this lane.", default=None)
    correlation_id: str | None = field(FILTER_TEXT, "Only emails with this correlation id.", default=None)
    tag: str | None = field(FILTER_TEXT, "Only emails with this tag.", default=None)
    metadata: str | None = field(METADATA, "Only emails with this metadata, such as order=4711.", default=None)
    channel: str | None = field(FILTER_TEXT, "Only this channel: `email`, `sms` or `test`.", default=None)
    older_than_seconds: float | None = field(AGE, "Only emails enqueued longer ago than this.", default=None)
    newer_than_seconds: float | None = field(AGE, "Only emails enqueued more recently than this.", default=None)

    filters = (
        *("status", "lane", "correlation_id", "tag", "metadata", "channel"),
        *("older_than_seconds", "newer_than_seconds"),
    )
    count, find = "count_unsent", "find_unsent_ids"
    others = "not pending or waiting"
    one_scopes = (Scope.SEND,)
    statuses = frozenset({Status.PENDING, Status.WAITING})
    none_selected = "No pending or waiting email matches."


TOO_LATE = Verdict(
    "too_late",
    "too late: not changed, because the status is {status}.",
    code="too-late",
    detail="Nothing was changed: the email's status is {status}.",
)


class Cancel(Unsent, name="cancel", http="POST /v1/emails/cancel", query="cancel_emails"):
    """Cancel emails that are pending or waiting: they are never sent.

    Give the ids or message keys of the emails, select emails by a filter, or select all with --all. With a filter or
    --all, the command first shows the number of selected emails and the ids of a few, and asks for confirmation.

    An email that the command reports as cancelled is never sent. If a worker has already leased an email, it is too
    late: the email is not changed, and the command reports this. The command is safe to repeat.

    Exit codes: 0 all selected emails are cancelled (by this command or by an earlier one), or no email matches the
    filter; 1 no selected email is cancelled; 2 confirmation needs a terminal or --yes; 3 only some are cancelled.
    """

    http_one = "POST /v1/emails/{email_id:uuid}/cancel"
    on_one = (
        "The email is never sent. To send it after all, enqueue it again with another message key. This cannot be "
        "undone."
    )
    done = "The email is cancelled, and is never sent."
    is_final = True
    verdicts = (
        Verdict("cancelled", "cancelled.", is_success=True, after=Status.CANCELLED),
        Verdict("already_cancelled", "not changed: already cancelled.", is_success=True, after=Status.CANCELLED),
        TOO_LATE,
    )
    examples = (
        'cancel order-17-reminder --tenant shop --reason "the customer has paid"',
        "cancel --lane bulk --correlation-id newsletter-48 --dry-run",
        'cancel --lane bulk --correlation-id newsletter-48 --reason "wrong price in it" --yes',
    )


class Reschedule(Unsent, name="reschedule", http="POST /v1/emails/reschedule", query="reschedule_emails"):
    """Change the send time of pending or waiting emails.

    Give the new time with --send-at, --send-in or --now. Give the ids or message keys of the emails, select emails by a
    filter, or select all with --all. With a filter or --all, the command first shows the number of selected emails and
    the ids of a few, and asks for confirmation.

    The emails wait until the new time. If a worker has already leased an email, it is too late: the email is not
    changed. An email that expires before the new time is not changed, either.

    Exit codes: 0 all selected emails are rescheduled, or no email matches the filter; 1 no selected email is
    rescheduled; 2 confirmation needs a terminal or --yes; 3 only some are rescheduled.
    """

    send_at: datetime | None = field(SEND_AT, "Send at this time, such as 2026-12-24T18:00:00+01:00.", default=None)
    send_in_seconds: float | None = field(SEND_IN, "Send after this time, such as 90s, 15m, 2h or 3d.", default=None)
    now: bool = field(FLAG, "Send as soon as possible.", default=False)

    http_one = "POST /v1/emails/{email_id:uuid}/reschedule"
    one_of = ("send_at", "send_in_seconds", "now")
    on_one = "Sends the email at another time, or at once if that time has passed."
    done = "The email waits until its new time."
    verdicts = (
        Verdict("rescheduled", "rescheduled.", is_success=True, after=Status.WAITING),
        Verdict(
            "expires_first",
            "not changed: the email expires before the new time.",
            code="invalid-body",
            detail="must be before the email expires",
            at="send_at",
        ),
        TOO_LATE,
    )
    examples = (
        'reschedule order-17-reminder --tenant shop --send-at 2026-12-24T18:00:00+01:00 --reason "new date"',
        'reschedule --tenant shop --status waiting --now --reason "the mail server is back" --yes',
        'reschedule --lane bulk --send-in 2h --reason "traffic peak" --dry-run',
    )

    def change(self) -> dict[str, Any]:
        return {"send_at": self.send_at or datetime.now(UTC) + timedelta(seconds=self.send_in_seconds or 0.0)}


ACTIONS = (Cancel, Reschedule)
