"""Sends over persistent connections to SendGrid. This is a user's usual first step if SendGrid's own package is too
slow."""

from __future__ import annotations

import json

import urllib3

from benchmarks.peers.application import Email, Settings


class SendGrid:
    """A client for all threads of a process. Create the client after the fork."""

    def __init__(self, settings: Settings, connections: int) -> None:
        self._url = f"{settings.sendgrid_host}/v3/mail/send"
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            ca_certs=settings.ca_file,
            headers={"Authorization": "Bearer SG.benchmark", "Content-Type": "application/json"},
            timeout=urllib3.Timeout(connect=5, read=20),
            retries=False,  # a repeated POST would be a duplicate
        )

    def send(self, email: Email) -> str:
        """Send the email; return SendGrid's id.

        Raises:
            RuntimeError: SendGrid did not accept the email.
            urllib3.exceptions.HTTPError: There was no response.
        """
        response = self._pool.request("POST", self._url, body=json.dumps(email.as_sendgrid()))
        if response.status != 202:
            raise RuntimeError(f"SendGrid answered {response.status}")
        return str(response.headers["X-Message-Id"])
