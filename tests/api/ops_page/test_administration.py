"""The Overview, and the pages Suppressions, Events, Webhooks, Keys, Lanes, Tenants, Pauses, and Audit."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any, ClassVar

import orjson

from dispatcher.actions.audit import ListAudit
from dispatcher.actions.dlq import select
from dispatcher.actions.pauses import PauseTenant
from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.suppressions import AddSuppressions, RemoveSuppressions
from dispatcher.actions.webhooks import DisableWebhook
from dispatcher.domain.controls import login_of
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.store.connections import connect_async
from tests.api.ops_page.browsing import Browser, links_of, signed_in, text_of, token_of
from tests.api.ops_page.rows import audited, dead_email, event, write
from tests.api.running_api import Answer, Api, make_key
from tests.store.books import Books
from tests.store.suppressing import hasher_of, suppress
from tests.waiting import until_answer

PAGES = ("/suppressions", "/events", "/webhooks", "/lanes", "/tenants", "/pauses", "/senders", "/keys", "/audit")
FOR_ALL_TENANTS = ("/lanes", "/tenants", "/senders", "/keys", "/audit")


def make_webhook(books: Books, tenant_id: str, url: str = "https://shop.example/hook") -> int:
    write(books, "webhook", url=url, tenant_id=tenant_id, kinds=["sent"], secret="whsec_c2VjcmV0")
    return int(books.select("select max(webhook_id) as made from webhook")[0]["made"])


def count_stats(books: Books, tenant_id: str, **counts: int) -> None:
    """Counts emails of this hour and of its day."""
    zeros = dict.fromkeys(("sent", "failed", "suppressed", "held", "delivered", "opened", "clicked", "unsubscribed"), 0)
    zeros |= dict.fromkeys(("bounced", "bounced_hard", "bounced_soft", "bounced_blocked", "rejected", "complained"), 0)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for is_day, begins_at in ((False, hour), (True, hour.replace(hour=0))):
        row = {"tenant_id": tenant_id, "lane": "normal", "provider": "capture", "tag": "(none)", **zeros, **counts}
        write(books, "email_stat", is_day=is_day, begins_at=begins_at, **row)


def figure(page: Answer, element_id: str) -> str:
    found = re.search(rf'<div class="figure([^"]*)" id="{element_id}">(.*?)</div>', page.body.decode(), re.DOTALL)
    assert found is not None
    return found[1] + " " + " ".join(unescape(re.sub(r"<[^>]*>", " ", found[2])).split())


def charts_of(page: Answer) -> list[dict[str, Any]]:
    return [orjson.loads(unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', page.body.decode())]


async def eventually(browser: Browser, words: bytes) -> Answer:
    """The Overview as soon as it contains these words. A process keeps an answer for two seconds."""
    return await until_answer(lambda: browser.get("/ops/"), lambda page: words in page.body)


async def test_the_overview_has_every_part_with_a_table_beside_each_chart(operator: Browser, books: Books) -> None:
    books.connection.execute(
        "insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 's', 4321)"
    )
    write(books, "host_presence", holder="a:1", host="host-<b>1", seen_at="now")
    queues = orjson.dumps({"dlq": {"messages": 7, "workers": 0}}).decode()
    sample = {"emails": "{}", "attempts": "{}", "counted": "{}", "queues": queues, "p99_seconds": 1.5}
    write(books, "minute_sample", minute="now", taken_at="now", counted_since="now", **sample)
    for number in range(7):
        count_stats(books, f"tenant-{number}", sent=10 * number, delivered=8 * number, bounced=number)

    page = await operator.get("/ops/")
    by_hour, by_day, by_tenant = [
        await operator.get(f"/ops/?range={each}") for each in ("day", "month", "day&split=tenant")
    ]

    text = page.body.decode()
    headings = re.findall(r"<h2[^>]*>([^<]*)", text)
    assert headings == ["Sent", "Emails", "Dead letter queue", "Providers", "Lanes and queues", "Hosts and workers"]
    minutes, latency, depth = charts_of(page)
    assert [len(charts_of(each)[0]["x"]) for each in (page, by_hour, by_day)] == [60, 24, 31]
    assert (len(minutes["series"]), latency["series"][1]["values"], depth["series"][0]["values"]) == (2, [1.5], [7])
    for each in (by_hour, by_day):
        assert charts_of(each)[0]["series"][0]["values"][-1] == 4321
        assert each.body.count(b'<td class="number">4,321</td>') == 1
    last = {each["label"]: each["values"][-1] for each in charts_of(by_tenant)[0]["series"]}
    assert last == {f"tenant-{number}": 10 * number for number in range(2, 7)} | {"(others)": 10}
    assert (figure(page, "delivered"), figure(page, "bounced")) == (
        " Delivered 80 % of 210 in 24 hours",
        " warn Bounced 10 % 21 in 24 hours",
    )
    assert "host-&lt;b&gt;1" in text
    assert "No monitor has checked the queue" in text
    assert "style=" not in text
    assert not re.search(r"<script(?![^>]* src=)", text)
    write(books, "pause", scope="provider", name="smtp", reason="maintenance", actor="ann@ops")
    await eventually(operator, b"paused by ann")


async def test_a_tenants_overview_has_its_counts_and_no_hosts_providers_queues_or_other_tenants(
    shop_operator: Browser, books: Books
) -> None:
    for tenant in ("shop", "other"):
        dead_email(books, tenant_id=tenant)
        reason = "complaints" if tenant == "shop" else "secret"
        write(books, "pause", scope="tenant", name=tenant, reason=reason, actor="ann@ops-1")
        count_stats(books, tenant, sent=4321 if tenant == "shop" else 8765)
    write(books, "host_presence", holder="a:1", host="host-1", seen_at="now")

    page = await shop_operator.get("/ops/")
    stats = await shop_operator.get("/ops/stats?per=tenant")

    assert figure(page, "dead-letters").startswith(" bad Failed 1 ")
    assert figure(page, "sent") == " Sent 4,321 in the last 24 hours"
    assert page.body.count(b'<td class="number">4,321</td>') == 1
    assert b"complaints" in page.body
    for hidden in (b"secret", b"ops-1", b"host-1", b"smtp", b"Providers", b"Lanes and queues", b"8,765", b"other"):
        assert hidden not in page.body.partition(b"<main")[2].partition(b"</main>")[0]
    assert (b"4,321" in stats.body, b"8,765" in stats.body) == (True, False)


async def test_tenants_are_listed_with_their_shares_the_largest_first(operator: Browser, books: Books) -> None:
    count_stats(books, "shop", sent=2000, failed=40, bounced=30, complained=4)
    count_stats(books, "acme", sent=3000)
    write(books, "tenant_limit", tenant_id="quiet", weight=2)

    page = await operator.get("/ops/tenants")

    cells = re.findall(r'data-label="(?:Tenant|Sent, 24 h|\w+, 7 d|Weight)"[^>]*>(.*?)</t[hd]>', page.body.decode())
    shown = [unescape(re.sub(r"<[^>]*>", "", each)).strip() for each in cells]
    shares = {
        "shop": ["2 %", "1.5 %", "0.2 %", "1"],
        "acme": ["0 %", "0 %", "0 %", "1"],
        "quiet": [*"\N{EN DASH}" * 3, "2"],
    }
    sent = {"acme": "3,000", "shop": "2,000", "quiet": "0"}
    assert shown == [text for name, count in sent.items() for text in (name, count, count, *shares[name])]
    assert {"/ops/emails?tenant=acme", "/ops/pauses?tenant=acme#pause-tenant-tenant_id"} <= set(links_of(page))


async def test_the_overview_tolerates_the_fields_of_alerts_of_a_later_release(operator: Browser, books: Books) -> None:
    readable = {"kind": "dead_letters", "raised_at": "2026-11-28T10:00:00+00:00", "reason": "18 messages"}
    alerts = orjson.dumps([readable | {"owner": "ann"}, {"kind": "of_a_later_release"}, 7]).decode()
    check = {"queue": operator.api.settings.dlq, "host": "mail-7", "depth": 1, "alerts": alerts}
    write(books, "alert_check", checked_at="now", **check)

    page = await operator.get("/ops/")

    assert (page.status, b"18 messages" in page.body) == (200, True)


async def test_a_recipient_is_suppressed_looked_up_masked_and_removed(operator: Browser) -> None:
    await operator.get("/ops/suppressions?tenant_id=shop")
    refused = await operator.submit("/add", recipients="ann@example.org, nothing", reason="typed carefully")
    assert (refused.status, "typed carefully" in refused.body.decode()) == (400, True)
    await operator.submit("/add", recipients="Ann@Example.org\nexample.net", reason="closed accounts")
    listed = text_of(await operator.follow())
    assert (AddSuppressions.done in listed, "a•••@example.org" in listed) == (True, True)

    found = await operator.submit("/look-up", recipient="ann@example.org")
    assert (found.status, found.headers.get("cache-control")) == (200, "no-store")
    assert "a•••@example.org suppressed" in text_of(found)
    assert "for ever" in text_of(found)
    removed = await operator.submit("/remove", reason="mailbox works again")
    assert "ann" not in removed.headers["location"]
    assert RemoveSuppressions.done in text_of(await operator.follow())
    again = await operator.submit("/look-up", recipient="ann@example.org")
    assert "not suppressed" in text_of(again)


async def test_suppressions_of_all_tenants_are_listed_and_removed_by_their_ids(operator: Browser, books: Books) -> None:
    suppress(books.connection, "ann@example.org", tenant_id="acme")
    suppress(books.connection, "bob@example.org", tenant_id="shop")

    listed = text_of(await operator.get("/ops/suppressions"))
    assert ("a•••@example.org" in listed, "b•••@example.org" in listed) == (True, True)
    empty = text_of(await operator.get("/ops/suppressions?tenant_id=default"))
    assert "The tenant default suppresses no such recipient. Tenants with entries: acme , shop ." in empty

    email_id = books.enqueue_one(tenant_id="shop")
    books.change(email_id, status="sent", delivery="bounced_hard", publish_due_at=None)
    address_hash = hasher_of(books.connection).hash("bob@example.org")
    event(books, email_id, bounce="hard", address_hash=address_hash)
    page = text_of(await operator.get(f"/ops/emails/{email_id}"))
    assert "The recipient b•••@example.org is suppressed (Hard bounce) since" in page
    await operator.submit("/suppressions/remove", reason="mailbox works again")
    assert "b•••@example.org" not in text_of(await operator.follow())
    assert "is suppressed" not in text_of(await operator.get(f"/ops/emails/{email_id}"))
    assert [row["tenant_id"] for row in books.select("select tenant_id from suppression")] == ["acme"]


async def test_events_link_to_their_emails_and_are_filtered_and_paged(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(tenant_id="shop")
    event(books, books.enqueue_one(), "delivered")
    for number in range(55):
        event(books, email_id, bounce="hard", detail=f"event-{number}.")

    first = await operator.get("/ops/events?provider=sendgrid&kind=bounced")
    (following,) = re.findall(r'rel="next" href="([^"]+)"', first.body.decode())
    second = await operator.get(unescape(following))

    shown = [re.findall(r"event-\d+\.", text_of(page)) for page in (first, second)]
    assert [len(each) for each in shown] == [50, 5]
    assert len({*shown[0], *shown[1]}) == 55
    assert links_of(first, f"/ops/emails/{email_id}")
    assert "The last 24 hours" in text_of(first)
    assert "Bounced (hard) 55" in text_of(first)
    assert "delivered" not in text_of(first).split("Arrived")[1]
    assert "No event matches." in text_of(await operator.get("/ops/events?tenant_id=acme"))
    assert "bounced" in text_of(await operator.get("/ops/events?tenant_id=shop&since=1h")).split("Arrived")[1]


async def test_a_webhook_is_tested_replayed_rotated_and_its_secret_shown_once(operator: Browser, books: Books) -> None:
    page = f"/ops/webhooks/{make_webhook(books, 'shop', 'https://127.0.0.1:1/hook')}"
    assert "https://127.0.0.1:1/hook" in text_of(await operator.get("/ops/webhooks"))

    await operator.get(page)
    tested = await operator.submit("/test")
    assert (tested.status, "Test event:" in text_of(tested)) == (200, True)
    await operator.get(page)
    await operator.submit("/replay", reason="lost", since="2h")
    assert "gets the events again" in text_of(await operator.follow())
    rotated = await operator.submit("/rotate", reason="leaked")
    assert re.search(r"whsec_[\w+/=-]{20,}", text_of(rotated))
    assert "hx-get" not in rotated.body.decode()
    assert "whsec_" not in text_of(await operator.get(page))


async def test_revoking_a_key_ends_the_sessions_opened_with_it(operator: Browser, ops_api: Api, books: Books) -> None:
    key = make_key(books.connection, scopes=["operate"], tenant_id=None, name="lost laptop")
    other = await signed_in(ops_api, key)
    assert (await other.get("/ops/keys")).status == 200

    assert "lost laptop" in text_of(await operator.get("/ops/keys"))
    asked = await operator.get(f"/ops/keys/{key[:15]}")
    assert "sessions of this page that were opened with it end" in text_of(asked)
    await operator.submit("/revoke", reason="stolen")
    assert "The key is revoked." in text_of(await operator.follow())
    await until_answer(lambda: other.get("/ops/keys"), lambda answer: answer.status == 303)
    assert (await operator.get(f"/ops/keys/{key[:15]}")).status == 200
    assert (await operator.get("/ops/keys/ed_unknown")).status == 404


async def test_a_pause_shows_on_every_page_until_it_is_resumed(operator: Browser, shop_operator: Browser) -> None:
    await operator.get("/ops/pauses")
    await operator.submit("/pause/lane", lane="bulk", for_seconds="2h", reason="legal looks at it")
    await operator.follow()

    for page in PAGES:
        assert "Paused: lane bulk until" in text_of(await operator.get(f"/ops{page}")), page
    assert "Paused:" not in text_of(await shop_operator.get("/ops/suppressions"))
    await operator.get("/ops/pauses")
    await operator.submit("/resume/lane", reason="legal is done")
    text = text_of(await operator.follow())
    assert ("Nothing is paused." in text, "Paused:" in text) == (True, False)


async def test_the_page_says_what_a_pause_stops_and_suggests_known_tenants(operator: Browser, books: Books) -> None:
    books.enqueue(2, tenant_id="acme")
    page = await operator.get("/ops/pauses")
    assert '<option value="acme"></option>' in page.body.decode()

    for tenant, effect in {
        "acmee": "The tenant 'acmee' has no email: check the name. 0 due emails wait because of it.",
        "acme": "2 due emails wait because of it.",
    }.items():
        await operator.submit("/pause/tenant", tenant_id=tenant, reason="complaints")
        assert effect in text_of(await operator.follow())
        await operator.get("/ops/pauses")


async def test_a_provider_for_which_workers_wait_is_shown_to_operators_for_all_tenants(
    operator: Browser, shop_operator: Browser, books: Books
) -> None:
    state = {"provider": "ses", "slot": "a:w0", "state": "open", "reason": "Sending is suspended."}
    write(books, "provider_state", until_at="tomorrow", **state)

    assert "Sending is suspended." not in text_of(await shop_operator.get("/ops/pauses"))
    assert "Sending is suspended. (1 worker, " in text_of(await operator.get("/ops/pauses"))


async def test_the_audit_log_is_filtered_by_actor_action_email_and_time(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one()
    detail = '{"lane": "bulk"}'
    write(books, "operator_audit", actor="ann@ops-1", action="reveal", reason="r", email_id=email_id, detail=detail)
    write(books, "operator_audit", actor="bob@ops-1", action="pause", reason="r", acted_at="2026-01-01 00:00+00")
    everything = await operator.get("/ops/audit")
    assert links_of(everything, f"/ops/emails/{email_id}")
    assert "lane: bulk" in text_of(everything)

    for query in ("", "actor=bob%40ops-1", "action=reveal", f"email_id={email_id}", "since=1d"):
        text = text_of(await operator.get(f"/ops/audit?{query}")).split("Details")[1]
        expected = (not query.startswith("actor"), query == "" or query.startswith("actor"))
        assert ("ann@ops-1" in text, "bob@ops-1" in text) == expected, query


async def test_a_search_in_the_audit_log_continues_where_a_page_stopped(books: Books, database_url: str) -> None:
    for number in range(1, 41):
        actor = "bob" if number % 19 else "ann"
        write(books, "operator_audit", actor=actor, action="pause", reason="r")

    class Few(ListAudit, name="audit list", query="list_audit"):
        constants: ClassVar = {"examined": 10}

    found: list[list[str]] = []
    after = None
    async with await connect_async(database_url, name="test session") as session:
        while not found or after:
            page = await run(session, Few(actor="ann", limit=1, after=after), Who(Face.COMMAND))
            after = page.next
            found.append([each.actor for each in page.rows])

    assert [actor for actors in found for actor in actors] == ["ann"] * 2
    assert [] in found


async def test_a_visitor_of_one_tenant_sees_and_changes_only_its_own(shop_operator: Browser, books: Books) -> None:
    own, other = make_webhook(books, "shop"), make_webhook(books, "acme", "https://acme.example/hook")
    for tenant in ("shop", "acme"):
        event(books, books.enqueue_one(tenant_id=tenant), detail=f"event of {tenant}")
    browser = shop_operator

    for page in FOR_ALL_TENANTS:
        assert (await browser.get(f"/ops{page}")).status == 404, page
        assert f'href="/ops{page}"' not in (await browser.get("/ops/events")).body.decode()
    for page in ("/keys/ed_abc", f"/webhooks/{other}", "/suppressions?tenant_id=acme", "/events?tenant_id=acme"):
        assert (await browser.get(f"/ops{page}")).status == 404, page
    events = text_of(await browser.get("/ops/events"))
    assert ("event of shop" in events, "event of acme" in events) == (True, False)
    listed = text_of(await browser.get("/ops/webhooks"))
    assert ("shop.example" in listed, "acme.example" in listed) == (True, False)

    token = token_of(await browser.get(f"/ops/webhooks/{own}"))
    given = {"csrf_token": token, "reason": "r", "recipients": "a@example.org", "recipient": "a@example.org"}
    for path, more in (
        (f"/webhooks/{other}/test", {}),
        ("/suppressions/add", {"tenant_id": "acme"}),
        ("/suppressions/look-up", {"tenant_id": "acme"}),
        ("/suppressions/remove", {"tenant_id": "acme"}),
        ("/pause/all", {}),
        ("/pause/tenant", {"tenant_id": "acme"}),
        ("/resume/lane", {"lane": "bulk"}),
        ("/lanes/set", {"lane": "bulk", "weight": "1"}),
        ("/tenants/set", {"tenant_id": "shop", "per_second": "1"}),
        ("/keys/revoke", {}),
    ):
        assert (await browser.post(f"/ops{path}", {**given, **more})).status == 404, path
    removed = await browser.post("/ops/webhooks/remove", {**given, "webhook_id": str(other)})
    assert (removed.status, f"There is no webhook {other}." in text_of(removed)) == (400, True)
    assert audited(books) == []
    await browser.get("/ops/pauses")
    mistaken = await browser.submit("/pause/tenant", reason="complaints", for_seconds="x")
    assert (mistaken.status, 'value="complaints"' in mistaken.body.decode()) == (400, True)
    await browser.submit("/pause/tenant", for_seconds="")
    assert "Paused: tenant shop" in text_of(await browser.follow())


async def test_a_tenant_sees_no_operators_host_and_an_operator_sees_it(
    ops_api: Api, operator: Browser, shop_operator: Browser, books: Books, database_url: str
) -> None:
    act = Act.of("ann@secret-host-1", "secret")
    webhook_id = make_webhook(books, "shop")
    async with await connect_async(database_url, name="test session") as session:
        await run(session, PauseTenant(tenant_id="shop", reason=act.reason), Who(Face.COMMAND, act.actor))
        await run(session, DisableWebhook(webhook_id=webhook_id, reason=act.reason), Who(Face.COMMAND, act.actor))
        replay = await replaying.create(session, select(tenant_id="shop"), act)
    token = make_key(books.connection, scopes=["operate"])
    paths = ("pauses", "webhooks", f"webhooks/{webhook_id}", f"replays/{replay.id}")

    shown = {path: (await shop_operator.get(f"/ops/{path}")).body for path in ("", "emails", *paths)}
    answers = {path: (await ops_api.get(f"/v1/{path}", token=token)).body for path in paths}

    assert not [path for path, body in (*shown.items(), *answers.items()) if b"secret-host" in body]
    assert b"disabled by ann" in shown[f"webhooks/{webhook_id}"]
    assert b"ann@secret-host-1" in (await operator.get("/ops/pauses")).body


def test_tenants_read_an_actor_without_an_address() -> None:
    assert login_of("openid ann-1 (ann@example.org)") == "openid ann-1"
