"""The email backend that leases each email before sending it, and records it afterwards."""

from __future__ import annotations

from typing import Any

import psycopg

from benchmarks.peers import application
from benchmarks.peers.post_office import leases, sendgrid

SETTINGS = application.settings()


class EmailBackend(sendgrid.EmailBackend):
    """The tuned backend. post_office opens one per thread, and closes it with the batch.

    Uses psycopg's own connection, which prepares its statements, like the other peers; Django's does not.
    """

    def open(self) -> bool:
        """Connect to both; return whether that was necessary."""
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
        """Lease, send, record; an email that was sent is sent already, which post_office then notes.

        Raises:
            Busy: another has the lease; post_office tries again when it is over.
        """
        email_id = message.extra_headers["X-Email-Id"]
        lease_token = leases.lease(self._books, email_id, SETTINGS.lease_seconds)
        if lease_token is None:
            return False
        is_sent: bool = super()._send(message)
        provider_message_id = message.anymail_status.esp_response.headers["X-Message-Id"]
        leases.record(self._books, email_id, lease_token, provider_message_id)
        return is_sent
