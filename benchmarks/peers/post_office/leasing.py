"""An email backend that leases each email before sending it, and records the outcome afterwards."""

from __future__ import annotations

from typing import Any

import psycopg

from benchmarks.peers import application
from benchmarks.peers.post_office import leases, sendgrid

SETTINGS = application.settings()


class EmailBackend(sendgrid.EmailBackend):
    """The tuned backend. post_office opens a backend per thread, and closes the backend after the batch.

    Uses a psycopg connection, like the other peers, because psycopg prepares statements and Django's connection does
    not.
    """

    def open(self) -> bool:
        """Connect to SendGrid and to PostgreSQL; return whether a new connection was necessary."""
        is_new: bool = super().open()
        if is_new:
            self._books = psycopg.connect(SETTINGS.database_url, autocommit=True)
        return is_new

    def close(self) -> None:
        """Close both connections."""
        if self.session:
            self._books.close()
        super().close()

    def _send(self, message: Any) -> bool:
        """Lease the email, send it, and record the outcome. An email that was already sent is not sent again;
        post_office only marks it as sent.

        Raises:
            Busy: Another worker has the lease; post_office retries when that lease is over.
        """
        email_id = message.extra_headers["X-Email-Id"]
        lease_token = leases.lease(self._books, email_id, SETTINGS.lease_seconds)
        if lease_token is None:
            return False
        is_sent: bool = super()._send(message)
        provider_message_id = message.anymail_status.esp_response.headers["X-Message-Id"]
        leases.record(self._books, email_id, lease_token, provider_message_id)
        return is_sent
