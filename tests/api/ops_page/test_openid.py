"""Signing in to the operators' page with OpenID Connect, at an issuer that can misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from dispatcher.api.ops_page.attempts import ATTEMPTS_PER_CLIENT
from dispatcher.api.ops_page.openid import CONCURRENT_SIGN_INS, OpenIdIssuer, PendingSignIn
from dispatcher.api.ops_page.openid_sign_in import visitor_of
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings, load
from dispatcher.errors import ConfigurationError
from tests.api.ops_page.browsing import Browser
from tests.api.ops_page.openid_issuer import (
    CLIENT_ID,
    CLIENT_SECRET,
    REDIRECT_URI,
    Issuer,
    running_issuer,
    signed_with_the_public_key,
    unsigned,
)
from tests.api.running_api import UNREACHABLE_AMQP_URL, Answer, Api, running, settings_of
from tests.waiting import DEADLINE_SECONDS

OPS: Final = "/mail/ops"
MISSING: Final = "is missing or not verified"
UNVERIFIED: Final[tuple[dict[str, Any], ...]] = ({}, {"email_verified": False}, {"email_verified": "true"})
_ADDRESSES: Final = count(1)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as running:
        yield running


def openid_settings(url: str, **more: str) -> dict[str, str]:
    return {
        "OPS_URL": "https://ops.example.com/mail/ops",
        "OPS_OIDC_ISSUER": url,
        "OPS_OIDC_CLIENT_ID": CLIENT_ID,
        "OPS_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "OPS_OIDC_OPERATE": "mail-operators",
        **more,
    }


@pytest.fixture
async def api(issuer: Issuer, operator_key: str, database_url: str, topology_names: Topology) -> AsyncIterator[Api]:
    more = openid_settings(issuer.url, OPS="on", OPS_OIDC_READ="mail-readers, staff")
    async with running(settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names, **more)) as api:
        yield api


def visit(api: Api) -> Browser:
    headers = {"Sec-Fetch-Site": "same-origin", "X-Forwarded-For": f"192.0.2.{next(_ADDRESSES)}"}
    return Browser(api, headers)


async def lead_back(browser: Browser, target: str = "/") -> str:
    started = await browser.get(f"{OPS}/sign-in/openid?next={target}")
    assert started.status == 303, started.body.decode()
    answer = await browser.api.client.get(started.headers["location"]).build().send()
    location = urlsplit(answer.headers["location"])
    assert location._replace(query="").geturl() == REDIRECT_URI
    return f"{location.path}?{location.query}"


async def come_back(browser: Browser, path: str) -> Answer:
    return await browser.get(path, Sec_Fetch_Site="cross-site")


async def sign_in(browser: Browser, target: str = "/") -> Answer:
    return await come_back(browser, await lead_back(browser, target))


async def test_a_visitor_signs_in_acts_under_the_own_name_and_signs_out(
    api: Api, connection: psycopg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    browser = visit(api)
    asked = await browser.get(f"{OPS}/pauses")
    form = await browser.follow()
    answer = await sign_in(browser, "/pauses")

    assert asked.headers["location"] == f"{OPS}/sign-in?next=%2Fpauses"
    assert f'href="{OPS}/sign-in/openid?next=%2Fpauses"'.encode() in form.body
    assert "form-action 'self';" in form.headers["content-security-policy"]
    # Not a redirect: the browser would not send the strict cookie with it.
    assert answer.status == 200
    assert f'<meta http-equiv="refresh" content="0;url={OPS}/pauses">'.encode() in answer.body
    begun, session, ended = browser.set_cookies
    assert begun.startswith("__Host-dispatcher-ops-openid=")
    assert {"httponly", "secure", "path=/", "samesite=lax", "max-age=600"} <= attributes(begun)
    assert session.startswith("__Host-dispatcher-ops=")
    assert {"httponly", "secure", "path=/", "samesite=strict"} <= attributes(session)
    assert "max-age=0" in attributes(ended)

    page = await browser.get(f"{OPS}/pauses")
    assert page.status == 200
    assert b"openid ann-1 (ann@example.org)" in page.body
    paused = await browser.submit("/pause/lane", lane="bulk", reason="Newsletter")
    assert paused.status == 303, paused.body.decode()
    rows = connection.execute("select action, actor from dispatcher.operator_audit order by audit_id").fetchall()
    assert rows == [(action, "openid ann-1 (ann@example.org)") for action in ("sign_in", "pause")]

    await browser.get(f"{OPS}/pauses")
    await browser.submit("/sign-out")
    assert (await browser.get(f"{OPS}/pauses")).status == 303
    assert sessions(connection) == 0
    assert CLIENT_SECRET not in "".join(capfd.readouterr())


def attributes(cookie: str) -> set[str]:
    return {each.strip().lower() for each in cookie.split(";")[1:]}


def sessions(connection: psycopg.Connection) -> int:
    return len(connection.execute("select from dispatcher.ops_session").fetchall())


async def test_tokens_that_are_not_for_this_sign_in_or_not_signed_by_the_issuer_are_refused(
    api: Api, issuer: Issuer, connection: psycopg.Connection
) -> None:
    now = int(time.time())
    wrong: dict[str, dict[str, Any]] = {
        "another sign-in": {"nonce": "other"},
        "no nonce": {"nonce": None},
        "another client": {"aud": "other"},
        "another client, authorized by us": {"aud": "other", "azp": CLIENT_ID},
        "several clients, and not authorized": {"aud": [CLIENT_ID, "other"], "azp": "other"},
        "no client": {"aud": None},
        "another issuer": {"iss": "https://evil.example"},
        "expired": {"exp": now - 3600},
        "never expires": {"exp": None},
        "from the future": {"iat": now + 3600},
        "nobody": {"sub": None},
        "an empty subject": {"sub": ""},
        "a blank subject": {"sub": " "},
        "a subject that is not a text": {"sub": 7},
    }
    found = {}
    for name, claims in wrong.items():
        issuer.claims = claims
        found[name] = (await sign_in(visit(api))).status
    issuer.claims = {}
    for sign in (unsigned, signed_with_the_public_key):
        issuer.sign = sign
        found[sign.__name__] = (await sign_in(visit(api))).status
    issuer.sign = lambda _claims, _key: "not a token"
    found["malformed"] = (await sign_in(visit(api))).status

    assert set(found.values()) == {403}, found
    assert sessions(connection) == 0


async def test_a_key_that_the_issuer_does_not_publish_is_refused_and_a_rotated_one_works_immediately(
    api: Api, issuer: Issuer
) -> None:
    first = await sign_in(visit(api))
    old = issuer.published
    issuer.rotate()
    rotated = await sign_in(visit(api))
    issuer.published = old
    unpublished = await sign_in(visit(api))

    assert (first.status, rotated.status, unpublished.status) == (200, 200, 403)


async def test_only_the_browser_that_began_a_sign_in_ends_it(
    api: Api, connection: psycopg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    attacker, victim, own = visit(api), visit(api), visit(api)
    path = await lead_back(attacker)
    without = await come_back(victim, path)
    await lead_back(victim)
    with_the_own_state = await come_back(victim, path)
    pending = await lead_back(own)
    forged = await come_back(own, pending.replace("state=", "state=x"))
    cookie = dict(own.cookies)
    name, text = next(iter(cookie.items()))
    own.cookies = {name: text[:-10] + "A" * 10}
    tampered = await come_back(own, pending)
    own.cookies = {name: text}
    accepted = await come_back(own, pending)

    refused = [without, with_the_own_state, forged, tampered]
    assert [answer.status for answer in refused] == [403] * len(refused)
    assert b"This browser did not begin this sign-in" in without.body
    assert accepted.status == 200
    assert sessions(connection) == 1
    assert "ann@example.org" not in "".join(capfd.readouterr())


async def test_a_sign_in_comes_back_once_accepted_or_not(api: Api) -> None:
    async with running(api.settings) as other:
        for old, new, answer in (
            ("", "", b"You are signed in"),
            ("iss=http", "iss=https", b"answer is not valid."),
            ("code=", "error=access_denied&x=", b"access_denied"),
            ("code=", "code=x", b"invalid_grant"),
        ):
            browser = visit(api)
            pending = await lead_back(browser)
            cookies = dict(browser.cookies)
            first = await come_back(browser, pending.replace(old, new, 1))
            # A copy of the cookie and the state, at another process.
            again = await come_back(Browser(other, browser.headers, cookies), pending)

            assert answer in first.body
            assert not any("openid" in name for name in browser.cookies)
            assert (again.status, b"has ended it already" in again.body) == (403, True)


async def test_an_issuer_that_is_away_or_slow_leaves_the_sign_in_with_a_key(
    api: Api, issuer: Issuer, operator_key: str
) -> None:
    issuer.may_answer.clear()
    begun = [asyncio.create_task(visit(api).get(f"{OPS}/sign-in/openid")) for _ in range(CONCURRENT_SIGN_INS)]
    for _ in begun:
        assert await asyncio.to_thread(issuer.waiting.acquire, timeout=DEADLINE_SECONDS)
    too_many = await visit(api).get(f"{OPS}/sign-in/openid")
    other = visit(api)
    await other.get(f"{OPS}/sign-in")
    meanwhile = await other.submit("/sign-in", key=operator_key)
    issuer.name = "https://other.example"
    issuer.may_answer.set()
    held = await asyncio.gather(*begun)
    misnamed = await visit(api).get(f"{OPS}/sign-in/openid")
    issuer.shutdown()
    issuer.server_close()
    away = await visit(api).get(f"{OPS}/sign-in/openid")

    assert meanwhile.status == 303
    assert {answer.status for answer in (*held, too_many, misnamed, away)} == {503}
    assert b"Too many people sign in at the moment." in too_many.body
    assert b"name is https://other.example, but DISPATCHER_OPS_OIDC_ISSUER is" in misnamed.body
    assert b"The OpenID Connect issuer is not available: no connection: Connection refused." in away.body
    assert b"sign in with an API key" in away.body


async def test_the_authorization_request_has_no_verifier_and_no_secret(issuer: Issuer) -> None:
    pending = PendingSignIn.new("/")
    client = OpenIdIssuer(loaded(issuer.url), REDIRECT_URI)
    url = await client.sign_in_url(pending)
    await client.close()

    query = parse_qs(urlsplit(url).query)
    assert (query["state"], query["nonce"]) == ([pending.state], [pending.nonce])
    assert not any(secret in url for secret in (pending.verifier, "secret"))


async def test_failures_are_limited_per_address_and_apart_from_wrong_keys(api: Api, operator_key: str) -> None:
    browser = visit(api)
    failures: list[int] = []
    # On a slow machine, the time for another attempt passes meanwhile.
    while (begun := await browser.get(f"{OPS}/sign-in/openid")).status == 303 and len(failures) < 50:
        failures.append((await come_back(browser, (await lead_back(browser)).replace("code=", "code=x"))).status)
    elsewhere = await visit(api).get(f"{OPS}/sign-in/openid")
    await browser.get(f"{OPS}/sign-in")
    with_a_key = await browser.submit("/sign-in", key=operator_key)

    assert failures[:ATTEMPTS_PER_CLIENT] == [403] * ATTEMPTS_PER_CLIENT
    assert (begun.status, int(begun.headers["retry-after"]) > 0) == (429, True)
    assert (elsewhere.status, with_a_key.status) == (303, 303)


async def test_requests_that_another_website_makes_keep_no_visitor_out(api: Api) -> None:
    for has_begun in (False, True):
        browser = visit(api)
        pending = await lead_back(browser) if has_begun else ""
        forged = {
            (await come_back(browser, f"{OPS}/sign-in/openid/return?code=c&state=s")).status
            for _ in range(ATTEMPTS_PER_CLIENT + 1)
        }
        answer = await come_back(browser, pending or await lead_back(browser))
        assert (forged, answer.status) == ({403}, 200)


async def test_no_target_leads_to_another_website(api: Api) -> None:
    for target in ("//evil.example", "/\\evil.example", "/sign-out", "/%0d%0aX:y", "/" * 2000):
        answer = await sign_in(visit(api), target)
        assert f'content="0;url={OPS}/"'.encode() in answer.body, target


async def test_a_form_whose_session_has_ended_goes_on_after_a_sign_in_in_another_tab(
    api: Api, connection: psycopg.Connection
) -> None:
    browser = visit(api)
    await sign_in(browser)
    await browser.get(f"{OPS}/pauses")
    connection.execute("delete from dispatcher.ops_session")
    kept = await browser.submit("/pause/lane", lane="bulk", reason="Newsletter")
    too_early = await browser.submit("/sign-in")
    await sign_in(browser)
    browser.page = too_early
    confirming = await browser.submit("/sign-in")
    sent = await browser.submit("/pause/lane")

    assert (kept.status, too_early.status) == (401, 401)
    assert b"You are not signed in yet." in too_early.body
    assert (confirming.status, sent.status) == (200, 303)


async def test_sessions_end_if_the_issuer_is_no_longer_configured(api: Api) -> None:
    browser = visit(api)
    await sign_in(browser)
    async with running(replace(api.settings, ops_oidc_issuer=None)) as other:
        ended = await Browser(other, browser.headers, browser.cookies).get(f"{OPS}/pauses")

    assert (await browser.get(f"{OPS}/pauses")).status == 200
    assert ended.headers["location"].startswith(f"{OPS}/sign-in")


async def test_a_visitor_without_a_mapped_claim_gets_a_page_that_names_the_claim(api: Api, issuer: Issuer) -> None:
    issuer.claims = {"groups": None}
    missing = await sign_in(visit(api))
    issuer.claims = {"groups": ["sales"]}
    unmapped = await sign_in(visit(api))
    issuer.claims = {"groups": "staff"}
    reader = visit(api)
    await sign_in(reader)
    refused = await reader.get(f"{OPS}/replays/new")

    assert (missing.status, unmapped.status) == (403, 403)
    assert b"the claim groups of your ID token is missing" in missing.body
    assert b"the claim groups of your ID token has no value that gives access" in unmapped.body
    assert b"DISPATCHER_OPS_OIDC_OPERATE or DISPATCHER_OPS_OIDC_READ" in unmapped.body
    assert (refused.status, b"You may only read." in refused.body) == (403, True)


def loaded(url: str = "https://id.example.com", **more: str) -> Settings:
    servers = {"DATABASE_URL": "postgresql://localhost/x", "AMQP_URL": UNREACHABLE_AMQP_URL}
    environ = servers | openid_settings(url, **more)
    return load({f"DISPATCHER_{name}": value for name, value in environ.items() if value})


def test_a_tenant_claim_binds_a_visitor_to_one_tenant() -> None:
    settings = loaded(OPS_OIDC_TENANT_CLAIM="tenant")
    ann = {"sub": "1", "groups": ["mail-operators"]}

    assert visitor_of(ann | {"tenant": "shop"}, settings).tenant_id == "shop"
    assert visitor_of(ann | {"tenant": ["shop"]}, settings).tenant_id == "shop"
    assert visitor_of(ann | {"tenant": "*"}, settings).tenant_id is None
    for wrong in (None, "", [], ["shop", "other"], ["*", "shop"], "a b", 7, {"shop": 1}):
        with pytest.raises(PageError, match="the claim tenant of your ID token does not name exactly one tenant"):
            visitor_of(ann | {"tenant": wrong}, settings)


@pytest.mark.parametrize(
    ("claim", "claims", "problem"),
    [
        ("realm_access.roles", {"realm_access": {"roles": ["offline", "mail-operators"]}}, None),
        ("resource_access.a.b.roles", {"resource_access": {"a.b": {"roles": "mail-operators"}}}, None),
        ("https://example.com/roles", {"https://example.com/roles": ["mail-operators"]}, None),
        # A claim with exactly this name precedes the path.
        ("a.b", {"a.b": "mail-operators", "a": {"b": "x"}}, None),
        ("a.b", {"a.b": "x", "a": {"b": "mail-operators"}}, "has no value that gives access"),
        ("realm_access.roles", {}, MISSING),
        ("realm_access.roles", {"realm_access": "roles"}, MISSING),
        ("realm_access.roles", {"realm_access": ["roles", "mail-operators"]}, MISSING),
        ("realm_access.roles", {"realm_access": {"roles": {"mail-operators": True}}}, MISSING),
        ("realm_access.roles", {"roles": ["mail-operators"]}, MISSING),
        ("email", {"email": "ann@example.com", "email_verified": True}, None),
        *(("email", {"email": "ann@example.com", **more}, MISSING) for more in UNVERIFIED),
    ],
)
def test_a_claim_may_be_nested_and_an_address_must_be_verified(
    claim: str, claims: dict[str, Any], problem: str | None
) -> None:
    settings = loaded(OPS_OIDC_CLAIM=claim, OPS_OIDC_OPERATE="mail-operators, ann@example.com, bob@example.com")
    if problem is None:
        assert visitor_of({"sub": "1", **claims}, settings).may_act
    else:
        with pytest.raises(PageError, match=rf"the claim {claim} of your ID token {problem}"):
            visitor_of({"sub": "1", **claims}, settings)


def test_the_name_of_a_visitor_is_bounded_and_visible() -> None:
    hostile = {"sub": "\u202e\x00" + "s" * 300, "email": "<b>\n" + "e" * 300, "groups": "mail-operators"}

    name = visitor_of(hostile, loaded()).name

    assert name.startswith("openid \\u202e\\x00sss")
    assert len(name) <= 200
    assert name.isprintable()


@pytest.mark.parametrize(
    ("more", "mistake"),
    [
        ({"OPS_URL": ""}, "DISPATCHER_OPS_OIDC_ISSUER needs DISPATCHER_OPS_URL, which is not set."),
        ({"OPS_OIDC_CLIENT_SECRET": ""}, "DISPATCHER_OPS_OIDC_ISSUER needs DISPATCHER_OPS_OIDC_CLIENT_SECRET, which"),
        ({"OPS_OIDC_OPERATE": ""}, "DISPATCHER_OPS_OIDC_OPERATE or DISPATCHER_OPS_OIDC_READ, which is not set."),
        ({"OPS_OIDC_ISSUER": "http://id.example.com"}, "would send the client secret without encryption"),
        ({"OPS_OIDC_ISSUER": "https://id.example.com?x=1"}, "must have no user, password, ?query or #fragment"),
    ],
)
def test_settings_that_would_not_work_are_refused(more: dict[str, str], mistake: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        loaded(**more)

    assert mistake in str(refused.value)
    assert CLIENT_SECRET not in repr(loaded())
