"""Applications suppress recipients over HTTP, within the key's tenant; some keys may ignore suppression."""

from __future__ import annotations

import psycopg

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.api.running_api import EMAIL, Api, make_key, running, settings_of

PATH = "/v1/suppressions"
WHY = {"reason": "closed account"}


async def test_entries_are_added_listed_by_page_and_removed(api: Api, connection: psycopg.Connection) -> None:
    first = await api.call("POST", PATH, body={**WHY, "recipients": ["Ann <ann@example.org>"]})
    added = await api.call("POST", PATH, body={**WHY, "recipients": ["ann@example.org", "example.net"], "note": "n"})
    await api.call("POST", PATH, body={**WHY, "recipients": ["bob@example.org"], "kind": "complaint"})
    page = await api.call("GET", f"{PATH}?limit=2")
    rest = await api.call("GET", f"{PATH}?limit=2&after={page.json['next']}")
    complaints = await api.call("GET", f"{PATH}?kind=complaint")
    email_id = (await api.post("a", EMAIL | {"to": ["ann@example.org"]})).json["id"]
    connection.execute("update email_log set status = 'failed', error_type = 'suppressed', publish_due_at = null")
    removed = await api.call("DELETE", PATH, body={**WHY, "recipients": ["ann@example.org"]})

    assert (first.status, first.json, added.json) == (200, {"added": 1, "unchanged": 0}, {"added": 1, "unchanged": 1})
    listed = page.json["suppressions"] + rest.json["suppressions"]
    assert [(entry["recipient"], entry["kind"], entry["is_domain"]) for entry in listed] == [
        ("b•••@example.org", "complaint", False),
        ("example.net", "manual", True),
        ("a•••@example.org", "manual", False),
    ]
    assert "address_hash" not in listed[0]
    assert rest.json["next"] is None
    assert [entry["recipient"] for entry in complaints.json["suppressions"]] == ["b•••@example.org"]
    assert removed.json == {"removed": 1, "stopped_count": 1, "stopped_email_ids": [email_id]}
    actions = connection.execute("select action from operator_audit order by audit_id").fetchall()
    assert [action for (action,) in actions] == ["suppress", "suppress", "suppress", "unsuppress"]


async def test_invalid_requests_are_refused_without_repeating_addresses(api: Api) -> None:
    bodies = [
        {**WHY, "recipients": []},
        {**WHY, "recipients": ["ann@example.org", "bob@@example.org"]},
        {**WHY, "recipients": ["ann@example.org"], "days": 3, "expires_at": "2099-01-01T00:00:00Z"},
        {**WHY, "recipients": ["ann@example.org"], "expires_at": "9999-12-31T23:59:59-23:59"},
        {**WHY, "recipients": ["ann@example.org"], "expires_at": "0001-01-01T00:00:00+23:59"},
    ]
    answers = [await api.call("POST", PATH, body=body) for body in bodies]

    assert [answer.status for answer in answers] == [422] * len(bodies)
    assert [answer.pointers for answer in answers] == [
        ["#/recipients"],
        ["#/recipients/1"],
        ["#/days"],
        ["#/expires_at"],
        ["#/expires_at"],
    ]
    assert "bob" not in str(answers[1].json)
    assert (await api.call("GET", f"{PATH}?after=x")).code == "invalid-parameter"


async def test_a_key_sees_its_own_tenant_only_and_needs_the_scope(
    servers: Servers, database_url: str, topology: Topology, connection: psycopg.Connection
) -> None:
    operator = make_key(connection, scopes=["operate"], tenant_id="shop")
    other = make_key(connection, scopes=["operate"], tenant_id="other")
    sender = make_key(connection, scopes=["send", "read"], tenant_id="shop")
    body = {**WHY, "recipients": ["ann@example.org"]}
    async with running(settings_of(database_url, servers.amqp_url, topology)) as api:
        assert (await api.call("POST", PATH, body=body, token=operator)).json == {"added": 1, "unchanged": 0}
        assert (
            await api.call("POST", PATH, body={**body, "tenant_id": "shop"}, token=other)
        ).code == "tenant-forbidden"
        assert (await api.call("GET", PATH, token=other)).json["suppressions"] == []
        assert (await api.call("DELETE", PATH, body=body, token=other)).json["removed"] == 0
        for method in ("GET", "POST", "DELETE"):
            answer = await api.call(method, PATH, body=None if method == "GET" else body, token=sender)
            assert answer.code == "insufficient-scope"


async def test_only_a_key_with_the_scope_may_ignore_suppression(
    servers: Servers, database_url: str, topology: Topology, connection: psycopg.Connection
) -> None:
    usual = make_key(connection, scopes=["send"])
    allowed = make_key(connection, scopes=["send", "ignore_suppression"])
    email = EMAIL | {"ignore_suppression": True}
    async with running(settings_of(database_url, servers.amqp_url, topology)) as api:
        refused = await api.post("a", email, token=usual)
        assert (refused.status, refused.code) == (403, "insufficient-scope")
        assert refused.pointers == ["#/ignore_suppression"]
        assert (await api.post("a", EMAIL | {"ignore_suppression": False}, token=usual)).status == 202
        assert (await api.post("b", email, token=allowed)).status == 202
    rows = connection.execute("select ignore_suppression from email_content order by email_id").fetchall()
    assert [value for (value,) in rows] == [False, True]
