"""The tests of outcomes that apply to each HTTP API: a provider's module has the table, and inherits the tests."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import structlog

from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.telemetry import log
from tests.providers.conftest import Authority
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, an_email, outcome_text, send
from tests.waiting import until

THE_PAGE: Final = Path(__file__).parents[2] / "docs" / "providers.md"

FAULT: Final = "ProviderFault"
EMAIL_PARTS: Final = ("ann@example.com", "shop@example.org", "Your order", "Thank you")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the provider's table in `docs/providers.md`, and one way to cause its situation.

    Attributes:
        row: The table's first column.
        expected: The outcome's type, and its reason if the type has several; `ProviderFault` for a fault.
        detail: A part of the outcome's detail, or of the fault.
        accepted: How often the email is in the server's ledger.
        changes: The fields of the email that differ from an ordinary one.
        options: The arguments of the place.
        key: The API key that the server needs; None if any key is accepted.
    """

    row: str
    expected: str
    act: Fault | Reply | None = None
    code: str | None = None
    detail: str = ""
    accepted: int = 0
    seconds: float = PATIENCE_SECONDS
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None

    @property
    def name(self) -> str:
        reply = self.act if isinstance(self.act, Reply) else None
        act = f"{reply.status} {reply.body!r} {dict(reply.headers)}" if reply else self.act
        words = f"{self.row[:30]} {act} {self.key or ''} {dict(self.options) or ''}".replace("x-amzn-ErrorType", "")
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:100]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that each HTTP API has, for the failures of the transport. `section`: their heading in the page."""

    not_connected: str = "no connection: refused, unknown host, TLS handshake interrupted"
    untrusted: str = "the certificate is not trusted, or TLS failed for another definite reason"
    late: str = "the deadline passes before the body is sent"
    silence: str = "no response after the body was sent: closed, reset, deadline passed"
    broken: str = "an incomplete response, or invalid HTTP"
    section: str = "Each HTTP API"

    def cases(self) -> list[Case]:
        """The cases that need a server. `test_http_transport` has every way to end a connection."""
        closed, late = "no response: the connection was closed", "no response before the deadline"
        return [
            Case(self.silence, "uncertain", Fault.RESET_UNREAD),
            Case(self.silence, "uncertain", Fault.CLOSE, detail=closed, accepted=1),
            Case(self.silence, "uncertain", Fault.HANG, detail=late, accepted=1, seconds=SOON_SECONDS),
            Case(self.broken, "uncertain", Fault.HALF, "202", "the response with status 202 was cut off", accepted=1),
            Case(self.broken, "uncertain", Fault.GARBAGE, accepted=1),
        ]

    def elsewhere(self) -> set[tuple[str, str]]:
        """The rows that need no server that behaves in a special way, so they have no case."""
        late = "deferred timeout_before_send"
        return {(self.not_connected, "deferred connection_failed"), (self.untrusted, FAULT), (self.late, late)}


def rows_in_docs(*sections: str) -> set[tuple[str, str]]:
    """The tables of these sections: the first column, and the second and third as in `outcome_text`."""
    page = THE_PAGE.read_text()
    parts = [page.partition(f"\n## {section}: outcomes")[2].partition("\n## ")[0] for section in sections]
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (?:`(\w+)`)? *\| [^|]+ \|$", "".join(parts), re.MULTILINE)
    return {(row, f"{outcome} {reason}".strip()) for row, outcome, reason in rows}


class HttpOutcomes:
    """In every situation, the adapter returns the outcome in `docs/providers.md`; the server counts the emails.

    Attributes:
        table: The cases of the table below the heading `section`; `rows` has further cases.
        local: Rows that the adapter decides before it sends.
        secrets: Texts that are in no log (even at DEBUG), outcome or exception.
        message_id: A pattern of the ids that the server gives.
        refused: Fields of emails that the adapter refuses itself, each with the outcome and words of its detail.
        resets: Whether the server's answer to too many requests says when its limit resets.
        checks: What the server does with the request of `check`, and words of the report, the fault or its remedy.
        account: The place for the request of `check`, if the double does not answer that request.
    """

    section: ClassVar[str]
    place: ClassVar[Callable[..., AbstractAsyncContextManager[Any]]]
    table: ClassVar[Sequence[Case]]
    rows: ClassVar[Rows] = Rows()
    local: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    secrets: ClassVar[tuple[str, ...]]
    message_id: ClassVar[str]
    refused: ClassVar[Sequence[tuple[Mapping[str, Any], str, str]]]
    resets: ClassVar[bool]
    checks: ClassVar[Sequence[tuple[Behaviour, str]]]
    account: ClassVar[Callable[..., AbstractAsyncContextManager[Any]] | None] = None
    message: ClassVar[Callable[..., OutgoingEmail]] = staticmethod(an_email)

    @staticmethod
    def shown(outcome: Outcome, _email: OutgoingEmail) -> Outcome:
        """The outcome as the worker records it."""
        return outcome

    @pytest.fixture
    def debug_log(self) -> Iterator[None]:
        log.configure("debug", "json", worker="test")
        yield
        structlog.reset_defaults()

    @pytest.mark.usefixtures("debug_log")
    async def test_each_situation_has_the_outcome_of_its_row_and_shows_nothing_private(
        self, case: Case, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        caplog.set_level(1)
        email, tls = type(self).message(**case.changes), {"tls": authority.server, "ca_file": authority.ca_file}
        async with type(self).place(tmp_path, Behaviour(case.act, key=case.key), **tls, **case.options) as place:
            if case.expected == FAULT:
                with pytest.raises(ProviderFault, match=re.escape(case.detail)) as fault:
                    await send(place.provider, email, seconds=case.seconds)
                words = "".join(traceback.format_exception(fault.value))
            else:
                sending = await send(place.provider, email, seconds=case.seconds, leaves=True)
                assert sending.outcome is not None
                outcome = self.shown(sending.outcome, email)
                assert outcome_text(outcome) == case.expected
                assert (sending.left, getattr(outcome, "code", None)) == (1, case.code)
                assert case.detail in (outcome.detail or "")
                assert "@" not in (outcome.detail or "")
                words = repr(outcome)
            # The double may still be reading after the deadline.
            await until(lambda: place.times() == ({str(email.email_id): 1} if case.accepted else {}))
            assert place.double.begun.total() == 1
        told = "\n".join((words, caplog.text, *capfd.readouterr()))
        assert [secret for secret in self.secrets if secret in told] == []

    def test_the_table_in_the_docs_has_the_same_rows(self) -> None:
        rows = {(case.row, case.expected) for case in (*self.table, *self.rows.cases())}

        assert rows_in_docs(self.section, self.rows.section) == rows | self.rows.elsewhere() | self.local

    async def test_nothing_leaves_without_time_a_trusted_certificate_or_a_connection(
        self, tmp_path: Path, authority: Authority
    ) -> None:
        message = type(self).message
        async with type(self).place(tmp_path / "a") as place:
            accepted = await send(place.provider, message())
            late = await send(place.provider, message(), seconds=0)
            assert place.double.begun.total() == 1
        async with type(self).place(tmp_path / "b", tls=authority.server) as place:
            with pytest.raises(ProviderFault, match="certificate"):
                await send(place.provider, message())
            assert not place.double.begun
            await place.double.close()
            refused = await send(place.provider, message())
            with pytest.raises(ProviderFault, match=r"cannot be (reached|used): no connection"):
                await place.provider.check()

        assert isinstance(accepted.outcome, Accepted)
        assert re.fullmatch(self.message_id, accepted.outcome.provider_message_id or "")
        assert (outcome_text(late.outcome), late.left) == ("deferred timeout_before_send", 0)
        assert (outcome_text(refused.outcome), refused.left) == ("deferred connection_failed", 0)

    async def test_what_the_provider_would_refuse_is_rejected_before_it_is_sent(
        self, tmp_path: Path, refusal: tuple[Mapping[str, Any], str, str]
    ) -> None:
        changes, expected, words = refusal
        async with type(self).place(tmp_path) as place:
            sending = await send(place.provider, type(self).message(**changes))

            assert (outcome_text(sending.outcome), sending.left) == (f"rejected {expected}", 0)
            assert isinstance(sending.outcome, Rejected)
            assert sending.outcome.code is None
            detail = sending.outcome.detail or ""
            assert words in detail
            assert not [secret for secret in ("example", "abc123") if secret in detail]
            assert not place.double.begun

    async def test_a_throttled_email_waits_for_the_reset(self, tmp_path: Path) -> None:
        async with type(self).place(tmp_path) as place:
            place.double.behaviour.throttle(30)

            sending = await send(place.provider, type(self).message())

        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.THROTTLED
        assert sending.outcome.retry_after == (pytest.approx(30, abs=2) if self.resets else None)

    async def test_check_reports_each_state_of_the_account(self, tmp_path: Path, check: tuple[Behaviour, str]) -> None:
        behaviour, words = check
        async with (type(self).account or type(self).place)(tmp_path, behaviour) as place:
            try:
                report = await place.provider.check()
            except ProviderFault as fault:
                report = "".join(traceback.format_exception(fault))

        assert words in report
        assert [secret for secret in self.secrets if secret in report] == []
