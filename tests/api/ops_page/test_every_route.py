"""Rules that each address of the application must keep, also those of new pages; and its sessions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Final, cast
from uuid import UUID

import psycopg
from starlette.requests import Request
from starlette.routing import Route

from dispatcher.api.ops_page.application import make_ops_app
from dispatcher.api.ops_page.attempts import ATTEMPTS_PER_CLIENT
from dispatcher.api.ops_page.captured import AS_FILE
from dispatcher.api.ops_page.origins import client_address
from dispatcher.api.ops_page.site import CONCURRENT_PAGES, SECURITY_HEADERS, Site
from dispatcher.config import Settings
from tests.abuse.raw_connection import head
from tests.api.ops_page.browsing import Browser, links_of, signed_in, text_of, token_of
from tests.api.ops_page.rows import dead_email, write
from tests.api.running_api import Answer, Api, make_key
from tests.store.books import Books
from tests.waiting import until_answer

REFRESH: Final = {"HX_Request": "true"}
PUBLIC: Final = ("/sign-in", "/sign-out", "/static/")


def addresses(settings: Settings, method: str, email_id: object, *, has_id: bool = False) -> Iterator[str]:
    """The addresses that a method has, with an email's id, and with 1 for every other part."""
    none = cast(Any, None)
    for route in make_ops_app(Site(settings, none, none, none)).routes:
        assert isinstance(route, Route)
        if method in (route.methods or ()) and not route.path.startswith(PUBLIC) and ("{" in route.path or not has_id):
            yield "/ops" + re.sub(r"\{[^}]*\}", "1", re.sub(r"\{email_id[^}]*\}", str(email_id), route.path))


def has_safe_headers(answer: Answer) -> bool:
    found = answer.headers
    is_kept = "no-store" not in found.get("cache-control", "")
    wanted = {**SECURITY_HEADERS, **(AS_FILE if "content-disposition" in found else {})}
    own = {name: found.get(name.lower()) for name in SECURITY_HEADERS}
    return own == wanted and found.get("x-content-type-options") == "nosniff" and not is_kept


async def test_every_address_refuses_strangers_readers_other_sites_and_forms_without_a_token(
    browser: Browser, operator: Browser, reader: Browser, books: Books, ops_api: Api
) -> None:
    email_id = books.enqueue_one()
    pages = list(addresses(ops_api.settings, "GET", email_id))
    targets = list(addresses(ops_api.settings, "POST", email_id))
    before = books.rows()
    token = {"csrf_token": token_of(await operator.get("/ops/")), "reason": "r"}
    readers = {"csrf_token": token_of(await reader.get("/ops/")), "reason": "r"}
    safe = []

    for path in pages:
        safe += [asked := await browser.get(path), shown := await operator.get(path)]
        assert (asked.status, asked.headers["location"].startswith("/ops/sign-in")) == (303, True), path
        assert shown.status in (200, 303, 400, 404, 409, 422, 503), path
        assert (await operator.api.call("PUT", path, raw=b"x", headers=operator.headers)).status == 405, path
    for path in targets:
        safe += [
            stranger := await browser.post(path, token),
            refused := await reader.post(path, readers),
            unchecked := await operator.post(path, {"reason": "r"}),
            forged := await operator.post(path, {**token, "csrf_token": readers["csrf_token"]}),
            other := await operator.post(path, token, Sec_Fetch_Site="same-site"),
            no_form := await operator.api.call("POST", path, raw=b"{}", headers=operator.headers),
        ]
        assert (stranger.status, refused.status, other.status, no_form.status) == (401, 403, 403, 400), path
        for kept in (unchecked, forged):  # the form is shown again, for the visitor to check
            assert (kept.status, b"kept" in kept.body or b"again" in kept.body) == (200, True), path
    safe += [await operator.get("/ops/nothing"), await operator.get("/ops/static/../site.py")]

    assert len(pages) > 15
    assert len(targets) > 20
    assert [answer for answer in safe if not has_safe_headers(answer)] == []
    assert books.rows() == before
    assert books.select("select * from operator_audit where action not in ('export', 'sign_in')") == []


