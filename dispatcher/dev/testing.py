"""Lets an application's tests with pytest read the emails that a dispatcher for development captures.

    from dispatcher.dev.testing import CapturedMail, captured_mail  # in conftest.py

    def test_reset(captured_mail: CapturedMail) -> None:
        ...  # what makes the application enqueue the email
        email = captured_mail.wait_for(to="ann@example.org", subject="Reset")
        open_page(email.link("Reset password"))

docs/testing.md shows how to start the dispatcher.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import orjson
import pytest

from dispatcher.client import ApiProblem, Client, NoResponse
from dispatcher.client.calls import ApiCall, ApiResponse, reader
from dispatcher.ops.captured import CapturedMessage

T = TypeVar("T")

URL_VARIABLE: Final = "DISPATCHER_DEV_URL"
KEY_VARIABLE: Final = "DISPATCHER_DEV_KEY"
DEFAULT_ADDRESS: Final = "127.0.0.1:8025"
ATTEMPT_SECONDS: Final = 10.0
LISTED: Final = 10
START: Final = 'Start it: eval "$(dispatcher dev up)" && dispatcher init, then `dispatcher run` and `dispatcher api`.'


class NotCaptured(AssertionError):
    """No captured email matched in time, or an email has no such link or code."""


class CapturedEmail(CapturedMessage):
    """A captured email. `links` have `url`, `text` and `problems`; `attachments` have `filename` and `content`."""

    __slots__ = ()

    def link(self, text: str) -> str:
        """The URL of the only link whose text contains this, in upper or lower case."""
        __tracebackhide__ = True
        found = {each.url for each in self.links if text.casefold() in each.text.casefold()}
        if len(found) != 1:
            texts = ", ".join(repr(each.text or each.url) for each in self.links) or "none"
            raise NotCaptured(f"{len(found)} links of {self.subject!r} contain {text!r}. Its links: {texts}")
        return found.pop()

    def code(self, digits: int = 6) -> str:
        """The first number of exactly so many digits, in the text or else in the HTML without its tags."""
        __tracebackhide__ = True
        text = self.text if self.text is not None else re.sub(r"<[^>]*>", " ", self.html or "")
        found = re.search(rf"(?<![\w#-])\d{{{digits}}}(?![\w-])", text)
        if found is None:
            raise NotCaptured(f"{self.subject!r} contains no number of {digits} digits.")
        return found[0]


class CapturedMail:
    """The emails that are captured from now on."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._client = Client(url, key=key, seconds=ATTEMPT_SECONDS + 5)
        self._since = datetime.now(UTC).isoformat()

    def wait_for(
        self,
        *,
        to: str | None = None,
        subject: str | None = None,
        text: str | None = None,
        after: CapturedEmail | None = None,
        timeout_seconds: float = 10.0,
    ) -> CapturedEmail:
        """The oldest email that matches, as soon as it is captured. Upper and lower case do not matter.

        Args:
            to: A recipient's whole address, or a part such as `@example.org`; of an SMS, the number.
            subject: A part of the subject.
            text: A part of the sender, the recipients, the subject, the text or the HTML.
            after: Only emails that were captured after this one.

        Raises:
            NotCaptured: no email matched in time. The error lists what was captured instead.
        """
        __tracebackhide__ = True
        given = {"to": to, "subject": subject, "text": text, "after": self._since if after is None else after.id}
        wanted = {name: value for name, value in given.items() if value is not None}
        until = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, until - time.monotonic())
            query = urlencode({**wanted, "timeout": f"{min(left, ATTEMPT_SECONDS):.3f}"})
            try:
                return self._call(f"/wait?{query}", reader(CapturedEmail))
            except ApiProblem as problem:
                if problem.code != "nothing-captured":
                    raise
            if left <= ATTEMPT_SECONDS:
                break
        del wanted["after"]
        raise NotCaptured(f"No email {wanted} was captured within {timeout_seconds:g} s. {self._others()}")

    def all(self) -> list[CapturedEmail]:
        """All emails that were captured since the test began, newest first."""
        return [self._call(f"/{each['id']}", reader(CapturedEmail)) for each in self._rows()]

    def clear(self) -> None:
        """Deletes all captured emails, also those of other tests."""
        self._call("", lambda _response: None, "DELETE")

    def close(self) -> None:
        self._client.close()

    def _rows(self) -> Iterator[dict[str, Any]]:
        query = {"after": self._since}
        while True:
            page = self._call(f"?{urlencode(query)}", lambda response: orjson.loads(response.body))
            yield from page["captured"]
            if page["next"] is None:
                return
            query["before"] = page["next"]

    def _others(self) -> str:
        rows = list(self._rows())
        if not rows:
            return (
                "Nothing was captured since the test began. Check that `dispatcher run` is running, and that the "
                "application commits, and uses the same database."
            )
        lines = [f"  to {', '.join(each['recipients'])}: {each['subject']}" for each in rows[:LISTED]]
        return "\n".join([f"Captured since the test began: {len(rows)}", *lines])

    def _call(self, path: str, parse: Callable[[ApiResponse], T], method: str = "GET") -> T:
        result: T = self._client.send_call(ApiCall(parse, method, f"/v1/captured{path}"))
        return result


@pytest.fixture
def captured_mail() -> Iterator[CapturedMail]:
    """The emails that the dispatcher captures from now on. Fails if no dispatcher for development is running."""
    url = os.environ.get(URL_VARIABLE) or f"http://{os.environ.get('DISPATCHER_API_ADDRESS') or DEFAULT_ADDRESS}"
    key = os.environ.get(KEY_VARIABLE) or None
    if fault := fault_of(url, key):
        pytest.fail(fault, pytrace=False)
    mail = CapturedMail(url, key)
    yield mail
    mail.close()


def fault_of(url: str, key: str | None) -> str | None:
    """Why the captured emails cannot be read, and the remedy; None if they can."""
    try:
        with Client(url, key=key, seconds=1) as client:
            client.send_call(ApiCall(lambda _response: None, "GET", "/v1/captured?limit=1"))
    except NoResponse:
        return f"No dispatcher responds at {url}. {START} Or set {URL_VARIABLE}, if it has another URL."
    except ApiProblem as problem:
        if problem.code == "unauthorized":
            return f"The dispatcher at {url} has API keys. Set {KEY_VARIABLE} to one: --all-tenants --scope operate."
        if problem.code in ("not-found", "unknown"):
            return (
                f"The dispatcher at {url} does not offer captured emails: it needs the settings of `dispatcher dev up`."
            )
        return f"The dispatcher at {url} refused: {problem.message}"
    return None
