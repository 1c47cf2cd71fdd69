"""Counts a run's emails: compares our tables with the provider's ledger."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.doubles import Acceptances


@dataclass(frozen=True, slots=True)
class Books:
    """The numbers of emails of one run.

    Attributes:
        lost: Emails that our tables have as sent but the provider's ledger does not have, and emails that are not in
            our tables; None without a ledger.
        duplicates: Acceptances of emails that were already accepted, from the provider's ledger; None without a ledger.
        last_sent_at: When the last email was recorded as sent; Unix seconds, by the database's clock.
    """

    sent: int
    failed: int
    held: int
    lost: int | None
    duplicates: int | None
    last_sent_at: float

    @property
    def balance(self) -> bool:
        """Whether the ledger shows no lost and no duplicate email. True without a ledger."""
        return not self.lost and not self.duplicates


def read_books(connection: psycopg.Connection[Any], email_ids: Collection[str], accepted: Acceptances | None) -> Books:
    """Count these emails.

    Args:
        accepted: The provider's acceptances; None if the provider keeps no ledger.
    """
    # Ids ascend with time. The condition on ids keeps PostgreSQL from reading emails of earlier runs.
    rows = connection.execute(
        "select email_id::text, status, extract(epoch from sent_at)::float8 from dispatcher.email_log "
        "where email_id >= %s",
        [min(email_ids)],
    ).fetchall()
    known = {email_id: (status, sent_at) for email_id, status, sent_at in rows if email_id in email_ids}
    by_status = {status: sum(each == status for each, _ in known.values()) for status in ("sent", "failed", "held")}
    sent_ids = {email_id for email_id, (status, _) in known.items() if status == "sent"}
    if not sent_ids:
        raise RuntimeError("no email was sent")
    return Books(
        **by_status,
        lost=None if accepted is None else len(sent_ids - accepted.keys()) + len(email_ids) - len(known),
        duplicates=None if accepted is None else sum(len(instants) - 1 for instants in accepted.values()),
        last_sent_at=max(known[email_id][1] for email_id in sent_ids),
    )
