"""Realistic rows for pages: emails of every status with attempts and events, figures of a month, a host, pauses."""

from __future__ import annotations

import time
from base64 import b64decode
from email.message import EmailMessage
from typing import Final
from uuid import uuid4

import orjson

from dispatcher import Email
from tests.browser.stage import Stage

Ids = dict[str, str]
"""Names for the places in the paths of `tests.browser.pages`."""

HOSTILE: Final = (
    "\"><script>alert(1)</script><img src=x onerror=alert(1)>' autofocus onfocus=alert(1) x='\u202egnp.exe\u2066"
    "{{7*7}}<!--<svg/onload=alert(1)>--></textarea></title>javascript:alert(1)"
)
"""Breaks out of attributes and elements if a page does not escape it; with characters that reverse the text."""
LONG: Final = HOSTILE + "<b>" + "W" * 64_000

KINDS: Final = ("receipt", "login-code", "invoice", "password-reset", "newsletter", "shipment")
ERRORS: Final = (
    ("recipient_rejected", "550 5.1.1 The email account that you tried to reach does not exist", "550"),
    ("attempts_exhausted", "451 4.7.1 Greylisting in action, please come back later", "451"),
    ("message_rejected", "554 5.7.1 Message content rejected", "554"),
)
_PNG: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_SETTLE: Final = """
    update email_log set status = %s, attempt_count = %s, provider = 'smtp', published_at = created_at,
        leased_at = created_at + interval '9 ms', publish_due_at = null, error_type = %s, last_error = %s,
        sent_at = case when %s = 'sent' then created_at + interval '84 ms' end,
        settled_at = case when %s in ('failed', 'held') then created_at + interval '12 s' end
    where message_key = %s
"""
_ATTEMPT: Final = """
    insert into email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome,
        error_type, error, provider_code)
    select email_id, %s, 'mail-1:2:4711', 'smtp', created_at + %s * interval '3 s',
        created_at + %s * interval '3 s' + interval '71 ms', %s, %s, %s, %s
    from email_log where message_key = %s
"""


def fill(stage: Stage, *, count: int = 60) -> Ids:
    """Fills a stage's database and its captured emails.

    Args:
        count: The number of emails.
    """
    keys = _emails(stage, count)
    _hostile(stage)
    _figures(stage)
    ids = {name: _id_of(stage, key) for name, key in keys.items()}
    return ids | {
        "hostile": _id_of(stage, "hostile"),
        "captured": capture(stage),
        "captured_hostile": capture_hostile(stage),
    }


def capture(stage: Stage) -> str:
    """A captured receipt with HTML, text, an image and an attachment; returns its name."""
    email = EmailMessage()
    email["From"], email["To"], email["Subject"] = (
        "Shop <shop@example.com>",
        "ann@example.org",
        "Your receipt for order 17",
    )
    email["Date"], email["Message-ID"] = "Tue, 24 Nov 2026 09:30:00 +0100", "<17@shop.example.com>"
    email.set_content(
        "Hello Ann,\n\nthank you for your order. We have received your payment of 42.00 EUR.\n\nThe shop\n"
    )
    email.add_alternative(
        '<body style="font-family:sans-serif;padding:1em"><h1 style="color:#205">Thank you, Ann</h1>'
        "<p>We have received your payment of <b>42.00 EUR</b> for order 17.</p>"
        '<img src="cid:logo" width="64" height="64">'
        '<p><a href="https://shop.example.com/orders/17">Your order</a></p></body>',
        subtype="html",
    )
    html = email.get_payload()[1]  # type: ignore[index]
    html.add_related(_PNG, "image", "png", cid="<logo>")  # type: ignore[union-attr]
    email.add_attachment(b"%PDF-1.4", maintype="application", subtype="pdf", filename="receipt-17.pdf")
    return _captured(stage, email)


def capture_hostile(stage: Stage) -> str:
    """A captured email whose HTML tries everything that a browser must not do; returns its name."""
    email = EmailMessage()
    email["From"], email["To"], email["Subject"] = "a@example.com", "ann@example.org", HOSTILE
    email.set_content(
        "<script>alert(1)</script><script src='https://evil.example/x.js'></script>"
        "<img src='https://evil.example/pixel.png'><link rel=stylesheet href='https://evil.example/x.css'>"
        "<iframe src='https://evil.example/'></iframe><form action='https://evil.example/'><button>Win</button></form>"
        "<meta http-equiv=refresh content='0;url=https://evil.example/'><base href='https://evil.example/'>"
        "<style>body{background:url(https://evil.example/bg)}</style><p id=shown>shown</p>",
        subtype="html",
    )
    return _captured(stage, email)


