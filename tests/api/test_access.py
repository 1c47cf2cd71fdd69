"""Tests API keys: authentication, scopes, tenants, senders, lanes, rates and daily quotas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from starlette.requests import Request
from structlog.testing import capture_logs

from dispatcher.admission.fair_limiter import FairLimiter
from dispatcher.admission.problems import Problem
from dispatcher.admission.quotas import QuotaExhausted, Quotas, Reservation
from dispatcher.api.access import AccessControl
from dispatcher.api.server import LOCK_SECONDS
from dispatcher.config import Settings
from dispatcher.config.values import Listener
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.errors import ConfigurationError, StoreUnavailable
from dispatcher.store.api_keys import ApiKey, KeyStore, list_keys
from dispatcher.store.connections import make_pool
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.waiting import until_answer

TODAY, TOMORROW = date(2030, 6, 1), date(2030, 6, 2)


@pytest.fixture
def token(connection: psycopg.Connection) -> str:
    return make_key(connection)


async def until_refused(api: Api, token: str | None = None) -> None:
    await until_answer(lambda: api.get("/v1/emails", token=token), lambda answer: answer.status == 401)


async def test_open_access_is_logged_at_the_start(settings: Settings, connection: psycopg.Connection) -> None:
    levels = []
    for _ in range(2):
        with capture_logs() as events:
            async with running(settings):
                pass
        levels.append([event["log_level"] for event in events if event["event"] == "api.anonymous_allowed"])
        make_key(connection)

    assert levels == [["warning"], []]


async def test_after_the_first_key_every_request_needs_a_key_in_its_header(token: str, api: Api) -> None:
    stranger = Secret.new().text()
    forged = f"{token[:16]}{stranger[16:]}"

    for given in (None, stranger, forged, "", "x", token + "x"):
        answer = await api.post(token=given)
        assert (answer.status, answer.code, answer.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    in_url = await api.call("POST", f"/v1/emails?key={token}&access_token={token}", key="k", body=EMAIL)
    assert in_url.code == "unauthorized"
    assert (await api.post(token=token)).status == 202


async def test_requests_with_unknown_keys_fail_together_while_postgresql_is_unreachable() -> None:
    pool = make_pool("postgresql://nobody@127.0.0.1:1/nothing", name="x", size=1)
    pool.timeout = 0.2
    await pool.open()
    access = AccessControl(KeyStore(pool), FairLimiter(100), may_be_open=False)
    request = with_key(Secret.new().text())

    results = await asyncio.gather(
        *(access.authenticate(request, Scope.SEND) for _ in range(20)), return_exceptions=True
    )

    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert pool.get_stats()["requests_num"] == 1
    await pool.close()


def with_key(token: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})


async def test_an_existing_key_id_cannot_be_distinguished_from_an_unknown_one(token: str, database_url: str) -> None:
    pool = make_pool(database_url, name="x", size=1)
    await pool.open()
    access = AccessControl(KeyStore(pool), FairLimiter(100), may_be_open=False)
    await access.refresh()
    query_counts = []
    for text in (Secret.new().text(), f"{token[:16]}{Secret.new().text()[16:]}"):
        before = pool.get_stats().get("requests_num", 0)
        with pytest.raises(Problem, match="unauthorized"):
            await access.authenticate(with_key(text), Scope.SEND)
        query_counts.append(pool.get_stats()["requests_num"] - before)
    await pool.close()

    assert query_counts == [1, 1]


async def test_the_first_key_ends_open_access_and_the_api_stays_closed_after_its_revocation(
    api: Api, connection: psycopg.Connection
) -> None:
    assert (await api.post("k-1")).status == 202
    token = make_key(connection)

    assert (await api.post("k-2", token=token)).status == 202
    await until_refused(api)
    assert (await api.post("k-3", token=token)).status == 202
    connection.execute("update api_key set revoked_at = clock_timestamp()")
    await until_refused(api, token)
    assert (await api.get("/v1/emails")).status == 401


async def test_deleting_all_keys_does_not_open_the_api_and_it_does_not_start_if_all_are_revoked(
    settings: Settings, connection: psycopg.Connection
) -> None:
    for is_open in (False, True):
        token = make_key(connection)
        async with running(replace(settings, api_allow_anonymous=is_open)) as api:
            assert (await api.get("/v1/emails", token=token)).status == 200
            connection.execute("delete from api_key")
            await until_refused(api, token)
            assert (await api.post()).status == 401

    make_key(connection)
    connection.execute("update api_key set revoked_at = clock_timestamp()")
    await expect_no_start(settings, "dispatcher keys create")


async def expect_no_start(settings: Settings, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        async with running(settings):
            pass


async def test_without_keys_it_starts_only_on_loopback_and_if_a_setting_allows_open_access(
    settings: Settings,
) -> None:
    public = Listener("0.0.0.0", 0)  # noqa: S104 - the test shows that it is refused
    await expect_no_start(replace(settings, api_address=public), "dispatcher keys create")
    await expect_no_start(replace(settings, api_allow_anonymous=False), "DISPATCHER_API_ALLOW_ANONYMOUS=on")


PROXIED = (
    {"Forwarded": "for=192.0.2.1"},
    {"Via": "1.1 proxy.example"},
    {"X-Forwarded-For": "192.0.2.1"},
    {"X-Forwarded-Proto": "https"},
    {"x-forwarded-host": "mail.example.com"},
)
FOREIGN_HOSTS = ("evil.example", "evil.example:8025", "127.0.0.1.evil.example", "")


async def test_requests_by_a_proxy_or_for_a_foreign_host_need_a_key(api: Api, connection: psycopg.Connection) -> None:
    for headers in (*PROXIED, *({"Host": host} for host in FOREIGN_HOSTS)):
        answer = await api.post(headers=headers)
        assert (answer.status, answer.code) == (403, "host-forbidden"), headers

    token = make_key(connection)
    for headers in PROXIED:
        assert (await api.post(token=token, headers=headers)).status == 202


async def test_a_key_is_limited_to_its_scopes_and_its_tenant(api: Api, connection: psycopg.Connection) -> None:
    reader, sender = make_key(connection, scopes=["read"]), make_key(connection, scopes=["send"])

    assert (await api.post(token=reader)).code == "insufficient-scope"
    assert (await api.get("/v1/emails", token=sender)).code == "insufficient-scope"
    assert (await api.get("/v1/emails", token=reader)).status == 200
    assert (await api.post("k-1", EMAIL | {"tenant_id": "other"}, token=sender)).code == "tenant-forbidden"
    assert (await api.post("k-2", EMAIL | {"tenant_id": "shop"}, token=sender)).status == 202
    assert (await api.post("k-3", token=sender)).status == 202
    assert connection.execute("select distinct tenant_id from email_log").fetchall() == [("shop",)]


ALLOWED = (
    "shop@example.com",
    "Shop <Shop@EXAMPLE.com>",
    "any@xn--bcher-kva.example",
    "any@bücher.example",
    "news@example.net",
)
FOREIGN = (
    "shop@sub.example.com",
    "shop@example.com.evil.example",
    "shop@evil-example.com",
    "other@example.net",
    '"shop@example.com" <eve@evil.example>',
)


async def test_a_key_sends_only_from_its_domains_and_addresses(api: Api, connection: psycopg.Connection) -> None:
    domains = ["example.com", "xn--bcher-kva.example"]
    token = make_key(connection, sender_domains=domains, sender_addresses=["news@example.net"])

    for sender in ALLOWED:
        assert (await api.post(sender.encode().hex(), EMAIL | {"from": sender}, token=token)).status == 202
    for sender in FOREIGN:
        answer = await api.post(body=EMAIL | {"from": sender}, token=token)
        assert (answer.status, answer.code, answer.pointers) == (403, "sender-forbidden", ["#/from"])


async def test_an_email_may_name_only_a_lane_of_its_key(connection: psycopg.Connection, api: Api) -> None:
    plain = make_key(connection)
    login = make_key(connection, lane="urgent", allowed_lanes=["bulk"])

    refused = await api.post(body={**EMAIL, "lane": "urgent"}, token=plain)
    unknown = await api.post(body={**EMAIL, "lane": "slow"}, token=login)
    assert (refused.status, refused.code, refused.pointers) == (403, "lane-forbidden", ["#/lane"])
    assert (unknown.status, unknown.code) == (422, "invalid-email")
    assert "urgent, normal, bulk" in unknown.json["errors"][0]["detail"]

    cases = {"a": (plain, {}), "b": (login, {}), "c": (login, {"lane": "bulk"}), "d": (login, {"lane": "urgent"})}
    for key, (token, lane) in cases.items():
        assert (await api.post(key, EMAIL | lane, token=token)).status == 202
    rows = connection.execute("select message_key, lane from email_log order by message_key").fetchall()
    assert rows == [("a", "normal"), ("b", "urgent"), ("c", "bulk"), ("d", "urgent")]


async def test_only_a_key_with_the_scope_may_ignore_suppression(api: Api, connection: psycopg.Connection) -> None:
    usual = make_key(connection, scopes=["send"])
    allowed = make_key(connection, scopes=["send", "ignore_suppression"])
    email = EMAIL | {"ignore_suppression": True}

    refused = await api.post("a", email, token=usual)

    assert (refused.status, refused.code) == (403, "insufficient-scope")
    assert refused.pointers == ["#/ignore_suppression"]
    assert (await api.post("a", EMAIL | {"ignore_suppression": False}, token=usual)).status == 202
    assert (await api.post("b", email, token=allowed)).status == 202
    rows = connection.execute("select ignore_suppression from email_content order by email_id").fetchall()
    assert [value for (value,) in rows] == [False, True]


async def test_what_a_test_key_enqueues_is_a_test_for_ever(api: Api, connection: psycopg.Connection) -> None:
    test, live = make_key(connection, is_test=True), make_key(connection)

    single, repeated = [await api.post("a", token=test) for _ in range(2)]
    several = {"emails": [EMAIL | {"message_key": "b"}]}
    batch = await api.call("POST", "/v1/emails/batch", body=several, token=test)
    conflict = await api.post("a", token=live)
    usual = await api.post("c", token=live)

    assert [each.json.get("is_test") for each in (single, repeated, usual)] == [True, True, None]
    assert batch.json["results"][0]["email"]["is_test"]
    assert (conflict.status, conflict.code) == (422, "idempotency-key-reused")
    rows = connection.execute("select message_key, channel from email_log order by 1").fetchall()
    assert rows == [("a", "test"), ("b", "test"), ("c", None)]
    shown = await api.get(f"/v1/emails/{single.json['id']}", token=live)
    assert shown.json["channel"] == "test"


LIMIT_PARTS = ("limit", "remaining", "reset")


async def test_a_response_has_the_rest_of_the_keys_daily_quota_and_nothing_about_limits_that_it_does_not_have(
    api: Api, connection: psycopg.Connection
) -> None:
    limited, free = make_key(connection, recipients_per_day=500), make_key(connection)

    unknown = await api.get("/v1/emails", token=limited)
    sent = await api.post("k-1", email_to(7), token=limited)
    refused = await api.post("k-2", EMAIL | {"to": ["ann"]}, token=limited)
    other = await api.post("k-3", token=free)

    quotas = [[int(each.headers.get(f"x-quota-{part}", -1)) for part in LIMIT_PARTS] for each in (sent, refused)]
    assert [each[:2] for each in quotas] == [[500, 493]] * 2
    assert all(0 < reset <= 86_401 for _, _, reset in quotas)
    assert not [name for each in (unknown, other) for name in each.headers if "limit" in name or "quota" in name]


async def test_every_response_names_its_request(api: Api) -> None:
    own = [await api.get(path, headers={"X-Request-Id": "r-17:a"}) for path in ("/healthz", "/v1/emails?x=1", "/lost")]
    given: tuple[dict[str, str], ...] = ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129})
    made = [await api.get("/healthz", headers=each) for each in given]
    unparsable = await api.get("/healthz", headers={"Upgrade": "h2c", "Connection": "Upgrade", "X-Request-Id": "u-1"})

    assert [each.headers["x-request-id"] for each in own] == ["r-17:a"] * 3
    ids = {each.headers["x-request-id"] for each in made}
    assert len(ids) == 3
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9]+", each) for each in ids)
    assert (unparsable.status, unparsable.headers["x-request-id"]) == (400, "u-1")


async def test_requests_beyond_the_rate_get_429_with_retry_after(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, requests_per_second=2.0)

    first = await api.call("POST", "/v1/emails/batch", body={"emails": [EMAIL]}, token=token)  # counts as one request
    second = await api.get("/v1/emails", token=token)
    # There are so many requests that the API refuses some, even on a slow machine.
    others = await asyncio.gather(*(api.get("/v1/emails", token=token) for _ in range(100)))

    refused = [answer for answer in others if answer.status == 429]
    assert (first.status, second.status) == (200, 200)
    assert refused
    limits = [[int(each.headers[f"ratelimit-{part}"]) for part in LIMIT_PARTS] for each in (second, refused[0])]
    assert [limit for limit, _, _ in limits] == [2, 2]
    assert limits[1][1:] == [0, 1]
    assert {(answer.code, answer.headers["retry-after"]) for answer in refused} == {("rate-limited", "1")}


async def test_each_email_of_a_batch_counts_toward_the_rate(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, requests_per_second=10.0)
    emails = [EMAIL | {"message_key": f"k-{number}"} for number in range(200)]

    first = await api.call("POST", "/v1/emails/batch", body={"emails": emails}, token=token)
    second = await api.get("/v1/emails", token=token)

    assert (first.status, second.code) == (200, "rate-limited")
    # `Retry-After` would be exactly 19 seconds if the responses took no time.
    assert int(second.headers["retry-after"]) >= 10


def email_to(recipients: int) -> dict[str, Any]:
    return EMAIL | {"to": [f"r{number}@example.org" for number in range(recipients)]}


async def test_a_quota_is_shared_by_processes(settings: Settings, connection: psycopg.Connection) -> None:
    token = make_key(connection, recipients_per_day=100)
    async with running(settings) as one, running(settings) as two:
        apis = [one, two] * 10
        answers = await asyncio.gather(*(api.post(f"k-{n}", email_to(10), token=token) for n, api in enumerate(apis)))

        statuses = [answer.status for answer in answers]
        sent = connection.execute("select count(*) from email_log").fetchone()
        assert sent == (statuses.count(202),)
        assert 9 <= statuses.count(202) <= 10
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.code == "quota-exceeded"
        assert int(refused.headers["retry-after"]) <= 86_400


async def test_refused_and_repeated_emails_and_stopped_processes_leave_the_quota_to_others(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token, roomy = (make_key(connection, recipients_per_day=quota) for quota in (120, 1000))
    async with running(settings) as one, running(settings) as two:
        for _ in range(2):
            assert (await one.post("k-1", email_to(50), token=token)).status == 202
            assert (await one.post("k-1", EMAIL | {"subject": "Other"}, token=token)).status == 422
        assert (await one.post("k-2", email_to(30), token=token)).status == 202
        refused = await one.post("k-3", email_to(50), token=token)
        last = await two.post("k-4", email_to(40), token=token)
        one_more = await two.post("k-5", token=token)
        await two.post("k-6", token=roomy)

    assert [each.status for each in (refused, last, one_more)] == [429, 202, 429]
    assert {refused.code, one_more.code} == {"quota-exceeded"}
    counted = connection.execute("select recipient_count from api_key_day order by 1").fetchall()
    assert counted == [(1,), (120,)]


async def test_a_locked_quota_of_one_key_does_not_delay_other_keys(
    settings: Settings, connection: psycopg.Connection, database_url: str
) -> None:
    async with running(settings, lock_seconds=LOCK_SECONDS) as api:
        locked, free = (make_key(connection, recipients_per_day=50) for _ in range(2))
        for number, token in enumerate((locked, free)):
            assert (await api.post(f"first-{number}", token=token)).status == 202

        with psycopg.connect(database_url) as holder:
            holder.execute("select from api_key_day where key_id = %s for update", [locked.split("_")[1]])
            waiting = [asyncio.create_task(api.post(f"locked-{number}", token=locked)) for number in range(40)]
            async with asyncio.timeout(20):  # the other transaction keeps its lock
                others = [
                    await api.post("free", token=free),
                    await api.get("/v1/emails", token=free),
                    await api.get("/v1/emails", token=make_key(connection)),
                ]
                refused = await asyncio.gather(*waiting)

        assert [answer.status for answer in others] == [202, 200, 200]
        assert {(answer.status, answer.code) for answer in refused} == {(503, "overloaded")}
        assert (await api.post("locked-0", token=locked)).status == 202


@dataclass
class Clocks:
    """A settable clock for PostgreSQL's sessions of `database_url`, and a settable monotonic clock of this host.

    PostgreSQL's clock begins ten seconds before midnight of a day in 2030, and stands still.
    """

    connection: psycopg.Connection
    database_url: str
    steady: float = 1000.0

    def advance(self, seconds: float, *, steady: float | None = None) -> None:
        self.connection.execute("update public.clock set shown = shown + %s * interval '1 second'", [seconds])
        self.steady += seconds if steady is None else steady

    def counted(self) -> list[Any]:
        return self.connection.execute("select day, recipient_count from api_key_day order by day").fetchall()

    def key(self, quota: int) -> ApiKey:
        make_key(self.connection, recipients_per_day=quota)
        (key,) = list_keys.sync(self.connection)
        return key


@pytest.fixture
def clocks(database_url: str) -> Iterator[Clocks]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("create table public.clock as select '2030-06-01 23:59:50+00'::timestamptz as shown")
        connection.execute(
            "create function public.clock_timestamp() returns timestamptz language sql"
            " as 'select shown from public.clock'"
        )
        yield Clocks(connection, make_conninfo(database_url, options="-c search_path=public,pg_catalog"))
        connection.execute("drop function public.clock_timestamp; drop table public.clock")


@pytest.fixture
async def quotas(clocks: Clocks) -> AsyncIterator[Quotas]:
    async with make_pool(clocks.database_url, name="test", size=1) as pool:
        yield Quotas(KeyStore(pool), lambda: clocks.steady)


async def test_an_exhausted_quota_is_available_again_after_retry_after_and_late_returns_do_not_count(
    clocks: Clocks, quotas: Quotas
) -> None:
    key = clocks.key(10)

    of_yesterday = await quotas.reserve(key, 10)
    assert of_yesterday == Reservation(key, TODAY)
    assert await quotas.reserve(key, 1) == QuotaExhausted(10)
    clocks.advance(9.5)
    assert await quotas.reserve(key, 1) == QuotaExhausted(1)
    clocks.advance(0.5)
    assert await quotas.reserve(key, 4) == Reservation(key, TOMORROW)
    await quotas.return_unused(of_yesterday, 10)
    assert await quotas.reserve(key, 7) == QuotaExhausted(86_400)
    assert await quotas.reserve(key, 6) == Reservation(key, TOMORROW)
    assert clocks.counted() == [(TODAY, 10), (TOMORROW, 10)]


async def test_a_chunk_is_valid_until_its_day_ends(clocks: Clocks, quotas: Quotas) -> None:
    key = clocks.key(500)
    await quotas.reserve(key, 1)
    clocks.advance(9)

    await quotas.reserve(key, 1)
    assert clocks.counted() == [(TODAY, 10)]

    clocks.advance(1)
    await quotas.reserve(key, 1)
    assert clocks.counted() == [(TODAY, 10), (TOMORROW, 10)]

    # The day ends during a refill. The nine unused recipients of the old day do not count for the new day.
    clocks.advance(86_400, steady=86_399.99)
    assert await quotas.reserve(key, 20) == Reservation(key, date(2030, 6, 3))
    assert clocks.counted() == [(TODAY, 10), (TOMORROW, 10), (date(2030, 6, 3), 21)]


async def test_concurrent_requests_do_not_spend_what_a_refill_counts_on(clocks: Clocks, quotas: Quotas) -> None:
    key = clocks.key(1000)
    await quotas.reserve(key, 1)

    large, small = await asyncio.gather(quotas.reserve(key, 30), quotas.reserve(key, 10))

    assert large == small == Reservation(key, TODAY)
