"""Tests API keys: authentication, scopes, tenants, senders, rates and quotas."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg
import pytest
from starlette.requests import Request
from structlog.testing import capture_logs

from dispatcher.api.access import AccessControl
from dispatcher.api.fair_limiter import FairLimiter
from dispatcher.api.problems import Problem
from dispatcher.api.server import LOCK_SECONDS
from dispatcher.config import Settings
from dispatcher.config.values import Listener
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.errors import ConfigurationError, StoreUnavailable
from dispatcher.store.api_keys import KeyStore
from dispatcher.store.connections import make_pool
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.waiting import until_answer


@pytest.fixture
def token(connection: psycopg.Connection) -> str:
    """An API key that exists before the API starts."""
    return make_key(connection)


async def test_after_the_first_key_every_request_needs_a_key(token: str, api: Api) -> None:
    stranger = Secret.new().text()
    forged = f"{token[:16]}{stranger[16:]}"

    for given in (None, stranger, forged, "", "x", token + "x"):
        answer = await api.post(token=given)
        assert (answer.status, answer.code, answer.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    assert (await api.post(token=token)).status == 202


async def test_requests_with_unknown_keys_fail_together_while_postgresql_is_unreachable() -> None:
    pool = make_pool("postgresql://nobody@127.0.0.1:1/nothing", name="x", size=1)
    pool.timeout = 0.2
    await pool.open()
    access = AccessControl(KeyStore(pool), FairLimiter(100), may_be_open=False)
    header = f"Bearer {Secret.new().text()}".encode()
    request = Request({"type": "http", "headers": [(b"authorization", header)]})

    results = await asyncio.gather(
        *(access.authenticate(request, Scope.SEND) for _ in range(20)), return_exceptions=True
    )

    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert pool.get_stats()["requests_num"] == 1
    await pool.close()


async def test_an_existing_key_id_cannot_be_distinguished_from_an_unknown_one(
    token: str, settings: Settings, database_url: str
) -> None:
    pool = make_pool(database_url, name="x", size=1)
    await pool.open()
    access = AccessControl(KeyStore(pool), FairLimiter(100), may_be_open=False)
    await access.refresh()
    query_counts = []
    for text in (Secret.new().text(), f"{token[:16]}{Secret.new().text()[16:]}"):
        before = pool.get_stats().get("requests_num", 0)
        request = Request({"type": "http", "headers": [(b"authorization", f"Bearer {text}".encode())]})
        with pytest.raises(Problem, match="unauthorized"):
            await access.authenticate(request, Scope.SEND)
        query_counts.append(pool.get_stats()["requests_num"] - before)
    await pool.close()

    assert query_counts == [1, 1]


async def test_a_key_is_accepted_only_in_the_header(token: str, api: Api) -> None:
    answer = await api.call("POST", f"/v1/emails?key={token}&access_token={token}", key="k", body=EMAIL)

    assert answer.code == "unauthorized"


async def test_the_first_key_created_while_the_api_runs_ends_open_access_and_works(
    api: Api, connection: psycopg.Connection
) -> None:
    assert (await api.post("k-1")).status == 202
    token = make_key(connection)

    async def needs_key() -> bool:
        return (await api.get("/v1/emails")).status == 401

    assert (await api.post("k-2", token=token)).status == 202
    await until_answer(needs_key)
    assert (await api.post("k-3", token=token)).status == 202


async def test_a_revoked_key_is_refused_and_the_api_stays_closed(
    token: str, api: Api, connection: psycopg.Connection
) -> None:
    connection.execute("update api_key set revoked_at = clock_timestamp()")

    async def is_refused() -> bool:
        return (await api.get("/v1/emails", token=token)).status == 401

    await until_answer(is_refused)
    assert (await api.get("/v1/emails")).status == 401


async def test_a_key_without_the_scope_is_refused(api: Api, connection: psycopg.Connection) -> None:
    reader, sender = make_key(connection, scopes=["read"]), make_key(connection, scopes=["send"])

    assert (await api.post(token=reader)).code == "insufficient-scope"
    assert (await api.get("/v1/emails", token=sender)).code == "insufficient-scope"
    assert (await api.post(token=sender)).status == 202
    assert (await api.get("/v1/emails", token=reader)).status == 200


async def test_a_key_sends_only_for_its_tenant(token: str, api: Api, connection: psycopg.Connection) -> None:
    assert (await api.post("k-1", EMAIL | {"tenant_id": "other"}, token=token)).code == "tenant-forbidden"
    assert (await api.post("k-2", EMAIL | {"tenant_id": "shop"}, token=token)).status == 202
    assert (await api.post("k-3", token=token)).status == 202

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
    token = make_key(
        connection,
        sender_domains=["example.com", "xn--bcher-kva.example"],
        sender_addresses=["news@example.net"],
    )

    for sender in ALLOWED:
        assert (await api.post(sender.encode().hex(), EMAIL | {"from": sender}, token=token)).status == 202
    for sender in FOREIGN:
        answer = await api.post(body=EMAIL | {"from": sender}, token=token)
        assert (answer.status, answer.code, answer.pointers) == (403, "sender-forbidden", ["#/from"])


async def test_requests_beyond_the_rate_get_429_with_retry_after(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, requests_per_second=2.0)

    first = await api.get("/v1/emails", token=token)
    # There are so many requests that the API refuses some, even on a slow machine.
    others = await asyncio.gather(*(api.get("/v1/emails", token=token) for _ in range(100)))

    refused = [answer for answer in others if answer.status == 429]
    assert first.status == 200
    assert refused
    assert {(answer.code, answer.headers["retry-after"]) for answer in refused} == {("rate-limited", "1")}


async def test_each_email_of_a_batch_counts_toward_the_rate(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, requests_per_second=10.0)
    emails = [EMAIL | {"message_key": f"k-{number}"} for number in range(200)]

    first = await api.call("POST", "/v1/emails/batch", body={"emails": emails}, token=token)
    second = await api.get("/v1/emails", token=token)

    assert (first.status, second.code) == (200, "rate-limited")
    # `Retry-After` would be exactly 19 seconds if the responses took no time.
    assert int(second.headers["retry-after"]) >= 10


async def test_a_batch_of_one_email_counts_as_one_request(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, requests_per_second=2.0)

    first = await api.call("POST", "/v1/emails/batch", body={"emails": [EMAIL]}, token=token)
    second = await api.get("/v1/emails", token=token)

    assert (first.status, second.status) == (200, 200)


async def test_a_quota_is_shared_by_processes_and_repeated_requests_cost_nothing(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=100)
    email = EMAIL | {"to": [f"r{number}@example.org" for number in range(10)]}
    async with running(settings) as one, running(settings) as two:
        apis = [one, two] * 10
        answers = await asyncio.gather(*(api.post(f"k-{n}", email, token=token) for n, api in enumerate(apis)))

        statuses = [answer.status for answer in answers]
        sent = connection.execute("select count(*) from email_log").fetchone()
        assert sent == (statuses.count(202),)
        assert 9 <= statuses.count(202) <= 10
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.code == "quota-exceeded"
        assert int(refused.headers["retry-after"]) <= 86_400
        accepted = statuses.index(202)
        replayed = await one.post(f"k-{accepted}", email, token=token)
        assert (replayed.status, replayed.body) == (202, answers[accepted].body)


async def test_refused_emails_use_no_quota(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, recipients_per_day=2)

    for _ in range(5):
        assert (await api.post("k-1", token=token)).status == 202
        assert (await api.post("k-1", EMAIL | {"subject": "Other"}, token=token)).status == 422
    assert (await api.post("k-2", token=token)).status == 202
    assert (await api.post("k-3", token=token)).status == 429


async def test_a_process_that_stops_returns_its_unused_quota(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=1000)
    async with running(settings) as api:
        await api.post(token=token)

    assert connection.execute("select recipient_count from api_key_day").fetchall() == [(1,)]


async def test_without_keys_it_does_not_start_on_a_public_address(settings: Settings) -> None:
    with pytest.raises(ConfigurationError, match="dispatcher keys create"):
        async with running(replace(settings, api_address=Listener("0.0.0.0", 0))):  # noqa: S104 - the test shows that it is refused
            pass


async def test_without_keys_it_does_not_start_unless_the_setting_allows_open_access(settings: Settings) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_API_ALLOW_ANONYMOUS=on"):
        async with running(replace(settings, api_allow_anonymous=False)):
            pass


@pytest.mark.parametrize("is_open", [False, True])
async def test_it_does_not_start_if_all_keys_are_revoked(
    token: str, settings: Settings, connection: psycopg.Connection, is_open: bool
) -> None:
    connection.execute("update api_key set revoked_at = clock_timestamp()")

    with pytest.raises(ConfigurationError, match="dispatcher keys create"):
        async with running(replace(settings, api_allow_anonymous=is_open)):
            pass


@pytest.mark.parametrize("is_open", [False, True])
async def test_deleting_all_keys_does_not_open_the_api(
    token: str, settings: Settings, connection: psycopg.Connection, is_open: bool
) -> None:
    async with running(replace(settings, api_allow_anonymous=is_open)) as api:
        assert (await api.get("/v1/emails", token=token)).status == 200
        connection.execute("delete from api_key")

        async def is_refused() -> bool:
            return (await api.get("/v1/emails", token=token)).status == 401

        await until_answer(is_refused)
        assert (await api.post()).status == 401


async def test_open_access_is_logged_at_the_start(settings: Settings, connection: psycopg.Connection) -> None:
    with capture_logs() as without_keys:
        async with running(settings):
            pass
    make_key(connection)
    with capture_logs() as with_a_key:
        async with running(settings):
            pass

    assert [event["log_level"] for event in without_keys if event["event"] == "api.anonymous_allowed"] == ["warning"]
    assert not [event for event in with_a_key if event["event"] == "api.anonymous_allowed"]


async def test_without_keys_a_foreign_host_name_is_refused(api: Api) -> None:
    for host in ("evil.example", "evil.example:8025", "127.0.0.1.evil.example", ""):
        answer = await api.post(headers={"Host": host})
        assert (answer.status, answer.code) == (403, "host-forbidden")


PROXIED = (
    {"Forwarded": "for=192.0.2.1"},
    {"Via": "1.1 proxy.example"},
    {"X-Forwarded-For": "192.0.2.1"},
    {"X-Forwarded-Proto": "https"},
    {"x-forwarded-host": "mail.example.com"},
)


async def test_requests_through_a_proxy_need_a_key(api: Api, connection: psycopg.Connection) -> None:
    for headers in PROXIED:
        answer = await api.post(headers=headers)
        assert (answer.status, answer.code) == (403, "host-forbidden")

    token = make_key(connection)
    for headers in PROXIED:
        assert (await api.post(token=token, headers=headers)).status == 202


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


async def test_an_email_may_name_only_a_lane_of_its_key(connection: psycopg.Connection, api: Api) -> None:
    plain = make_key(connection)
    login = make_key(connection, lane="urgent", allowed_lanes=["bulk"])

    refused = await api.post(body={**EMAIL, "lane": "urgent"}, token=plain)
    unknown = await api.post(body={**EMAIL, "lane": "slow"}, token=login)
    assert (refused.status, refused.code) == (403, "lane-forbidden")
    assert refused.json["errors"][0]["pointer"] == "#/lane"
    assert (unknown.status, unknown.code) == (422, "invalid-email")
    assert "urgent, normal, bulk" in unknown.json["errors"][0]["detail"]

    for key, lane, token in (("a", None, plain), ("b", None, login), ("c", "bulk", login), ("d", "urgent", login)):
        email = {**EMAIL, "lane": lane} if lane else EMAIL
        assert (await api.post(key, email, token=token)).status == 202
    rows = connection.execute("select message_key, lane from email_log order by message_key").fetchall()
    assert rows == [("a", "normal"), ("b", "urgent"), ("c", "bulk"), ("d", "urgent")]