async def test_a_visitor_who_may_only_read_sees_every_page_without_forms_and_links_to_forms(
    reader: Browser, books: Books, ops_api: Api
) -> None:
    held = dead_email(books, "held")
    dead_email(books, "failed")
    write(books, "webhook", url="https://shop.example/", kinds=["sent"], secret="whsec_c2VjcmV0")
    pages = {path: await reader.get(path) for path in addresses(ops_api.settings, "GET", held)}

    refused = {path for path, page in pages.items() if page.status == 403}
    shown = [page for page in pages.values() if page.status == 200]
    forms = {f"/ops/emails/{held}/{name}" for name in ("confirm", "release", "reveal")}
    assert forms | {"/ops/replays/new"} <= refused
    assert len(shown) > 12
    for page in shown:
        assert 'name="reason"' not in page.body.decode()
        assert not [link for link in links_of(page) if link.partition("?")[0] in refused]
    assert "may only read" in text_of(pages[f"/ops/emails/{held}"])
    assert b"shop.example" in pages["/ops/webhooks/1"].body


async def test_every_address_of_another_tenants_email_answers_404(
    shop_operator: Browser, books: Books, ops_api: Api
) -> None:
    pending = books.enqueue_one(tenant_id="bank")
    others = [pending, *(dead_email(books, status, tenant_id="bank") for status in ("held", "failed"))]
    fields = {"csrf_token": token_of(await shop_operator.get("/ops/")), "reason": "r"}
    fields |= {"attempts": "2", "send_at": "2026-12-01 10:00"}
    before = books.rows()

    for email_id in (*others, UUID("0199c0de-0000-7000-8000-000000000000")):
        for path in addresses(ops_api.settings, "GET", email_id, has_id=True):
            assert (await shop_operator.get(path)).status == 404, path
        for path in addresses(ops_api.settings, "POST", email_id, has_id=True):
            assert (await shop_operator.post(path, fields)).status == 404, path
    assert books.rows() == before
    assert books.select("select * from operator_audit where action not in ('export', 'sign_in')") == []


async def test_a_visitor_signs_in_with_a_key_and_gets_the_page_asked_for(browser: Browser, operator_key: str) -> None:
    asked = await browser.get("/ops/emails?status=held")
    form = await browser.follow()
    entered = await browser.submit("/sign-in", key=operator_key)
    page = await browser.follow()

    assert (asked.status, asked.headers["location"]) == (303, "/ops/sign-in?next=%2Femails%3Fstatus%3Dheld")
    assert form.status == 200
    assert (entered.status, entered.headers["location"]) == (303, "/ops/emails?status=held")
    assert (page.status, b"<h1>Emails</h1>" in page.body) == (200, True)
    for target in ("//evil.example", "https://evil.example", "/\\evil.example", "/\t/evil.example", "javascript:x"):
        answer = await browser.post("/ops/sign-in", {"key": operator_key, "next": target})
        assert (answer.status, answer.headers["location"]) == (303, "/ops/"), target


async def test_a_session_is_new_at_each_sign_in_and_ends_on_the_server(
    browser: Browser, operator_key: str, books: Books
) -> None:
    async def seen(session: str, **headers: str) -> int:
        browser.cookies["dispatcher-ops"] = session
        return (await browser.get("/ops/", **headers)).status

    browser.cookies["dispatcher-ops"] = planted = "x" * 43
    await browser.sign_in(operator_key)
    first = browser.cookies["dispatcher-ops"]
    flags = browser.set_cookies[-1].lower()
    token = token_of(await browser.get("/ops/"))
    await browser.post("/ops/sign-in", {"key": operator_key})
    second = browser.cookies["dispatcher-ops"]

    assert len({planted, first, second}) == 3
    assert all(flag in flags for flag in ("httponly", "samesite=strict", "path=/ops"))
    assert await seen(first) == 303
    browser.cookies["dispatcher-ops"] = second
    assert (await browser.post("/ops/sign-out", {"csrf_token": token})).status == 303
    assert (await seen(second), await seen(second, **REFRESH)) == (200, 200)  # the token was that of another session
    await browser.post("/ops/sign-out", {"csrf_token": token_of(await browser.get("/ops/"))})
    assert (await seen(second, **REFRESH), await seen(second)) == (401, 303)
    assert books.select("select * from ops_session") == []


async def test_a_session_ends_if_idle_or_old(ops_api: Api, operator_key: str, connection: psycopg.Connection) -> None:
    idle, old = ops_api.settings.ops_idle_seconds, ops_api.settings.ops_session_seconds
    for used_ago, began_ago, status in ((0.9 * idle, 0, 200), (1.1 * idle, 0, 303), (0, 1.1 * old, 303)):
        operator = await signed_in(ops_api, operator_key)
        connection.execute(
            "update ops_session set seen_at = now() - %s * interval '1 s', created_at = now() - %s * interval '1 s'",
            [used_ago, began_ago],
        )

        assert (await operator.get("/ops/")).status == status, (used_ago, began_ago)


