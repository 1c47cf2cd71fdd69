"""The pages Suppressions, Events, Webhooks, Keys, Lanes and tenants, Pauses, and Audit."""

from __future__ import annotations

import re
from html import unescape
from typing import Any, ClassVar

import psycopg
import pytest

from dispatcher import Email, enqueue
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
from tests.api.ops_page.browsing import Browser
from tests.api.running_api import Answer, Api, make_key
from tests.waiting import until_answer

HOSTILE = "</td><script>alert(1)</script>\u202e'\"><img src=x onerror=alert(1)>"
PAGES = ("/suppressions", "/events", "/webhooks", "/lanes", "/pauses", "/keys", "/audit")
FOR_ALL_TENANTS = ("/lanes", "/keys", "/audit")


def text_of(answer: Answer) -> str:
    """The page's text, with single spaces and without tags."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.body.decode())).split())


def make_email(connection: psycopg.Connection, key: str, tenant_id: str = "shop") -> Any:
    email = Email(
        message_key=key,
        tenant_id=tenant_id,
        sender="shop@example.com",
        to=["ann@example.org"],
        subject="secret subject",
        text="t",
    )
    return enqueue(connection, email).email_id


def make_event(connection: psycopg.Connection, email_id: Any, **more: Any) -> None:
    row = {"provider": "sendgrid", "kind": "bounced", "bounce": "hard", "code": "5.1.1", "detail": "no mailbox", **more}
    connection.execute(
        "insert into email_event (email_id, event_key, provider, kind, bounce, code, detail, doubt, happened_at) "
        "values (%s, uuid_send(gen_random_uuid()), %s, %s, %s, %s, %s, %s, now())",
        [email_id, *(row.get(name) for name in ("provider", "kind", "bounce", "code", "detail", "doubt"))],
    )


def make_webhook(connection: psycopg.Connection, tenant_id: str | None, url: str = "https://shop.example/hook") -> int:
    row = connection.execute(
        "insert into webhook (url, tenant_id, kinds, secret) values (%s, %s, '{sent}', 'whsec_c2VjcmV0') "
        "returning webhook_id",
        [url, tenant_id],
    ).fetchone()
    assert row is not None
    return int(row[0])


def audited(connection: psycopg.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("select actor, action, reason from operator_audit order by audit_id").fetchall()


@pytest.fixture
async def visitor_of_shop(connection: psycopg.Connection, ops_api: Api) -> Browser:
    """The browser of an operator of the tenant `shop`, signed in."""
    browser = Browser(ops_api)
    await browser.sign_in(make_key(connection, scopes=["operate"], name="shop operator"))
    return browser


async def test_a_recipient_is_suppressed_looked_up_masked_and_removed(
    operator: Browser, connection: psycopg.Connection
) -> None:
    await operator.get("/ops/suppressions?tenant_id=shop")
    added = await operator.submit("/add", recipients="Ann@Example.org\nexample.net", reason="closed accounts")
    listed = await operator.follow()
    assert (added.status, AddSuppressions.done in text_of(listed)) == (303, True)
    assert "a•••@example.org" in text_of(listed)

    found = await operator.submit("/look-up", recipient="ann@example.org")
    assert (found.status, found.headers.get("cache-control")) == (200, "no-store")
    assert "a•••@example.org suppressed" in text_of(found)
    assert "for ever" in text_of(found)
    removed = await operator.submit("/remove", reason="mailbox works again")
    assert "ann" not in removed.headers["location"]
    assert RemoveSuppressions.done in text_of(await operator.follow())
    again = await operator.submit("/look-up", recipient="ann@example.org")
    assert "not suppressed" in text_of(again)

    name = audited(connection)[0][0]
    assert audited(connection) == [
        (name, "suppress", "closed accounts"),
        (name, "unsuppress", "mailbox works again"),
    ]


async def test_a_wrong_recipient_is_refused_and_the_form_keeps_what_was_typed(operator: Browser) -> None:
    await operator.get("/ops/suppressions")
    refused = await operator.submit("/add", recipients="ann@example.org, nothing", reason="typed carefully")

    assert refused.status == 400
    assert "Recipients has no dot; write an address" in text_of(refused)
    assert "typed carefully" in refused.body.decode()


async def test_suppressions_are_paged_and_filtered(operator: Browser, connection: psycopg.Connection) -> None:
    connection.execute(
        "insert into suppression (tenant_id, address_hash, is_domain, masked, reason, created_at) "
        "select 'shop', decode(lpad(to_hex(n), 64, '0'), 'hex'), true, 'd' || n || '.example', "
        "case when n %% 2 = 0 then 'complaint' else 'manual' end, now() - n * interval '1 hour' "
        "from generate_series(1, 120) as n",
        [],
    )
    first = await operator.get("/ops/suppressions?tenant_id=shop")
    assert len(re.findall(r"d\d+\.example", text_of(first))) == 50
    older = re.search(r'rel="next" href="([^"]+)"', first.body.decode())
    assert older is not None
    second = await operator.get(unescape(older[1]))
    assert ("d51.example" in text_of(second), "d50.example" in text_of(second)) == (True, False)
    complaints = text_of(await operator.get("/ops/suppressions?tenant_id=shop&kind=complaint&since=10h"))
    assert re.findall(r"d\d+\.example", complaints) == ["d2.example", "d4.example", "d6.example", "d8.example"]
    assert (await operator.get("/ops/suppressions?after=1_x")).status == 400


async def test_events_link_to_their_emails_and_hostile_texts_are_text(
    operator: Browser, connection: psycopg.Connection
) -> None:
    email_id = make_email(connection, HOSTILE.replace("\u202e", ""))
    make_event(connection, email_id, code=HOSTILE[:64], detail=HOSTILE)
    make_event(connection, make_email(connection, "delivered"), kind="delivered", bounce=None)
    page = await operator.get("/ops/events?provider=sendgrid&kind=bounced")
    html = page.body.decode()

    assert page.status == 200
    assert f"/ops/emails/{email_id}" in html
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "\u202e" not in html
    assert "The last 24 hours" in text_of(page)
    assert "Bounced (hard) 1" in " ".join(text_of(page).split())
    assert "delivered" not in text_of(page).split("Arrived")[1]
    assert (await operator.get("/ops/events?since=yesterday")).status == 400
    assert "No event matches." in text_of(await operator.get("/ops/events?tenant_id=acme"))
    assert "bounced" in text_of(await operator.get("/ops/events?tenant_id=shop&since=1h")).split("Arrived")[1]


async def test_events_are_paged(operator: Browser, connection: psycopg.Connection) -> None:
    email_id = make_email(connection, "k-1")
    for number in range(55):
        make_event(connection, email_id, detail=f"event-{number}.")
    first = await operator.get("/ops/events?kind=bounced")
    following = re.search(r'rel="next" href="([^"]+)"', first.body.decode())
    assert following is not None
    second = await operator.get(unescape(following[1]))
    shown = [re.findall(r"event-\d+\.", text_of(page)) for page in (first, second)]
    assert [len(each) for each in shown] == [50, 5]
    assert len({*shown[0], *shown[1]}) == 55
    assert (await operator.get("/ops/events?after=WyJ4IiwgIngiLCAiengiXQ")).status == 400


@pytest.mark.parametrize(
    ("doubt", "words"),
    [
        ("impossible", "impossible: without effect, because no worker sent the email through this provider"),
        ("recipient", "recipient: suppresses no recipient, because nothing proves that it is about this one"),
        (None, None),
    ],
)
async def test_both_tables_of_events_say_what_an_event_does_not_prove(
    operator: Browser, connection: psycopg.Connection, doubt: str | None, words: str | None
) -> None:
    email_id = make_email(connection, "doubtful")
    make_event(connection, email_id, doubt=doubt)

    for path in ("/ops/events", f"/ops/emails/{email_id}"):
        html = (await operator.get(path)).body.decode()
        cells = re.findall(r'<td data-label="Doubt"[^>]*>(.*?)</td>', html)
        none = ["\u2013"] if path == "/ops/events" else []  # the other table leaves out a column without values
        assert [re.sub("<[^>]+>", "", cell) for cell in cells] == ([words] if words else none)


async def test_a_webhook_is_disabled_enabled_rotated_replayed_and_removed_with_reasons(
    operator: Browser, connection: psycopg.Connection
) -> None:
    number = make_webhook(connection, "shop")
    assert "https://shop.example/hook" in text_of(await operator.get("/ops/webhooks"))
    page = f"/ops/webhooks/{number}"

    await operator.get(page)
    await operator.submit("/disable", reason="receiver moves")
    assert "disabled by" in text_of(await operator.follow())
    await operator.submit("/enable", reason="moved")
    assert "The webhook is active." in text_of(await operator.follow())
    rotated = await operator.submit("/rotate", reason="leaked")
    assert re.search(r"whsec_[\w+/=-]{20,}", text_of(rotated))
    assert "hx-get" not in rotated.body.decode()
    assert "whsec_" not in text_of(await operator.get(page))
    refused = await operator.submit("/replay", reason="lost", since="some time")
    assert refused.status == 400
    await operator.submit("/replay", reason="lost", since="2h")
    assert "gets the events again" in text_of(await operator.follow())
    await operator.submit("/remove", reason="gone")
    assert "There is no webhook." in text_of(await operator.follow())

    acts = [(action, reason) for _, action, reason in audited(connection)]
    assert acts == [
        ("webhook_disable", "receiver moves"),
        ("webhook_enable", "moved"),
        ("webhook_rotate", "leaked"),
        ("webhook_replay", "lost"),
        ("webhook_remove", "gone"),
    ]


async def test_a_webhook_s_test_shows_what_the_receiver_answered(
    operator: Browser, connection: psycopg.Connection
) -> None:
    number = make_webhook(connection, None, "https://127.0.0.1:1/hook")
    await operator.get(f"/ops/webhooks/{number}")
    tested = await operator.submit("/test")

    assert tested.status == 200
    assert "Test event:" in text_of(tested)


async def test_revoking_a_key_ends_the_sessions_that_were_opened_with_it(
    operator: Browser, ops_api: Api, connection: psycopg.Connection
) -> None:
    key = make_key(connection, scopes=["operate"], tenant_id=None, name="lost laptop")
    other = Browser(ops_api)
    await other.sign_in(key)
    assert (await other.get("/ops/keys")).status == 200
    key_id = key[:15]

    assert "lost laptop" in text_of(await operator.get("/ops/keys"))
    asked = await operator.get(f"/ops/keys/{key_id}")
    assert "sessions of this page that were opened with it end" in text_of(asked)
    refused = await operator.submit("/revoke", reason=" ")
    assert (refused.status, "Reason is required" in text_of(refused)) == (400, True)
    await operator.submit("/revoke", reason="stolen")
    assert "The key is revoked." in text_of(await operator.follow())

    async def is_signed_out() -> bool:
        return (await other.get("/ops/keys")).status == 303

    await until_answer(is_signed_out)

    assert audited(connection)[-1][1:] == ("revoke_key", "stolen")
    assert (await operator.get(f"/ops/keys/{key_id}")).status == 200
    assert (await operator.get("/ops/keys/ed_unknown")).status == 404


async def test_lanes_and_tenants_are_changed_with_a_reason_and_reset(
    operator: Browser, connection: psycopg.Connection
) -> None:
    make_email(connection, "due-1")
    shown = text_of(await operator.get("/ops/lanes"))
    assert "normal shop 1" in shown

    changed = await operator.submit("/lanes/set", lane="bulk", weight="5", redeliver_seconds="off", reason="campaign")
    assert changed.status == 303
    page = text_of(await operator.follow())
    assert "bulk 5 %" in page
    refused = await operator.submit("/lanes/set", lane="bulk", weight="-1", reason="campaign")
    assert (refused.status, "Weight must be a number from 0.001 to 1,000,000" in text_of(refused)) == (400, True)
    unknown = await operator.submit("/lanes/set", lane="nosuch", weight="1", reason="r")
    assert "Lane must be one of DISPATCHER_LANES: urgent, normal, bulk." in text_of(unknown)
    await operator.get("/ops/lanes")
    await operator.submit("/tenants/set", tenant_id="acme", per_second="50", reason="contract")
    assert "acme 1 50" in text_of(await operator.follow())
    form = await operator.submit("/tenants/set", tenant_id="acme", reason="no field")
    assert "This form needs at least one of: per_second, weight. Nothing was changed." in text_of(form)
    token = re.search(r'name="csrf_token" value="([^"]+)"', form.body.decode())
    assert token is not None
    reset = {"csrf_token": token[1], "tenant_id": "acme", "lane": "bulk", "reason": "over"}
    assert (await operator.post("/ops/tenants/unset", reset)).status == 303
    assert (await operator.post("/ops/lanes/unset", reset)).status == 303
    again = await operator.post("/ops/lanes/unset", reset)
    assert (again.status, "Nothing is set for this lane or sender." in text_of(again)) == (400, True)

    acts = [(action, reason) for _, action, reason in audited(connection)]
    assert acts == [
        ("set_lane", "campaign"),
        ("set_tenant", "contract"),
        ("set_tenant", "over"),
        ("set_lane", "over"),
    ]


async def test_a_pause_shows_on_every_page_until_it_is_resumed(
    operator: Browser, visitor_of_shop: Browser, connection: psycopg.Connection
) -> None:
    await operator.get("/ops/pauses")
    refused = await operator.submit("/pause/lane", lane="nosuch", reason="r")
    assert "Lane must be one of DISPATCHER_LANES: urgent, normal, bulk." in text_of(refused)
    await operator.submit("/pause/lane", lane="bulk", for_seconds="2h", reason="legal looks at it")
    await operator.follow()

    for page in PAGES:
        assert "Paused: lane bulk until" in text_of(await operator.get(f"/ops{page}")), page
    assert "Paused:" not in text_of(await visitor_of_shop.get("/ops/suppressions"))
    await operator.get("/ops/pauses")
    await operator.submit("/resume/lane", reason="legal is done")
    page = text_of(await operator.follow())
    assert "Nothing is paused." in page
    assert "Paused:" not in page
    assert [act[1:] for act in audited(connection)] == [("pause", "legal looks at it"), ("resume", "legal is done")]


async def test_a_provider_for_which_workers_wait_is_resumed(
    operator: Browser, visitor_of_shop: Browser, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at)"
        " values ('ses', 'a:w0', 'open', 'Sending is suspended.', now() + interval '1 hour')"
    )
    assert "Sending is suspended." not in text_of(await visitor_of_shop.get("/ops/pauses"))
    assert "Sending is suspended. (1 worker, " in text_of(await operator.get("/ops/pauses"))

    await operator.submit("/resume/provider", reason="the account works again")

    assert "Resumed." in text_of(await operator.follow())
    assert connection.execute("select from provider_state where resumed_at is not null").fetchall()
    assert [act[1:] for act in audited(connection)] == [("resume", "the account works again")]


async def test_the_audit_log_is_filtered_by_actor_action_email_and_time(
    operator: Browser, connection: psycopg.Connection
) -> None:
    email_id = make_email(connection, "k-1")
    connection.execute(
        "insert into operator_audit (actor, action, reason, email_id, acted_at, detail) values "
        "('ann@ops-1', 'reveal', %s, %s, now() - interval '1 hour', '{\"lane\": \"bulk\"}'), "
        "('bob@ops-1', 'pause', 'database move', null, now() - interval '3 days', null)",
        [HOSTILE, email_id],
    )
    everything = await operator.get("/ops/audit")
    assert "<script>alert" not in everything.body.decode()
    assert f"/ops/emails/{email_id}" in everything.body.decode()
    assert "lane: bulk" in text_of(everything)

    async def found(query: str) -> tuple[bool, bool]:
        text = text_of(await operator.get(f"/ops/audit?{query}")).split("Clear")[1]
        return "ann@ops-1" in text, "bob@ops-1" in text

    assert await found("") == (True, True)
    assert await found("actor=bob%40ops-1") == (False, True)
    assert await found("action=reveal") == (True, False)
    assert await found(f"email_id={email_id}") == (True, False)
    assert await found("since=1d") == (True, False)
    assert (await operator.get("/ops/audit?email_id=nonsense")).status == 400


async def test_a_search_in_the_audit_log_continues_where_a_page_stopped(
    database_url: str, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into operator_audit (actor, action, reason, acted_at) "
        "select case when n % 9 = 0 then 'ann' else 'bob' end, 'pause', 'r', "
        "now() - n * interval '1 hour' from generate_series(1, 30) as n"
    )

    class Few(ListAudit, name="audit list", query="list_audit"):
        constants: ClassVar = {"examined": 10}

    found: list[list[str]] = []
    after = None
    async with await connect_async(database_url, name="test session") as session:
        while not found or after:
            page = await run(session, Few(actor="ann", limit=1, after=after), Who(Face.COMMAND))
            after = page.next
            found.append([each.actor for each in page.rows])

    assert [actor for actors in found for actor in actors] == ["ann"] * 3
    assert [] in found


async def test_a_visitor_of_one_tenant_sees_and_changes_only_its_own(
    visitor_of_shop: Browser, connection: psycopg.Connection
) -> None:
    own, other = make_webhook(connection, "shop"), make_webhook(connection, "acme", "https://acme.example/hook")
    make_event(connection, make_email(connection, "own-key"))
    make_event(connection, make_email(connection, "other-key", "acme"))
    browser = visitor_of_shop

    for page in FOR_ALL_TENANTS:
        assert (await browser.get(f"/ops{page}")).status == 404, page
        assert f'href="/ops{page}"' not in (await browser.get("/ops/events")).body.decode()
    for page in ("/keys/ed_abc", f"/webhooks/{other}", "/suppressions?tenant_id=acme"):
        assert (await browser.get(f"/ops{page}")).status == 404, page
    assert (await browser.get("/ops/events?tenant_id=acme")).status == 404
    events = text_of(await browser.get("/ops/events"))
    assert ("own-key" in events, "other-key" in events) == (True, False)
    listed = text_of(await browser.get("/ops/webhooks"))
    assert ("shop.example" in listed, "acme.example" in listed) == (True, False)

    shown = await browser.get(f"/ops/webhooks/{own}")
    token = re.search(r'name="csrf_token" value="([^"]+)"', shown.body.decode())
    assert token is not None
    given = {"csrf_token": token[1], "reason": "r", "recipients": "a@example.org", "recipient": "a@example.org"}
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
    assert audited(connection) == []
    await browser.get("/ops/pauses")
    mistaken = await browser.submit("/pause/tenant", reason="complaints", for_seconds="x")
    assert (mistaken.status, 'value="complaints"' in mistaken.body.decode()) == (400, True)
    await browser.submit("/pause/tenant", for_seconds="")
    assert "Paused: tenant shop" in text_of(await browser.follow())


async def test_a_tenant_sees_no_operators_host_and_an_operator_sees_it(
    ops_api: Api, operator: Browser, visitor_of_shop: Browser, connection: psycopg.Connection, database_url: str
) -> None:
    act = Act.of("ann@secret-host-1", "secret")
    webhook_id = make_webhook(connection, "shop")
    async with await connect_async(database_url, name="test session") as session:
        await run(session, PauseTenant(tenant_id="shop", reason=act.reason), Who(Face.COMMAND, act.actor))
        await run(session, DisableWebhook(webhook_id=webhook_id, reason=act.reason), Who(Face.COMMAND, act.actor))
        replay = await replaying.create(session, select(tenant_id="shop"), act)
    token = make_key(connection, scopes=["operate"])
    pages = ("/", "/emails", "/pauses", "/webhooks", f"/webhooks/{webhook_id}", f"/replays/{replay.id}")
    paths = ("pauses", "webhooks", f"webhooks/{webhook_id}", f"replays/{replay.id}")

    shown = [(await visitor_of_shop.get(f"/ops{page}")).body for page in pages]
    answers = [(await ops_api.get(f"/v1/{path}", token=token)).body for path in paths]

    assert not [page for page, body in zip(pages, shown, strict=True) if b"secret-host" in body]
    assert not [path for path, body in zip(paths, answers, strict=True) if b"secret-host" in body]
    assert b"disabled by ann" in shown[4]
    assert b"ann@secret-host-1" in (await operator.get("/ops/pauses")).body


@pytest.mark.parametrize(
    ("actor", "login"),
    [
        ("ann@ops-1", "ann"),
        ("api key ed_abc (shop)", "api key ed_abc (shop)"),
        ("openid ann-1 (ann@example.org)", "openid ann-1"),
        ("openid ann-1", "openid ann-1"),
        ("api", "api"),
    ],
)
def test_tenants_read_an_actor_without_host_and_address(actor: str, login: str) -> None:
    assert login_of(actor) == login


async def test_a_visitor_who_may_only_read_gets_no_form_and_can_send_none(
    connection: psycopg.Connection, ops_api: Api
) -> None:
    browser = Browser(ops_api)
    await browser.sign_in(make_key(connection, scopes=["read"], tenant_id=None, name="wall screen"))
    number = make_webhook(connection, "shop")

    for page in (*PAGES, f"/webhooks/{number}"):
        answer = await browser.get(f"/ops{page}")
        assert answer.status == 200, page
        assert 'name="reason"' not in answer.body.decode(), page
    for path in ("/pause/all", "/suppressions/add", "/webhooks/remove", "/lanes/set", "/keys/revoke"):
        assert (await browser.post(f"/ops{path}", {"reason": "r"})).status == 403, path
