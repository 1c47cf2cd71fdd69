"""The pages Dead letters, Held, Poison, and Replays."""

from __future__ import annotations

from pika.spec import BasicProperties

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.domain.poison_id import poison_id
from tests.api.ops_page.browsing import Browser, links_of, signed_in, text_of, token_of
from tests.api.ops_page.rows import audited, dead_email
from tests.api.ops_page.test_hostile_texts import MARK, SHORT, faults_of
from tests.api.running_api import running, settings_of
from tests.broker.rabbit import Rabbit
from tests.store.books import Books
from tests.waiting import until_answer


async def has_text(browser: Browser, path: str, words: str) -> None:
    await until_answer(lambda: browser.get(path), lambda page: words in text_of(page))


async def test_dead_letters_are_grouped_by_cause_and_all_are_replayed(operator: Browser, books: Books) -> None:
    failed = [dead_email(books) for _ in range(3)]
    other = dead_email(books, error_type="suppressed")
    grouped = await operator.get("/ops/dead-letters")
    (link, *_) = links_of(grouped, "error_type=refused")
    assert "refused · smtp · … no such user 3 0" in text_of(grouped)

    (dry_run, *_) = links_of(await operator.get(link), "/replays/new")
    preview = await operator.get(dry_run)
    assert "Sent again 3 of 3 selected" in text_of(preview)
    assert {books.status(each) for each in failed} == {"failed"}

    without_reason = await operator.submit("/replays/new", reason=" ")
    assert (without_reason.status, audited(books)) == (400, [])
    operator.page = preview
    created = await operator.submit("/replays/new", reason="mailboxes were made", per_second="1000")
    assert created.status == 303
    await has_text(operator, created.headers["location"], "done 3 of 3")
    assert {books.status(each) for each in failed} == {"pending"}
    assert books.status(other) == "failed"
    assert ("replay", "mailboxes were made") in audited(books)
    assert "No dead letter matches" in text_of(await operator.get(link))
    assert "Replay 1 done" in text_of(await operator.get("/ops/replays"))


async def test_a_selection_that_has_grown_is_shown_again_instead_of_replayed(operator: Browser, books: Books) -> None:
    dead_email(books)
    await operator.get("/ops/replays/new?error_type=refused")
    for _ in range(2):
        dead_email(books)
    grown = await operator.submit("/replays/new", reason="one email")

    assert grown.status == 409
    assert "now selects 3 emails instead of 1" in text_of(grown)
    assert "one email" in grown.body.decode()
    assert audited(books) == []
    assert (await operator.submit("/replays/new", reason="three emails")).status == 303


async def test_emails_that_may_have_arrived_are_replayed_only_if_the_operator_includes_them(
    operator: Browser, books: Books
) -> None:
    held = dead_email(books, "held")
    assert "Sent again 0 of 1 selected" in text_of(await operator.get("/ops/replays/new"))
    included = await operator.get("/ops/replays/new?include_held=yes")
    assert "may get them twice" in text_of(included)
    created = await operator.submit("/replays/new", reason="the provider lost them")
    await has_text(operator, created.headers["location"], "done 1 of 1")
    assert books.status(held) == "pending"


async def test_a_visitor_of_a_tenant_sees_and_replays_only_its_own(
    operator: Browser, shop_operator: Browser, books: Books
) -> None:
    own = dead_email(books, tenant_id="shop", last_error="confidential")
    other = dead_email(books, tenant_id="bank", last_error="secret of the bank")
    await operator.get("/ops/replays/new?tenant_id=bank")
    replay = (await operator.submit("/replays/new", reason="for the bank")).headers["location"]
    await has_text(operator, replay, "done 1 of 1")
    books.change(other, status="failed", publish_due_at=None)

    assert "secret of the bank" not in text_of(await shop_operator.get("/ops/dead-letters"))
    assert "Replay 1" not in text_of(await shop_operator.get("/ops/replays"))
    for name in ("dead-letters", "held", "replays/new"):
        assert (await shop_operator.get(f"/ops/{name}?tenant_id=bank")).status == 404
    for path in (replay, "/ops/poison"):
        assert (await shop_operator.get(path)).status == 404
    form = await shop_operator.get("/ops/replays/new")
    assert "Sent again 1 of 1 selected" in text_of(form)
    assert (await shop_operator.submit("/replays/new", reason="x", tenant_id="bank")).status == 404
    shop_operator.page = form
    mine = (await shop_operator.submit("/replays/new", reason="for the shop")).headers["location"]
    await has_text(shop_operator, mine, "done 1 of 1")
    assert (books.status(own), books.status(other)) == ("pending", "failed")
    books.change(own, status="failed", publish_due_at=None)
    await operator.get("/ops/replays/new?tenant_id=shop&text=confidential")
    theirs = (await operator.submit("/replays/new", reason="y")).headers["location"]
    assert "confidential" in text_of(await operator.get(theirs))
    assert "confidential" not in text_of(await shop_operator.get(theirs))
    fields = {"csrf_token": token_of(form), "replay_id": replay.rpartition("/")[2], "reason": "x"}
    for action in ("stop", "resume"):
        assert (await shop_operator.post(f"/ops/dlq/{action}", fields)).status == 404


async def test_poison_is_shown_as_text_without_addresses_and_discarded_with_a_reason(
    servers: Servers, database_url: str, operator_key: str, topology: Topology, books: Books
) -> None:
    body = f"{SHORT}\x1b[31m ann@example.org ".encode() + b"\xff\x00" + b" y" * 1945 + b" bob@example.org" * 5_000
    async with await open_connection(servers.amqp_url, name="test") as connection:
        await Rabbit(connection).publish(topology.dlq, body, BasicProperties(headers={"note": SHORT}))
    name = poison_id(body)
    async with running(settings_of(database_url, servers.amqp_url, topology, OPS="on")) as api:
        browser = await signed_in(api, operator_key)
        for path in ("/ops/poison", f"/ops/poison/{name}"):
            page = await browser.get(path)
            html = page.body.decode()
            assert (page.status, name in html, MARK in html, faults_of(page)) == (200, True, True, [])
            assert not any(address in html for address in ("ann@example.org", "bob@"))
            assert len(html) < 30_000
        for unknown in ("p-000000000000", "none"):
            assert (await browser.get(f"/ops/poison/{unknown}")).status == 404

        await browser.get(f"/ops/poison/{name}")
        assert (await browser.submit("/discard", reason="")).status == 400
        assert (await browser.submit("/discard", reason="a test of a producer")).status == 303
        assert "Discarded 1 message." in text_of(await browser.follow())
        assert "There is no poison message" in text_of(await browser.get("/ops/poison"))
    assert audited(books) == [("discard", "a test of a producer")]
