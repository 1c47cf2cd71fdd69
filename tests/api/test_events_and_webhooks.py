"""Applications poll events and manage webhooks over HTTP, each tenant its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

from dispatcher.client import AsyncClient, Client
from dispatcher.config import Settings
from tests.api.running_api import Api, make_key, running
from tests.monitor.receiver import receiving, write_ca
from tests.store.test_outgoing_events import announce

OPERATOR = ["read", "operate"]


async def test_a_tenant_polls_its_events_from_a_cursor(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection)
    first = await api.get("/v1/events", token=key)
    assert (first.status, first.json["events"], first.json["has_more"]) == (200, [], False)
    assert connection.execute("select is_on from outgoing_feed").fetchone() == (True,)
    wanted = announce(connection, count=150)
    announce(connection, "other", 5)

    page = await api.get(f"/v1/events?after={first.json['next']}", token=key)
    last = await api.get(f"/v1/events?limit=1000&after={page.json['next']}", token=key)

    assert (len(page.json["events"]), page.json["has_more"]) == (100, True)
    assert [event["id"] for event in page.json["events"] + last.json["events"]] == list(map(str, wanted))
    assert not last.json["has_more"]
    event = page.json["events"][0]
    assert (event["type"], event["data"]["tenant_id"], event["data"]["message_key"]) == ("email.sent", "shop", "key")
    middle = await api.get(f"/v1/events?limit=1&after={page.json['events'][41]['cursor']}", token=key)
    assert middle.json["events"][0]["id"] == str(wanted[42])


@pytest.mark.parametrize("query", ["after=x", "after=", "limit=0", "limit=1001", "limit=x", "tenant_id=a%20b"])
async def test_a_wrong_cursor_or_limit_is_refused(api: Api, query: str) -> None:
    answer = await api.get(f"/v1/events?{query}")

    assert (answer.status, answer.code) == (400, "invalid-parameter")


async def test_both_clients_iterate_and_remember_their_cursor(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection)
    connection.execute("update outgoing_feed set is_on = true")
    wanted = announce(connection, count=1200)

    def use() -> tuple[list[object], str | None]:
        with Client(api.url, key=key) as client:
            events = client.events()
            found: list[object] = []
            for event in events:
                if len(found) == 700:
                    break  # the application failed, and has not handled this event
                found.append(event.id)
            return found + [event.id for event in events], events.cursor

    found, cursor = await asyncio.to_thread(use)
    assert found == wanted
    more = announce(connection, count=2)
    async with AsyncClient(api.url, key=key) as client:
        events = client.events(after=cursor)
        assert [event.id async for event in events] == more
        later = announce(connection)
        assert [(event.id, event.type) async for event in events] == [(later[0], "email.sent")]
        assert [event async for event in events] == []


async def test_a_tenant_manages_its_webhooks_and_no_others(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection, scopes=OPERATOR)
    other = make_key(connection, scopes=OPERATOR, tenant_id="other")
    body = {"url": "https://shop.example.com/hooks", "events": ["email.bounced"], "reason": "test"}
    made = await api.call("POST", "/v1/webhooks", body=body, token=key)
    path = made.headers["location"]
    assert made.status == 201
    assert made.json["secret"].startswith("whsec_")
    assert (made.json["tenant_id"], made.json["events"], made.json["state"]) == ("shop", ["email.bounced"], "active")
    without_secret = {name: value for name, value in made.json.items() if name != "secret"}
    assert (await api.get("/v1/webhooks", token=key)).json == {"webhooks": [without_secret]}
    assert (await api.get("/v1/webhooks", token=other)).json == {"webhooks": []}

    why = {"reason": "test"}
    since = why | {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()}
    ask: list[tuple[Callable[..., object], object]] = [
        (partial(api.get, path), None),
        (partial(api.call, "POST", f"{path}/test"), None),
        (partial(api.call, "POST", f"{path}/rotate"), why),
        (partial(api.call, "POST", f"{path}/enable"), why),
        (partial(api.call, "POST", f"{path}/replay"), since),
        (partial(api.call, "POST", f"{path}/disable"), why),
        (partial(api.call, "DELETE", path), why),
    ]
    for call, given in ask:
        answer = await call(token=other, **({} if given is None else {"body": given}))  # type: ignore[misc]
        assert (answer.status, answer.code) == (404, "not-found")
    rotated = await api.call("POST", f"{path}/rotate", body=why, token=key)
    assert rotated.json["secret"] not in (made.json["secret"], None)
    assert (await api.call("POST", f"{path}/enable", body=why, token=key)).json == without_secret
    assert (await api.call("POST", f"{path}/replay", body=since, token=key)).status == 200
    assert (await api.call("POST", f"{path}/disable", body=why, token=key)).json["state"] == "disabled"
    assert (await api.call("DELETE", path, body=why, token=key)).status == 200
    assert (await api.get(path, token=key)).status == 404
    actions = connection.execute("select action from operator_audit order by audit_id").fetchall()
    assert [row[0].removeprefix("webhook_") for row in actions] == [
        *("add", "rotate", "enable", "replay", "disable", "remove")
    ]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"url": "http://shop.example.com/hooks"}, "#/url"),
        ({"url": "http://127.0.0.1/hooks"}, "#/url"),
        ({"url": "https://10.0.0.7/hooks"}, "#/url"),
        ({"url": "https://ann:secret@shop.example.com/hooks"}, "#/url"),
        ({"url": f"https://shop.example.com/{'x' * 2000}"}, "#/url"),
        ({"url": None}, "#/url"),
        ({"events": []}, "#/events"),
        ({"events": ["email.opened"]}, "#/events/0"),
        ({"events": [["email.sent"]]}, "#/events/0"),
        ({"all_tenants": True}, "#"),
        ({"recipients": "yes"}, "#/recipients"),
        ({"reason": " "}, "#/reason"),
    ],
)
async def test_an_invalid_webhook_is_refused(
    api: Api, connection: psycopg.Connection, change: dict[str, object], pointer: str
) -> None:
    key = make_key(connection, scopes=OPERATOR)
    body = {"url": "https://shop.example.com/hooks", "reason": "test"} | change

    answer = await api.call("POST", "/v1/webhooks", body=body, token=key)

    assert (answer.status, answer.code, answer.pointers) == (422, "invalid-body", [pointer])
    assert connection.execute("select is_on from outgoing_feed").fetchone() == (False,)


async def test_a_test_event_reports_the_receivers_answer(
    settings: Settings, connection: psycopg.Connection, tmp_path: Path
) -> None:
    ca = trustme.CA()
    with receiving(ca, "127.0.0.1") as receiver:
        allowed = replace(settings, webhooks_allow_private=True, ca_file=write_ca(ca, tmp_path))
        async with running(allowed) as api:
            made = await api.call("POST", "/v1/webhooks", body={"url": receiver.url, "reason": "test"})
            path = f"/v1/webhooks/{made.json['id']}/test"
            accepted = (await api.call("POST", path)).json
            receiver.status_of = lambda _: 500
            refused = (await api.call("POST", path)).json

    assert accepted == {"is_accepted": True, "detail": "the receiver answered 204"}
    assert refused == {"is_accepted": False, "detail": "the receiver answered 500"}
    posted = receiver.posted[0]
    Verifier(made.json["secret"]).verify(posted.body.decode(), dict(posted.headers))
    assert posted.json["type"] == "webhook.test"
