"""Through command, HTTP, page and client, an action makes the same change, audit row and refusal."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from typing import Any

import psycopg
import pytest

from dispatcher.actions import all_actions
from dispatcher.actions.action import example, read
from dispatcher.actions.tenants import ListTenants, SetTenant, UnsetTenant
from dispatcher.broker.topology import Topology
from dispatcher.client import ApiProblem, Client
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.domain.controls import TenantLimit
from dispatcher.store.queries import all_queries
from tests.api.ops_page.browsing import Browser
from tests.api.running_api import UNREACHABLE_AMQP_URL, make_key, running, settings_of
from tests.store.statements import prepared

PATH = "/v1/tenants/acme"


@pytest.fixture
def settings(servers: Servers, database_url: str, topology_names: Topology) -> Settings:
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names, OPS="on")


def stored(connection: psycopg.Connection) -> tuple[Any, Any]:
    limits = connection.execute("select tenant_id, weight, per_second from tenant_limit").fetchall()
    audited = connection.execute("select action, reason, detail from operator_audit order by audit_id").fetchall()
    connection.commit()
    return limits, audited


async def test_http_and_the_client_set_list_and_unset(settings: Settings, connection: psycopg.Connection) -> None:
    async with running(settings) as api:
        changed = await api.call("PUT", PATH, body={"weight": 2, "per_second": 50, "reason": "contract"})
        listed = await api.call("GET", "/v1/tenants")

        def use() -> list[Any]:
            with Client(api.url) as client:
                found: list[Any] = [client.run(SetTenant(tenant_id="acme", weight=3.0, reason="more"))]
                found += [client.run(ListTenants()), client.run(UnsetTenant(tenant_id="acme", reason="over"))]
                with pytest.raises(ApiProblem) as caught:
                    client.run(UnsetTenant(tenant_id="acme", reason="over"))
                return [*found, caught.value.code]

        used = await asyncio.to_thread(use)
        again = await api.call("DELETE", PATH, body={"reason": "over"})

    assert (changed.status, changed.json) == (200, {"tenant_id": "acme", "weight": 2.0, "per_second": 50.0})
    assert listed.json == {"tenants": [changed.json]}
    limit = TenantLimit("acme", 3.0, 50.0)
    assert used == [limit, [limit], limit, "not-found"]
    assert (again.status, again.json["detail"]) == (
        404,
        "Nothing is set for tenant acme. See `dispatcher tenants list`.",
    )
    assert [each[:2] for each in stored(connection)[1]] == [
        ("set_tenant", "contract"),
        ("set_tenant", "more"),
        ("set_tenant", "over"),
    ]


async def test_http_reports_all_mistakes_at_once(settings: Settings, connection: psycopg.Connection) -> None:
    async with running(settings) as api:
        wrong = await api.call("PUT", "/v1/tenants/-", body={"wieght": 2, "per_second": 0, "weight": True})
        empty = await api.call("PUT", PATH, body={"reason": "r"})
        unknown = await api.call("GET", "/v1/tenants?limit=5")

    assert (wrong.status, wrong.code) == (422, "invalid-body")
    rule = "must be a number from 0.001 to 1,000,000"
    assert wrong.json["errors"] == [
        {"pointer": "#", "detail": "has an unknown field; did you mean weight?"},
        {
            "parameter": "tenant_id",
            "detail": "must begin with an ASCII letter or digit; letters, digits and . _ : - may follow",
        },
        {"pointer": "#/per_second", "detail": rule},
        {"pointer": "#/weight", "detail": rule},
        {"pointer": "#/reason", "detail": "is required"},
    ]
    assert empty.json["errors"] == [{"pointer": "#", "detail": "needs at least one of: per_second, weight"}]
    assert (unknown.status, unknown.code) == (400, "invalid-parameter")
    assert stored(connection) == ([], [])


async def test_a_key_of_one_tenant_or_without_the_scope_is_refused(
    settings: Settings, connection: psycopg.Connection
) -> None:
    one = make_key(connection, scopes=["operate"], tenant_id="acme")
    reader = make_key(connection, scopes=["read"], tenant_id=None)
    every = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
    body = {"weight": 2, "reason": "r"}
    async with running(settings) as api:
        answers = [await api.call("PUT", PATH, body=body, token=token) for token in (one, reader, every)]
    assert [(each.status, each.code) for each in answers[:2]] == [(403, "insufficient-scope")] * 2
    assert answers[2].status == 200
    actor = connection.execute("select actor from operator_audit").fetchone()
    assert actor is not None
    assert re.fullmatch(r"api key ed_\w+ \(ann\)", actor[0])


async def test_the_page_shows_the_same_words(settings: Settings, connection: psycopg.Connection) -> None:
    key = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
    async with running(settings) as api:
        browser = Browser(api)
        await browser.sign_in(key)
        await browser.get("/ops/lanes")
        wrong = await browser.submit("/tenants/set", tenant_id="acme", weight="0", per_second="x", reason="r")
        html = unescape(wrong.body.decode())
    rule = "must be a number from 0.001 to 1,000,000."
    assert f"Per second {rule} Weight {rule}" in html
    assert 'value="0"' in html
    assert stored(connection) == ([], [])


def test_every_example_is_valid() -> None:
    for action in all_actions():
        if not action.is_list:
            read(action, example(action), {})


def test_every_row_type_has_the_columns_of_its_query(tables_url: str) -> None:
    with psycopg.connect(tables_url, autocommit=True) as connection:
        for name, kind in {name: kind for action in all_actions() for name, kind in action.rows().items()}.items():
            statement = prepared(name, all_queries()[name].decode())
            assert statement is not None
            connection.execute(statement)
            described = connection.pgconn.describe_prepared(name.encode())
            columns = tuple((described.fname(at) or b"").decode() for at in range(described.nfields))
            assert columns == kind.__match_args__[: len(columns)], name
