"""Runs the double of an HTTP provider as a separate process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from http.client import HTTPConnection
from os import defpath
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson

from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.ports import choose
from tests.supervisor.program import Program, eventually


class Double:
    """A local SendGrid, which records accepted emails and requests in files.

    Attributes:
        program: The process; a new one after `start`.
    """

    program: Program

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._options = options
        (self._port,) = choose(1)  # outside the ephemeral range, so the port is free at a restart
        self.start()

    def start(self) -> None:
        """Start the double on the same port, with the same record of accepted emails."""
        words = ["--folder", str(self._folder), "--port", str(self._port), "--die-with-parent"]
        argv = [sys.executable, "-m", "dispatcher.dev.http_double", *words, *self._options]
        self.program = program = Program(argv, self._folder, "double", env={"PATH": defpath})
        eventually(lambda: program.log.endswith("\n"), "the HTTP double")
        started = orjson.loads(program.log)
        self._port = started["port"]
        self._url = started["url"]
        self._ledger = Path(started["ledger"])

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.program.destroy()

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

    def delivered(self) -> Counter[UUID]:
        """See `Recipient`."""
        return Counter({UUID(email_id): times for email_id, times in read_ledger(self._ledger).times.items()})

    def sms(self) -> set[UUID]:
        """The accepted SMS: only these have addresses in the ledger."""
        return {UUID(email_id) for email_id, address in read_ledger(self._ledger).deliveries if address}

    @property
    def ledger_octets(self) -> int:
        """The size of the record in bytes. The record grows with each accepted email."""
        return self._ledger.stat().st_size

    def requests(self, came: str | None = None) -> list[dict[str, Any]]:
        """All requests that the double has read at least partly, or only the requests with this result. Fields:
        `email_id`, `came` (the result) and `at` (unix seconds)."""
        found = self._lines("requests.jsonl")
        return [request for request in found if came is None or request["came"] == came]

    def witnessed(self) -> list[dict[str, Any]]:
        """The events on the double's connections, if the double was started with `--wire`; see
        `HttpDouble.record_event`."""
        return self._lines("wire.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a file. The last line may be incomplete, because the double may be writing it."""
        *lines, _unfinished = (self._folder / name).read_bytes().split(b"\n")
        return [orjson.loads(line) for line in lines]


class ResendDouble(Double):
    """A local Resend, which honours idempotency keys."""

    @property
    def settings(self) -> Mapping[str, str]:
        """See `Recipient`."""
        return {"PROVIDERS": "resend", "RESEND_URL": self._url, "RESEND_API_KEY": "re_test_key"}
