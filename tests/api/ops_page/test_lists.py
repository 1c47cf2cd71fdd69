"""What all lists share: time zone, filters, pages, the row of an email; and the navigation."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from starlette.requests import Request

from dispatcher.api.ops_page.audit import acts_of
from dispatcher.api.ops_page.rendering import actor
from dispatcher.api.ops_page.reported_events import EventCounts
from dispatcher.api.ops_page.zones import ZONE_COOKIE, in_zone, with_zone, zone_of
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.domain.audit import AuditEntry
from dispatcher.ops.email_lines import masked
from dispatcher.store.events import EventCount
from tests.api.ops_page.browsing import Browser, links_of, signed_in, text_of
from tests.api.ops_page.rows import dead_email, event, write
from tests.api.running_api import running, settings_of
from tests.store.books import Books

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cookie", "name"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        ("UTC", "UTC"),
        ("", "UTC"),
        ("Mars/Olympus", "UTC"),
        ("../../etc/passwd", "UTC"),
        ("/etc/passwd", "UTC"),
        ("Europe", "UTC"),
        ("x" * 5000, "UTC"),
    ],
)
def test_the_zone_is_the_cookies_or_utc(cookie: str, name: str) -> None:
    assert str(zone_of(Request({"type": "http", "headers": [(b"cookie", f"{ZONE_COOKIE}={cookie}".encode())]}))) == name


def test_a_time_without_a_zone_is_in_the_visitors_zone() -> None:
    assert with_zone("2026-12-01T13:54", BERLIN) == "2026-12-01T13:54:00+01:00"
    assert with_zone("2026-12-01T13:54Z", BERLIN) == "2026-12-01T13:54Z"
    assert with_zone("15m", BERLIN) == "15m"
    assert in_zone(datetime.max.replace(tzinfo=UTC), BERLIN).year == 9999


async def test_times_are_shown_and_typed_in_the_browsers_zone_which_is_named(operator: Browser, books: Books) -> None:
    email_id = dead_email(books)
    books.change(email_id, created_at=datetime.now(UTC) - timedelta(minutes=30))
    operator.cookies[ZONE_COOKIE] = "Europe/Berlin"
    own = datetime.now(UTC).astimezone(BERLIN)
    before, after = (f"{own - timedelta(minutes=ago):%Y-%m-%dT%H:%M}" for ago in (40, 20))

    page = await operator.get("/ops/emails")
    assert "Times: Europe/Berlin" in text_of(page)
    assert f"{own - timedelta(minutes=30):%Y-%m-%d %H:%M}" in page.body.decode()
    for path in ("dead-letters", "replays/new"):
        found = [
            str(email_id) in (await operator.get(f"/ops/{path}?since={at}")).body.decode() for at in (before, after)
        ]
        assert found == [True, False], path


def test_a_masked_subject_can_be_recognised_and_shows_no_code() -> None:
    assert masked("Your code is 4711") == "Y••• c••• i• ••••"
    assert masked("A1B2 " + "x" * 40) == "•••• x•••••••"


async def test_each_list_says_who_and_what_and_when_a_waiting_email_is_due(operator: Browser, books: Books) -> None:
    waiting = books.enqueue_one(to="ann@example.org", subject="Receipt 17", tags=("q4",), lane="bulk")
    due = datetime.now(UTC) + timedelta(hours=5, minutes=1)
    books.change(waiting, status="waiting", wait_reason="scheduled", wait_until=due, publish_due_at=None)
    dead_email(books)
    dead_email(books, "held")

    listed = text_of(await operator.get("/ops/emails"))
    assert "waiting a•••@example.org" in listed
    assert "R•••••• •• bulk q4 default due in 5 h" in listed
    for path in ("/dead-letters", "/held", "/replays/new"):
        assert "a•••@example.org" in text_of(await operator.get(f"/ops{path}")), path
    head = text_of(await operator.get(f"/ops/emails/{waiting}"))
    for words in ("Subject R•••••• ••", "To a•••@example.org", "From @ example.com", "Tags q4"):
        assert words in head


@pytest.mark.parametrize(("how", "words"), [("shown", "Receipt 17"), ("off", "\N{EN DASH}")])
async def test_subjects_are_shown_as_the_setting_says(
    servers: Servers, database_url: str, topology: Topology, operator_key: str, books: Books, how: str, words: str
) -> None:
    books.enqueue_one(subject="Receipt 17")
    async with running(settings_of(database_url, servers.amqp_url, topology, OPS="on", OPS_SUBJECT=how)) as api:
        page = text_of(await (await signed_in(api, operator_key)).get("/ops/emails"))
    assert f" {words} normal" in page


async def test_filters_have_the_same_names_everywhere_and_earlier_names_work(operator: Browser, books: Books) -> None:
    mine = books.enqueue_one(tenant_id="shop")
    dead = dead_email(books, tenant_id="shop")
    for path, email_id, earlier in (
        ("emails", mine, "tenant_id=shop&created_from=1h"),
        ("dead-letters", dead, "tenant_id=shop&newer_than_seconds=1h"),
    ):
        for query, is_found in ((earlier, True), ("tenant=shop&since=1h", True), ("tenant=bank&since=1h", False)):
            page = await operator.get(f"/ops/{path}?{query}")
            assert (f"/ops/emails/{email_id}" in links_of(page)) is is_found, query
            assert "Tenant: " in text_of(page)
            assert "tenant=" not in next(link for link in links_of(page, "since=") if link.count("=") == 1)
    assert '<option value="shop">' in (await operator.get("/ops/emails")).body.decode()


async def test_an_unknown_filter_in_a_link_is_said(operator: Browser) -> None:
    for path in ("emails", "dead-letters", "held", "events", "audit", "suppressions"):
        notes = [
            "It was ignored" in text_of(await operator.get(f"/ops/{path}?{name}=1h")) for name in ("sinec", "since")
        ]
        assert notes == [True, False], path


async def test_a_list_has_pages_in_both_directions_and_a_size(operator: Browser, books: Books) -> None:
    books.enqueue(60)

    def link(kind: str) -> str:
        assert operator.page is not None
        (found,) = re.findall(rf'rel="{kind}" href="([^"]+)"', operator.page.body.decode())
        return unescape(found)

    await operator.get("/ops/emails?limit=25&lane=normal")
    for kind, rows in (("next", 25), ("next", 10), ("prev", 25), ("prev", 25)):
        assert len(links_of(await operator.get(link(kind)), "emails/0")) == rows
    assert operator.page is not None
    assert 'rel="prev"' not in operator.page.body.decode()
    assert len(links_of(await operator.get("/ops/emails?limit=9999"), "emails/0")) == 50


async def test_the_navigation_has_groups_with_counts_and_only_what_the_visitor_may_see(
    operator: Browser, shop_operator: Browser, books: Books
) -> None:
    dead_email(books)
    dead_email(books, "held", tenant_id="shop")

    page = text_of(await operator.get("/ops/held"))
    own = text_of(await shop_operator.get("/ops/pauses"))

    assert "Overview Emails Failures 2 Events Suppressions Settings" in page
    assert "Failed 1 Held 1 Poison Replays" in page
    assert "Failures 1 Events Suppressions Settings Pauses Webhooks" in own


async def test_kinds_of_bounces_have_rates_and_filters_of_their_own(operator: Browser, books: Books) -> None:
    hard, soft = books.enqueue_one(), books.enqueue_one()
    for email_id, kind in ((hard, "hard"), (soft, "soft")):
        event(books, email_id, "bounced", bounce=kind)

    page = await operator.get("/ops/events")
    (link,) = links_of(page, "bounce=hard")
    found = links_of(await operator.get(link), "/ops/emails/0")

    assert "Bounced (hard) 1 50 %, limit 5 %" in text_of(page)
    assert found == [f"/ops/emails/{hard}"]


def test_a_share_above_its_limit_is_marked_if_enough_emails_were_reported() -> None:
    def is_marked(bounced: int, delivered: int) -> bool:
        counts = [
            EventCount("ses", "bounced", "hard", bounced, NOW),
            EventCount("ses", "delivered", None, delivered, NOW),
        ]
        tiles = EventCounts(counts, False, NOW).tiles
        return next(tile.is_above_limit for tile in tiles if tile.bounce)

    assert [is_marked(6, 94), is_marked(4, 96), is_marked(6, 4)] == [True, False, False]


def test_the_audit_shows_a_bulk_act_once() -> None:
    entries = [
        AuditEntry(seconds, NOW - timedelta(seconds=seconds), "ann", "cancel", why, UUID(int=seconds), None, {})
        for seconds, why in ((1, "ticket 1"), (2, "ticket 1"), (3, "ticket 1"), (9, "ticket 2"), (3600, "ticket 2"))
    ]

    assert [act.emails for act in acts_of(entries)] == [3, 1, 1]


async def test_an_audit_page_is_of_acts_and_continues_after_the_last_one(operator: Browser, books: Books) -> None:
    for number in range(26):
        for email_id in books.enqueue(2):
            write(books, "operator_audit", actor="ann", action="cancel", reason=f"why-{number}", email_id=email_id)

    page = await operator.get("/ops/audit?limit=25")
    (following,) = re.findall(r'rel="next" href="([^"]+)"', page.body.decode())
    last = await operator.get(unescape(following))

    assert text_of(page).count("2 emails, the last") == 25
    assert ("why-0" in text_of(page), "why-0" in text_of(last)) == (False, True)


def test_an_actor_is_the_name_of_the_keys_owner() -> None:
    assert actor("api key ed_bu4ijqbp25qz (ann)") == '<span title="api key ed_bu4ijqbp25qz (ann)"><bdi>ann</bdi></span>'
    assert actor("ann@ops-1") == "<bdi>ann@ops-1</bdi>"
