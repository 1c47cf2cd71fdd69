"""The Overview as a page: what every visitor sees, and what only visitors of all tenants see."""

from __future__ import annotations

import re
from html import unescape

import orjson
import psycopg
import pytest

from tests.api.ops_page.browsing import Browser
from tests.api.running_api import Api, make_key
from tests.store.books import Books
from tests.waiting import until_answer


def element(body: bytes, element_id: str) -> str:
    """The text of the figure with this id."""
    found = re.search(rf'<div class="figure([^"]*)" id="{element_id}">(.*?)</div>', body.decode(), re.DOTALL)
    assert found is not None
    return found[1] + " " + " ".join(unescape(re.sub(r"<[^>]*>", " ", found[2])).split())


async def eventually(browser: Browser, words: bytes) -> bytes:
    """The page as soon as it contains these words. A process keeps an answer for two seconds."""
    pages = [b""]

    async def has_words() -> bool:
        pages[0] = await overview(browser)
        return words in pages[0]

    await until_answer(has_words)
    return pages[0]


async def overview(browser: Browser) -> bytes:
    answer = await browser.get("/ops/")
    assert answer.status == 200
    return answer.body


async def test_dead_letters_and_held_emails_change_colour_symbol_and_word(
    operator: Browser, connection: psycopg.Connection
) -> None:
    books = Books(connection)
    green = await overview(operator)
    failed, held = books.enqueue(2)
    books.change(failed, status="failed", publish_due_at=None)
    books.change(held, status="held", publish_due_at=None)
    await operator.get("/ops/")
    red = await eventually(operator, b"huge bad")

    assert element(green, "dead-letters") == " huge good Dead letters 0 ✓ None"
    assert element(green, "held") == " huge good Held 0 ✓ None"
    assert element(red, "dead-letters") == " huge bad Dead letters 1 ▲ Act: replay or discard them"
    assert element(red, "held") == " huge bad Held 1 ▲ Act: confirm or release them"


async def test_the_page_has_every_part_with_a_table_beside_each_chart(
    operator: Browser, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 's', 4321)"
    )
    connection.execute("insert into host_presence (holder, host, seen_at) values ('a:1', 'host-<b>1', now())")

    text = (await overview(operator)).decode()

    headings = re.findall(r"<h2[^>]*>([^<]*)", text)
    assert headings == ["Emails", "Dead letter queue", "Sent", "Providers", "Lanes and queues", "Hosts and workers"]
    charts = [orjson.loads(unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', text)]
    assert [len(chart["x"]) for chart in charts] == [60, 24, 31]
    assert charts[1]["series"][0]["values"][-1] == 4321
    assert text.count('<td class="number">4,321</td>') == 2  # of the hour, and of the day
    assert "host-&lt;b&gt;1" in text
    assert "No monitor has checked the queue" in text
    assert "style=" not in text
    assert not re.search(r"<script(?![^>]* src=)", text)


@pytest.fixture
async def tenant(ops_api: Api, connection: psycopg.Connection) -> Browser:
    """The browser of a visitor of the tenant acme."""
    browser = Browser(ops_api)
    await browser.sign_in(make_key(connection, scopes=["read"], tenant_id="acme", name="eve"))
    return browser


async def test_a_tenants_visitor_sees_its_counts_and_no_hosts_providers_queues_or_other_tenants(
    tenant: Browser, connection: psycopg.Connection
) -> None:
    books = Books(connection)
    own, other = books.enqueue(1, tenant_id="acme") + books.enqueue(1, tenant_id="other")
    for email_id in (own, other):
        books.change(email_id, status="failed", publish_due_at=None)
    connection.execute("insert into host_presence (holder, host, seen_at) values ('a:1', 'host-1', now())")
    connection.execute(
        "insert into pause (scope, name, reason, actor) values ('tenant', 'other', 'secret', 'ann@ops-1'),"
        " ('tenant', 'acme', 'complaints', 'ann@ops-1')"
    )

    body = await overview(tenant)

    assert element(body, "dead-letters").startswith(" huge bad Dead letters 1 ")
    assert b"complaints" in body
    for hidden in (b"secret", b"ops-1", b"host-1", b"smtp", b"Providers", b"Lanes and queues", b"data-chart"):
        assert hidden not in body.partition(b"<main")[2].partition(b"</main>")[0]


async def test_while_postgresql_is_slow_the_page_shows_old_figures_with_their_age(
    operator: Browser, database_url: str
) -> None:
    await overview(operator)
    with psycopg.connect(database_url) as locker:
        locker.execute("lock table minute_sample in access exclusive mode")

        page = await eventually(operator, b"These figures are")

    assert element(page, "dead-letters") == " huge good Dead letters 0 ✓ None"
