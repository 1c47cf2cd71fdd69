"""Applications pause their own tenant over HTTP, and nothing else."""

from __future__ import annotations

import psycopg

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.api.running_api import Api, make_key, running, settings_of
from tests.store.pausing import pause

PATH = "/v1/pauses"
WHY = {"reason": "complaints"}


async def test_a_tenant_is_paused_and_resumed(api: Api, connection: psycopg.Connection) -> None:
    begun = await api.call("POST", PATH, body={**WHY, "for_seconds": 3600})
    listed = await api.call("GET", PATH)
    ended = await api.call("DELETE", PATH, body=WHY)
    again = await api.call("DELETE", PATH, body=WHY)

    assert (begun.status, begun.json["name"], begun.json["reason"]) == (200, "default", "complaints")
    assert begun.json["until"] > begun.json["began_at"]
    assert listed.json == {"pauses": [begun.json]}
    assert ended.json == begun.json
    assert (again.status, again.code) == (404, "not-found")
    assert (await api.call("GET", PATH)).json == {"pauses": []}
    actions = connection.execute("select action from operator_audit order by audit_id").fetchall()
    assert actions == [("pause",), ("resume",)]


async def test_a_key_pauses_and_sees_only_its_own_tenant_and_needs_the_scope(
    servers: Servers, database_url: str, topology: Topology, connection: psycopg.Connection
) -> None:
    operator = make_key(connection, scopes=["operate"], tenant_id="shop")
    sender = make_key(connection, scopes=["send", "read"], tenant_id="shop")
    pause(connection, "all")
    pause(connection, "tenant", "other")
    async with running(settings_of(database_url, servers.amqp_url, topology)) as api:
        refused = await api.call("POST", PATH, body=WHY, token=sender)
        foreign = [
            await api.call(method, PATH, body={**WHY, "tenant_id": "other"}, token=operator)
            for method in ("POST", "DELETE")
        ]
        begun = await api.call("POST", PATH, body=WHY, token=operator)
        listed = await api.call("GET", PATH, token=operator)

    assert refused.status == 403
    assert [each.code for each in foreign] == ["tenant-forbidden", "tenant-forbidden"]
    assert listed.json == {"pauses": [begun.json]}
    assert begun.json["until"] is None
    names = connection.execute("select scope, name from pause order by scope, name").fetchall()
    assert names == [("all", ""), ("tenant", "other"), ("tenant", "shop")]


async def test_a_pause_by_an_operator_is_shown_without_the_operators_host(
    api: Api, connection: psycopg.Connection
) -> None:
    pause(connection, "tenant", "default")

    (found,) = (await api.call("GET", PATH)).json["pauses"]

    assert (found["actor"], found["reason"]) == ("ann", "maintenance")


async def test_invalid_pauses_are_refused(api: Api) -> None:
    bodies = [{}, {**WHY, "for_seconds": 0}, {**WHY, "for_seconds": "1h"}, {**WHY, "for_seconds": 1e9}]
    answers = [await api.call("POST", PATH, body=body) for body in bodies]

    assert [answer.pointers for answer in answers] == [["#/reason"], *[["#/for_seconds"]] * 3]


async def test_only_a_key_of_all_tenants_pauses_what_tenants_share(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection, scopes=["operate"], tenant_id=None)
    own = make_key(connection, scopes=["operate"], tenant_id="shop")
    for path, scope, name in [("all", "all", ""), ("lanes/bulk", "lane", "bulk"), ("providers/ses", "provider", "ses")]:
        refused = await api.call("PUT", f"{PATH}/{path}", body=WHY, token=own)
        begun = await api.call("PUT", f"{PATH}/{path}", body={**WHY, "for_seconds": 60}, token=key)
        ended = await api.call("DELETE", f"{PATH}/{path}", body=WHY, token=key)

        assert (refused.status, begun.status, ended.json) == (403, 200, begun.json)
        assert (begun.json["scope"], begun.json["name"]) == (scope, name)
