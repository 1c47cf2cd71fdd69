"""A sample of the pending emails, for `dispatcher doctor`."""

from __future__ import annotations

from typing import Final

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.store.connections import translated
from dispatcher.store.queries import query

SAMPLE: Final = 1_000
"""A look of some milliseconds, however many emails are pending."""


def sample_pending(connection: Connection[TupleRow]) -> list[OutgoingEmail]:
    """The oldest pending emails, with the fields that decide whether they can be sent; without attachments."""
    with translated():
        rows = connection.execute(query("sample_pending"), {"limit": SAMPLE}).fetchall()
    return [
        OutgoingEmail(
            email_id,
            created_at,
            sender,
            to=tuple(recipients.get("to", ())),
            cc=tuple(recipients.get("cc", ())),
            bcc=tuple(recipients.get("bcc", ())),
            reply_to=tuple(recipients.get("reply_to", ())),
            subject="",
            template_id=template_id,
            headers=headers or {},
        )
        for email_id, created_at, sender, recipients, template_id, headers in rows
    ]
