"""The double of an HTTP provider."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any
from uuid import UUID

import orjson

from tests.acceptance.harness import LocalProvider


class Double(LocalProvider):
    """A local SendGrid, which records accepted emails and requests in files."""

    module = "dispatcher.dev.http_double"

    def behave(self, **behaviour: object) -> None:
        """See `dispatcher.dev.http_behaviour.Behaviour.change`."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("PUT", "/double", orjson.dumps(behaviour))
        assert connection.getresponse().status < 300
        connection.close()

    @property
    def settings(self) -> Mapping[str, str]:
        """See `Recipient`."""
        return {"PROVIDERS": "sendgrid", "SENDGRID_HOST": self._url, "SENDGRID_API_KEY": "SG.test.key"}

    @property
    def sms_settings(self) -> Mapping[str, str]:
        """The settings with which a dispatcher sends SMS to this double, which is then a local Twilio."""
        return {
            "SMS_PROVIDERS": "twilio",
            "TWILIO_URL": self._url,
            "TWILIO_ACCOUNT_SID": f"AC{'0' * 32}",
            "TWILIO_AUTH_TOKEN": "test-token",
            "TWILIO_SENDER": "Example",
            "SMS_COUNTRIES": "DE",
            "TWILIO_CALLBACK_URL": "https://mail.example.org/v1/events/twilio",
        }

    @property
    def _url(self) -> str:
        return str(self._started["url"])

    def sms(self) -> set[UUID]:
        """The accepted SMS: only these have addresses in the ledger."""
        return {email_id for email_id, address in self.deliveries() if address}

    def requests(self) -> list[dict[str, Any]]:
        """All requests that the double has read at least partly. Fields: `email_id`, `came` (the result), `at` (unix
        seconds) and `together` (the number of emails in the call)."""
        return self._lines("requests.jsonl")
