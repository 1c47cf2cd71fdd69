"""A provider's table of outcomes in `docs/providers.md`, and the cases with which a test causes each row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.domain.outcome import Accepted, Outcome, Uncertain, outcome_name
from tests.providers.emails import PATIENCE_SECONDS

THE_PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"

FAULT: Final = "ProviderFault"
NOT_CONNECTED: Final = "no connection: refused, unknown host, TLS handshake interrupted"
UNTRUSTED: Final = "the certificate is not trusted, or TLS failed for another definite reason"
LATE: Final = "the deadline passes before the body is sent"
SILENCE: Final = "no response after the body was sent: closed, reset, deadline passed"
BROKEN: Final = "an incomplete response, or invalid HTTP"
ELSEWHERE: Final = {
    (NOT_CONNECTED, "deferred connection_failed"),
    (LATE, "deferred timeout_before_send"),
    (UNTRUSTED, FAULT),
}
"""Rows that need no server that behaves in a special way, so they have no case."""
EACH_HTTP_API: Final = "Each HTTP API"
"""The heading of the rows that apply to every HTTP API but that of SES."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table, and one way to cause its situation.

    Attributes:
        row: The table's first column.
        expected: The outcome's type, and its reason if the type has several; `ProviderFault` for a fault.
        act: What the server does.
        code: The outcome's code.
        detail: A part of the outcome's detail.
        accepted: How often the email is in the server's ledger.
        seconds: The attempt's deadline.
    """

    row: str
    expected: str
    act: Fault | Reply | None = None
    code: str | None = None
    detail: str = ""
    accepted: int = 0
    seconds: float = PATIENCE_SECONDS

    @property
    def name(self) -> str:
        """The name of the case's test."""
        act = f"{self.act.status} {self.act.body!r}" if isinstance(self.act, Reply) else str(self.act)
        return re.sub(r"[^a-z0-9]+", "-", f"{act} {self.row}".lower()).strip("-")[:90]


def outcome_text(outcome: Outcome | None) -> str:
    """The text of the table's second and third columns."""
    assert outcome is not None
    if isinstance(outcome, Accepted | Uncertain):
        return outcome_name(outcome)
    return f"{outcome_name(outcome)} {outcome.reason}"


def rows_in_docs(*providers: str) -> set[tuple[str, str]]:
    """The tables of these providers: the first column, and the second and third as in `outcome_text`."""
    page = THE_PAGE.read_text()
    sections = [page.partition(f"\n## {provider}: outcomes")[2].partition("\n## ")[0] for provider in providers]
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (?:`(\w+)`)? *\| [^|]+ \|$", "".join(sections), re.MULTILINE)
    return {(row, f"{outcome} {reason}".strip()) for row, outcome, reason in rows}
