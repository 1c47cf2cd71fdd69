"""Rows and captured emails for pages: emails of every status, figures of a month, a host, a pause, hostile texts."""

from __future__ import annotations

from email.message import EmailMessage

import orjson

from tests.api.ops_page.rows import dead_email, event, write
from tests.api.ops_page.test_administration import count_stats
from tests.api.ops_page.test_captured import capture, receipt
from tests.api.ops_page.test_hostile_texts import LONG, hostile_email
from tests.browser.stage import Stage

Ids = dict[str, str]
"""Names for the places in the paths of `tests.browser.test_operating`."""
HOSTILE = LONG[:3_000]
"""Text that is folded, with a word that is wider than every window."""
HOSTILE_HTML = (
    "<script>alert(1)</script><script src='https://evil.example/x.js'></script>"
    "<img src='https://evil.example/pixel.png'><link rel=stylesheet href='https://evil.example/x.css'>"
    "<iframe src='https://evil.example/'></iframe><form action='https://evil.example/'><button>Win</button></form>"
    "<meta http-equiv=refresh content='0;url=https://evil.example/'><base href='https://evil.example/'>"
    "<style>body{background:url(https://evil.example/bg)}</style><p id=shown>shown</p>"
)


def fill(stage: Stage) -> Ids:
    books = stage.books
    (stage.captured / "new").mkdir(parents=True)
    hostile = EmailMessage()
    hostile["From"], hostile["To"], hostile["Subject"] = "a@example.com", "ann@example.org", "hostile"
    hostile.set_content(HOSTILE_HTML, subtype="html")
    sent, *_ = books.enqueue(8, tags=("receipt",), tenant_id="shop", html="<p>Thank you for your order.</p>")
    books.change(sent, status="sent", attempt_count=1, provider="smtp", publish_due_at=None, sent_at="now")
    event(books, sent, "delivered")
    failed = dead_email(books)
    for email_id, outcome in ((sent, "accepted"), (failed, "rejected")):
        attempt = {"attempt_number": 1, "worker": "mail-1:2:4711", "provider": "smtp", "outcome": outcome}
        write(books, "email_attempt", email_id=email_id, started_at="now", finished_at="now", **attempt)
    _figures(stage)
    count_stats(books, "shop", sent=12_000, failed=40, bounced=900, complained=4)
    ids = {"sent": sent, "failed": failed, "held": dead_email(books, "held"), "hostile": hostile_email(books, HOSTILE)}
    captured = {"captured": capture(stage.captured, receipt()), "captured_hostile": capture(stage.captured, hostile)}
    return {name: str(email_id) for name, email_id in ids.items()} | captured


def _figures(stage: Stage) -> None:
    stage.books.connection.execute(
        "insert into email_hourly (hour, provider, outcome, slot, email_count) "
        "select date_trunc('hour', now(), 'UTC') - n * interval '1 hour', 'smtp', outcome, 'mail-1:1', "
        "(share * (1000 + 900 * sin(n * 0.26) + mod(n, 37)))::bigint "
        "from generate_series(0, 700) as n, (values ('accepted', 1.0), ('deferred', 0.02), ('rejected', 0.01)) "
        "as outcomes (outcome, share)"
    )
    stage.books.connection.execute(
        "insert into minute_sample (minute, taken_at, emails, oldest_pending_seconds, longest_due_seconds, "
        "queues, attempts, counted_since, counted) "
        "select date_trunc('minute', now()) - n * interval '1 minute', now() - n * interval '1 minute', %s, 2.5, "
        "0.4, %s, "
        "jsonb_build_object('accepted', (65 - n) * 120 + (20 * sin(n * 0.4))::int, 'deferred', (65 - n) * 2, "
        "'rejected', (65 - n)), date_trunc('hour', now()) - interval '1 hour', '{}' "
        "from generate_series(0, 62) as n",
        [
            orjson.dumps({"pending": 6, "sending": 2, "failed": 11, "held": 5}).decode(),
            orjson.dumps({"normal": {"messages": 4, "workers": 2}, "bulk": {"messages": 0, "workers": 2}}).decode(),
        ],
    )
    pause = {"scope": "lane", "name": "bulk", "reason": "A wrong link in it; ticket 4711", "actor": "bob@ops-1"}
    write(stage.books, "pause", until_at="tomorrow", **pause)