def _captured(stage: Stage, email: EmailMessage) -> str:
    folder = stage.captured / "new"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{uuid4()}.{time.time_ns()}.77.eml"
    (folder / name).write_bytes(email.as_bytes())
    return name


def _emails(stage: Stage, count: int) -> Ids:
    """Emails of every status; returns the key of one email of each status."""
    stage.host.enqueue(
        Email(
            message_key=f"{KINDS[n % len(KINDS)]}-{10_000 + n}",
            sender="Shop <shop@example.com>",
            to=f"customer-{n}@{('example.org', 'example.net', 'mail.example.com')[n % 3]}",
            subject=f"Your {KINDS[n % len(KINDS)].replace('-', ' ')}",
            text="Thank you for your order.",
            html="<p>Thank you for your order.</p>",
            tags=(KINDS[n % len(KINDS)],),
            tenant_id=("shop", "billing")[n % 7 == 0],
            correlation_id=f"order-{10_000 + n}",
        )
        for n in range(count)
    )
    keys: Ids = {}
    for n in range(count):
        key = f"{KINDS[n % len(KINDS)]}-{10_000 + n}"
        status = "failed" if n % 6 == 0 else "held" if n % 13 == 1 else "pending" if n % 11 == 2 else "sent"
        keys[status] = key
        if status == "pending":
            continue
        error_type, error, code = ERRORS[n % len(ERRORS)] if status == "failed" else (None, None, None)
        attempts = 3 if error_type == "attempts_exhausted" else 1
        if status == "held":
            error_type, error = "outcome_unknown", "The connection closed before the answer to the final dot."
        stage.execute(_SETTLE, status, attempts, error_type, error, status, status, key)
        for number in range(1, attempts + 1):
            outcome = {"sent": "accepted", "held": "uncertain"}.get(
                status, "deferred" if number < attempts else "rejected"
            )
            stage.execute(_ATTEMPT, number, number, number, outcome, error_type, error, code, key)
    return keys


def _hostile(stage: Stage) -> None:
    stage.host.enqueue(
        [
            Email(
                message_key="hostile",
                sender="shop@example.com",
                to="ann@example.org",
                subject=HOSTILE.replace("\n", " ")[:900],
                text=LONG,
                correlation_id="hostile<b>",
            )
        ]
    )
    stage.execute(_SETTLE, "failed", 1, "message_rejected", LONG, "failed", "failed", "hostile")
    stage.execute(_ATTEMPT, 1, 1, 1, "rejected", "message_rejected", LONG, HOSTILE[:200], "hostile")


def _figures(stage: Stage) -> None:
    """Figures of a month by hour, of an hour by minute, a host with its processes, a pause."""
    stage.execute(
        "insert into email_hourly (hour, provider, outcome, slot, email_count) "
        "select date_trunc('hour', now(), 'UTC') - n * interval '1 hour', 'smtp', outcome, 'mail-1:1', "
        "(share * (1000 + 900 * sin(n * 0.26) + mod(n, 37)))::bigint "
        "from generate_series(0, 700) as n, (values ('accepted', 1.0), ('deferred', 0.02), ('rejected', 0.01)) "
        "as outcomes (outcome, share)"
    )
    stage.execute(
        "insert into minute_sample (minute, taken_at, emails, oldest_pending_seconds, longest_due_seconds, "
        "queues, attempts, counted_since, counted) "
        "select date_trunc('minute', now()) - n * interval '1 minute', now() - n * interval '1 minute', %s, 2.5, "
        "0.4, %s, "
        "jsonb_build_object('accepted', (65 - n) * 120 + (20 * sin(n * 0.4))::int, 'deferred', (65 - n) * 2, "
        "'rejected', (65 - n)), date_trunc('hour', now()) - interval '1 hour', '{}' "
        "from generate_series(0, 62) as n",
        orjson.dumps({"pending": 6, "sending": 2, "failed": 11, "held": 5}).decode(),
        orjson.dumps({"normal": {"messages": 4, "workers": 2}, "bulk": {"messages": 0, "workers": 2}}).decode(),
    )
    stage.execute(
        "insert into pause (scope, name, until_at, reason, actor) "
        "values ('lane', 'bulk', now() + interval '2 hours', 'A wrong link in it; ticket 4711', 'bob@ops-1')"
    )


def _id_of(stage: Stage, key: str) -> str:
    ((found,),) = stage.execute("select email_id from email_log where message_key = %s", key)
    return str(found)
