"""A staging host sends nothing to recipients who are not allowed."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from uuid import UUID

import psycopg
import pytest

from dispatcher import Sms, enqueue_many
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.store.figures import count_for_overview, count_kept_back
from tests.store.suppressing import suppress
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider
from tests.worker.test_suppression import SIGNED

ALLOWED: Final = "ann@example.org, shop.example, +49151 1"
ANN, BOB, CEM, EVE = "Ann <ANN@example.org>", "bob@shop.example", "cem@customer.example", "eve@customer.example"
RAW: Final = {"raw": SIGNED, "text": None, "topic": "news"}
Seen = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str | None]


class Case(NamedTuple):
    fields: dict[str, Any]
    kept: Seen | None  # what reaches the provider: To, Cc, Bcc and the header
    redirected: Seen | None


def redirected(*named: str) -> Seen:
    return (("qa@example.org",), (), (), ", ".join(named))


CASES: Final = {
    "allowed": Case({"to": [ANN, BOB]}, ((ANN, BOB), (), (), None), ((ANN, BOB), (), (), None)),
    "to": Case({"to": CEM}, None, redirected(CEM)),
    "cc": Case({"to": ANN, "cc": [CEM, BOB]}, ((ANN,), (BOB,), (), None), redirected("ann@example.org", CEM, BOB)),
    "bcc": Case({"to": CEM, "bcc": [EVE, ANN]}, ((), (), (ANN,), None), redirected(CEM, EVE, "ann@example.org")),
    "of a subdomain": Case({"to": "x@a.shop.example"}, None, redirected("x@a.shop.example")),
    "in spite of suppression": Case({"to": CEM, "ignore_suppression": True}, None, redirected(CEM)),
    "large": Case({"to": CEM, "text": "x" * 200_000}, None, redirected(CEM)),
    "as bob, who is suppressed": Case({"to": ["sue@shop.example", CEM]}, None, redirected("sue@shop.example", CEM)),
    "raw, of a topic that bob left": Case({**RAW, "to": [ANN, BOB]}, ((ANN,), (), (), None), ((ANN,), (), (), None)),
    "raw, to all": Case({**RAW, "to": CEM}, None, redirected(CEM)),
    "many": Case({"to": [f"c{n:03}@customer.example" for n in range(100)]}, None, ((), (), (), "and 66 more")),
}


class Seeing(ScriptedProvider):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: dict[UUID, Seen] = {}
        self.always = self._accept

    async def _accept(self, _: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Accepted:
        attempt.mark_on_wire()
        self.seen[email.email_id] = (email.to, email.cc, email.bcc, email.headers.get("X-Dispatcher-Original-To"))
        self.accept(email.email_id)
        return Accepted("id")


def texts(bench: Bench) -> list[UUID]:
    messages = [Sms(message_key=each, to=each, text="Hello") for each in ("+4915112345678", "+4915212345678")]
    with psycopg.connect(bench.settings().database_url) as connection:
        return [each.email_id for each in enqueue_many(connection, messages)]


@pytest.mark.parametrize("is_redirected", [False, True])
async def test_only_allowed_recipients_get_emails_and_sms(bench: Bench, *, is_redirected: bool) -> None:
    emails, sms = Seeing(), Seeing("twilio", Capabilities(copies=1, channel="sms"))
    suppress(bench.books.connection, "sue@shop.example")
    suppress(bench.books.connection, BOB, topic="news")
    email_ids = {bench.books.enqueue_one(**case.fields): name for name, case in CASES.items()}
    sms_ids = texts(bench)
    redirect: dict[str, Any] = {"REDIRECT_TO": "qa@example.org"} if is_redirected else {}
    await bench.start([emails, sms], ALLOW_RECIPIENTS=ALLOWED, **redirect)

    await bench.deliver([*email_ids, *sms_ids])

    expected = {name: case.redirected if is_redirected else case.kept for name, case in CASES.items()}
    sent = {name: each for name, each in expected.items() if each is not None}
    await bench.settled({"sent": len(sent) + 1, "failed": len(expected) - len(sent) + 1})
    assert list(sms.seen) == sms_ids[:1]
    seen = {email_ids[email_id]: each for email_id, each in emails.seen.items()}
    if many := seen.pop("many", None):
        assert many[0] == ("qa@example.org",)
        assert str(many[3]).endswith(sent.pop("many")[3] or "")
    assert seen == sent
    rows = {row["email_id"]: row for row in bench.books.rows() if row["status"] == "failed"}
    assert {(row["error_type"], row["dead_letter_due_at"], row["provider"]) for row in rows.values()} == {
        ("kept_back", None, "none")
    }
    if not is_redirected:
        by_name = {name: bench.books.row(email_id)["last_error"] for email_id, name in email_ids.items()}
        assert by_name["cc"] == "refused recipients: 2 (kept_back)"
        assert by_name["to"] == "No recipient may get email from this host (DISPATCHER_ALLOW_RECIPIENTS)."
        assert by_name["as bob, who is suppressed"].endswith("hard_bounce, kept_back.")
    async with await psycopg.AsyncConnection.connect(bench.settings().database_url) as connection:
        counts = await count_for_overview(connection, tenant_id=None)
        assert await count_kept_back(connection) == counts["kept_back"].emails == len(rows)
        assert counts["dead_letters"].emails == 0
    await bench.nothing_left_on_the_queue()


async def test_a_thousand_foreign_recipients_get_nothing_and_a_replay_decides_again(bench: Bench) -> None:
    provider = Seeing()
    worker = await bench.start([provider], ALLOW_RECIPIENTS="none")
    email_ids = await bench.enqueue(1000)
    await bench.settled({"failed": 1000})
    assert provider.seen == {}
    await worker.stop()

    bench.books.connection.execute("update email_log set status = 'pending', publish_due_at = now()")
    await bench.start([provider])
    await bench.deliver(email_ids)

    await bench.settled({"sent": 1000})
    assert len(provider.seen) == 1000