async def test_a_page_that_refreshes_itself_keeps_no_operator_signed_in(
    operator: Browser, connection: psycopg.Connection
) -> None:
    idle_for = "update ops_session set seen_at = seen_at - %s * interval '1 s'"
    most_of_the_limit = [0.6 * operator.api.settings.ops_idle_seconds]
    statuses = []
    for headers in ({}, {}, REFRESH):
        connection.execute(idle_for, most_of_the_limit)
        statuses.append((await operator.get("/ops/", **headers)).status)
    connection.execute(idle_for, most_of_the_limit)

    assert statuses == [200, 200, 200]
    await until_refused(operator)


async def until_refused(browser: Browser) -> None:
    """Waits until a refresh is refused. Refreshes may use a session for a second after it was looked up."""
    await until_answer(lambda: browser.get("/ops/", **REFRESH), lambda answer: answer.status == 401)


async def test_a_session_that_another_process_ends_shows_no_page_at_once_and_refreshes_none_a_second_later(
    operator: Browser, connection: psycopg.Connection
) -> None:
    assert (await operator.get("/ops/", **REFRESH)).status == 200
    connection.execute("delete from ops_session")

    assert (await operator.post("/ops/pause/all", {}, **REFRESH)).status == 401
    assert (await operator.get("/ops/")).status == 303
    await until_refused(operator)


async def test_pages_that_refresh_themselves_together_show_each_visitor_its_own_figures(
    operator: Browser, ops_api: Api, connection: psycopg.Connection
) -> None:
    tenant = await signed_in(ops_api, make_key(connection, scopes=["read"], tenant_id="acme", name="eve"))
    shows_hosts = set()
    for _ in range(3):
        for each in (operator, tenant):
            shows_hosts.add((each is operator, b"Hosts and workers" in (await each.get("/ops/", **REFRESH)).body))

    assert shows_hosts == {(True, True), (False, False)}


async def test_guessing_keys_is_limited_whatever_a_client_claims(browser: Browser, operator_key: str) -> None:
    async def attempt(key: str, forwarded: str) -> int:
        return (await browser.post("/ops/sign-in", {"key": key}, X_Forwarded_For=forwarded)).status

    wrong = [await attempt("wrong", f"198.51.100.{n}, 203.0.113.1") for n in range(ATTEMPTS_PER_CLIENT + 1)]
    assert wrong == [401] * ATTEMPTS_PER_CLIENT + [429]
    # Behind a proxy on another host, everybody has the same address. So the right key is not refused.
    assert [await attempt(operator_key, "203.0.113.1") for _ in range(20)] == [303] * 20
    assert await attempt("wrong", "203.0.113.1") == 429

    guesses = [await attempt("wrong", "203.0.113.2") for _ in range(ATTEMPTS_PER_CLIENT - 1)]
    assert await attempt(operator_key, "203.0.113.2") == 303
    assert [*guesses, await attempt("wrong", "203.0.113.2")] == [401] * ATTEMPTS_PER_CLIENT
    assert await attempt("wrong", "203.0.113.2") == 429


def test_the_last_forwarded_address_counts_and_only_behind_a_proxy_on_this_host() -> None:
    def address(client: str, *forwarded: bytes) -> str:
        headers = [(b"x-forwarded-for", each) for each in forwarded]
        return client_address(Request({"type": "http", "client": (client, 1), "headers": headers}))

    assert address("127.0.0.1", b"198.51.100.1, 203.0.113.1") == "203.0.113.1"
    assert address("127.0.0.1", b"198.51.100.1", b"203.0.113.1") == "203.0.113.1"
    assert address("192.0.2.1", b"203.0.113.1") == "192.0.2.1"
    assert address("2001:db8::1") == address("2001:db8::2") == "2001:db8::/64"


async def test_clients_that_send_their_forms_slowly_delay_no_page(browser: Browser, ops_api: Api) -> None:
    begun = head("POST /ops/sign-in", "Content-Type: application/x-www-form-urlencoded", "Content-Length: 99") + b"k"
    slow = [await asyncio.open_connection("127.0.0.1", ops_api.port) for _ in range(CONCURRENT_PAGES)]
    try:
        for _, writer in slow:
            writer.write(begun)
            await writer.drain()
        assert (await browser.get("/ops/sign-in")).status == 200
    finally:
        for _, writer in slow:
            writer.close()
