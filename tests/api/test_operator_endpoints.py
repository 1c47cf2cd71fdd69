"""Emails, replays, suppressions, pauses, webhooks and events over HTTP, within the tenant of a key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg.rows import dict_row

from dispatcher.config import Settings
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.store.pausing import pause
from tests.store.test_outgoing_events import announce
from tests.waiting import until_answer

REASON: Final = {"reason": "The provider shows it."}
OPERATOR: Final = ["read", "operate"]
ANN: Final = {"recipients": ["ann@example.org"]}
HOOK: Final = {"url": "https://shop.example.com/hooks"}
UNKNOWN: Final = "0199c0de-0000-7000-8000-000000000000"
HELD: Final = f"/v1/held/{UNKNOWN}/confirm"
TOMORROW: Final = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
LATER: Final = {"send_at": TOMORROW.isoformat(), **REASON}
NEED_OPERATE: Final = (
    *(("POST", path) for path in ("/v1/replays", HELD, "/v1/pauses", "/v1/suppressions")),
    *(("GET", path) for path in ("/v1/replays/1", "/v1/pauses", "/v1/suppressions")),
    *(("DELETE", path) for path in ("/v1/pauses", "/v1/suppressions")),
)
BAD_URLS: Final = ("http://shop.example.com/hooks", "https://10.0.0.7/hooks", f"https://a.example/{'x' * 2000}", None)
BAD_QUERIES: Final = ("after=x", "after=", "limit=0", "limit=1001", "limit=x", "tenant_id=a%20b")


def set_status(connection: psycopg.Connection, status: str) -> None:
    connection.execute(
        "update email_log set status = %s, publish_due_at = null, error_type = 'refused', attempt_count = 1", [status]
    )


def column(connection: psycopg.Connection, name: str) -> dict[str, Any]:
    rows = connection.cursor(row_factory=dict_row).execute("select * from email_log").fetchall()
    return {row["message_key"]: row[name] for row in rows}


async def test_a_replay_sends_the_tenants_failed_emails_again_and_reports_its_progress(
    api: Api, connection: psycopg.Connection
) -> None:
    for key, tenant in (("a", "shop"), ("b", "shop"), ("c", "other")):
        await api.post(key, EMAIL | {"tenant_id": tenant})
    set_status(connection, "failed")
    token = make_key(connection, scopes=["operate"])

    forecast = await api.call("POST", "/v1/replays/preview", body={"error_type": "refused"}, token=token)
    made = await api.call("POST", "/v1/replays", body={"error_type": "refused", **REASON}, token=token)

    ids = connection.execute("select email_id::text from email_log where tenant_id = 'shop' order by 1").fetchall()
    (outcome,) = forecast.json["outcomes"]
    assert outcome == {"outcome": "replayed", "emails": 2, "sample": [email_id for (email_id,) in ids]}
    assert made.status == 202
    await until_replayed(api, made.headers["location"], 2, token)
    assert column(connection, "status") == {"a": "pending", "b": "pending", "c": "failed"}


async def test_a_replay_can_be_stopped_only_by_its_tenant(api: Api, connection: psycopg.Connection) -> None:
    for key in ("a", "b", "c"):
        await api.post(key, EMAIL | {"tenant_id": "shop"})
    set_status(connection, "failed")
    token, other = (make_key(connection, scopes=["operate"], tenant_id=tenant) for tenant in ("shop", "other"))
    made = await api.call("POST", "/v1/replays", body={"per_second": 0.01, **REASON}, token=token)
    path = made.headers["location"]

    (listed,) = (await api.get("/v1/replays", token=token)).json["replays"]
    unlisted = (await api.get("/v1/replays", token=other)).json
    foreign = [await api.get(path, token=other), await api.call("DELETE", path, body=REASON, token=other)]
    unreasoned = await api.call("DELETE", path, body={}, token=token)
    stopped = await api.call("DELETE", path, body={"reason": "too fast"}, token=token)

    assert (listed["id"], listed["total"], listed["reason"]) == (made.json["id"], 3, REASON["reason"])
    assert unlisted == {"replays": [], "next": None}
    assert [answer.status for answer in foreign] == [404, 404]
    assert (unreasoned.status, unreasoned.pointers) == (422, ["#/reason"])
    assert (stopped.status, stopped.json["state"]) in ((200, "stopping"), (200, "stopped"))
    acts = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert acts == [("replay", REASON["reason"]), ("stop", "too fast")]
    assert list(column(connection, "status").values()).count("failed") >= 2


async def test_slow_replays_of_one_tenant_do_not_delay_another_tenant(api: Api, connection: psycopg.Connection) -> None:
    ids: dict[str, list[str]] = {"slow": [], "other": []}
    for number, tenant in enumerate([*["slow"] * 6, "other"]):
        ids[tenant].append((await api.post(f"k-{number}", EMAIL | {"tenant_id": tenant})).json["id"])
    set_status(connection, "failed")
    slow = {"tenant_id": "slow", "per_second": 0.01, **REASON}
    paths = []
    for first in (0, 2, 4):
        begun = await api.call("POST", "/v1/replays", body={"email_ids": ids["slow"][first : first + 2], **slow})
        paths.append(f"{begun.headers['location']}?tenant_id=slow")
    for path in paths[:2]:
        await until_replayed(api, path, 1)

    made = await api.call("POST", "/v1/replays", body={"tenant_id": "other", **REASON})

    await until_replayed(api, f"{made.headers['location']}?tenant_id=other", 1)
    assert (await api.get(paths[2])).json["outcomes"] == {}


async def test_another_process_resumes_interrupted_replays(settings: Settings, connection: psycopg.Connection) -> None:
    async with running(settings) as first:
        for key in ("a", "b", "c"):
            await first.post(key)
        set_status(connection, "failed")
        made = await first.call("POST", "/v1/replays", body={"per_second": 0.01, **REASON})
        path = made.headers["location"]
        await until_replayed(first, path, 1)

    async with running(settings) as second:
        # PostgreSQL notices late that the process of the replay exited.
        interrupted = (await until_answer(lambda: second.get(path), lambda found: not found.json["is_active"])).json
        connection.execute("update email_replay set per_second = null")
        resumed = await second.call("POST", f"{path}/resume", body=REASON)
        again = await second.call("POST", f"{path}/resume", body=REASON)
        await until_replayed(second, path, 3)
        done = await second.call("POST", f"{path}/resume", body=REASON)
        unknown = await second.call("POST", "/v1/replays/4711/resume", body=REASON)

    assert (interrupted["state"], interrupted["is_active"], interrupted["waiting"]) == ("interrupted", False, 2)
    assert [answer.status for answer in (resumed, again, done, unknown)] == [202, 202, 202, 404]
    assert set(column(connection, "status").values()) == {"pending"}


async def until_replayed(api: Api, path: str, emails: int, token: str | None = None) -> None:
    await until_answer(lambda: api.get(path, token=token), lambda found: found.json["outcomes"] == {"replayed": emails})


async def test_the_reason_of_a_replay_is_shown_to_whose_key_gave_it_and_to_keys_for_all_tenants(
    api: Api, connection: psycopg.Connection
) -> None:
    own, colleague = (make_key(connection, scopes=["operate"]) for _ in range(2))
    everyone = make_key(connection, scopes=["operate"], tenant_id=None)
    of_tenant = (await api.call("POST", "/v1/replays", body=REASON, token=own)).json
    private = {"tenant_id": "shop", "text": "words of an operator"}
    of_operator = (await api.call("POST", "/v1/replays", body=REASON | private, token=everyone)).json
    paths = [f"/v1/replays/{made['id']}" for made in (of_tenant, of_operator)]

    async def seen(token: str, query: str = "") -> list[Any]:
        return [(await api.get(path + query, token=token)).json for path in paths]

    why = REASON["reason"]
    for token, query, of_an_operator in ((own, "", None), (colleague, "", None), (everyone, "?tenant_id=shop", why)):
        replays = await seen(token, query)
        assert [replay["reason"] for replay in replays] == [why, of_an_operator]
        selection = replays[1]["selection"]
        assert selection["text"] == private["text"] if of_an_operator else selection == {}


async def test_operator_endpoints_need_the_scope_operate(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection, scopes=["send", "read"])

    for method, path in NEED_OPERATE:
        body = {**REASON, "recipients": ["ann@example.org"]} if method != "GET" else None
        assert (await api.call(method, path, body=body, token=token)).code == "insufficient-scope", path


INVALID: Final[list[tuple[str, dict[str, Any], list[str]]]] = [
    *(("replays", {"per_second": pace}, ["#/per_second"]) for pace in (0.009, 10_001, True)),
    ("pauses", {"reason": None}, ["#/reason"]),
    *(("pauses", {"for_seconds": seconds}, ["#/for_seconds"]) for seconds in (0, "1h", 1e9)),
    ("suppressions", {"recipients": []}, ["#/recipients"]),
    ("suppressions", {"recipients": ["ann@example.org", "bob@@example.org"]}, ["#/recipients/1"]),
    ("suppressions", {**ANN, "days": 3, "expires_at": "2099-01-01T00:00:00Z"}, ["#/days"]),
    ("suppressions", {**ANN, "expires_at": "9999-12-31T23:59:59-23:59"}, ["#/expires_at"]),
    ("suppressions", {**ANN, "expires_at": "0001-01-01T00:00:00+23:59"}, ["#/expires_at"]),
    *(("webhooks", {"url": url}, ["#/url"]) for url in BAD_URLS),
    ("webhooks", {**HOOK, "events": []}, ["#/events"]),
    ("webhooks", {**HOOK, "events": ["email.read"]}, ["#/events/0"]),
    ("webhooks", {**HOOK, "events": [["email.sent"]]}, ["#/events/0"]),
    ("webhooks", {**HOOK, "all_tenants": True}, ["#"]),
]


async def test_an_invalid_or_large_body_is_refused_and_the_response_names_the_field(
    api: Api, connection: psycopg.Connection
) -> None:
    key = make_key(connection, scopes=OPERATOR)
    for path, body, pointers in INVALID:
        answer = await api.call("POST", f"/v1/{path}", body={**REASON, **body}, token=key)
        assert (answer.status, answer.pointers) == (422, pointers), (path, body)
        assert "bob" not in answer.body.decode()
    for query in ("suppressions?after=x", *(f"events?{query}" for query in BAD_QUERIES)):
        answer = await api.get(f"/v1/{query}", token=key)
        assert (answer.status, answer.code) == (400, "invalid-parameter"), query
    for path in ("/v1/replays", HELD):
        answer = await api.call("POST", path, body={**REASON, "email_ids": ["x" * 300_000]}, token=key)
        assert answer.code == "body-too-large"
    assert connection.execute("select is_on from outgoing_feed").fetchone() == (False,)


async def test_a_key_pauses_suppresses_and_sees_only_in_its_tenant(api: Api, connection: psycopg.Connection) -> None:
    operator, other = (make_key(connection, scopes=["operate"], tenant_id=tenant) for tenant in ("shop", "other"))
    pause(connection, "all")
    pause(connection, "tenant", "other")
    foreign = [
        await api.call(method, path, body={**REASON, **more, "tenant_id": "other"}, token=operator)
        for path, more in (("/v1/pauses", {}), ("/v1/suppressions", ANN))
        for method in ("POST", "DELETE")
    ]
    begun = await api.call("POST", "/v1/pauses", body=REASON, token=operator)
    assert (await api.call("POST", "/v1/suppressions", body={**REASON, **ANN}, token=operator)).json["added"] == 1

    assert [each.code for each in foreign] == ["tenant-forbidden"] * 4
    assert (begun.json["name"], begun.json["until"]) == ("shop", None)
    assert (await api.get("/v1/pauses", token=operator)).json == {"pauses": [begun.json]}
    (found,) = (await api.get("/v1/pauses", token=other)).json["pauses"]
    assert (found["actor"], found["reason"]) == ("ann", "maintenance")  # without the operator's host
    assert (await api.get("/v1/suppressions", token=other)).json["suppressions"] == []
    assert (await api.call("DELETE", "/v1/suppressions", body={**REASON, **ANN}, token=other)).json["removed"] == 0
    removed = await api.call("POST", "/v1/suppressions/remove", body={**REASON, **ANN}, token=operator)
    assert removed.json["removed"] == 1
    ended = await api.call("DELETE", "/v1/pauses", body=REASON, token=operator)
    again = await api.call("POST", "/v1/pauses/resume", token=operator)
    assert (ended.json, again.code) == (begun.json, "not-found")
    names = connection.execute("select scope, name from pause order by scope, name").fetchall()
    assert names == [("all", ""), ("tenant", "other")]


async def test_an_email_is_cancelled_and_a_second_time_too_and_too_late_names_its_status(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = (await api.post("k-1")).json["id"]

    first = await api.call("POST", f"/v1/emails/{email_id}/cancel", body=REASON)
    second = await api.call("POST", f"/v1/emails/{email_id}/cancel", body=REASON)
    rescheduled = await api.call("POST", f"/v1/emails/{email_id}/reschedule", body=LATER)
    shown = (await api.get(f"/v1/emails/{email_id}")).json

    assert (first.status, first.json) == (200, {"id": email_id, "status": "cancelled"})
    assert (second.status, second.json) == (200, first.json)
    assert (rescheduled.status, rescheduled.code, rescheduled.json["email_status"]) == (409, "too-late", "cancelled")
    assert (shown["status"], shown["error_type"], shown["waiting"]) == ("cancelled", "cancelled", None)
    connection.execute("update email_log set status = 'sending', publish_due_at = null")
    for verb, body in (("cancel", REASON), ("reschedule", LATER)):
        late = await api.call("POST", f"/v1/emails/{email_id}/{verb}", body=body)
        unknown = await api.call("POST", f"/v1/emails/{UNKNOWN}/{verb}", body=body)
        assert (late.status, late.code, late.json["email_status"]) == (409, "too-late", "sending")
        assert late.json["detail"] == "Nothing was changed: the email's status is sending."
        assert (unknown.status, unknown.code) == (404, "not-found")


async def test_a_rescheduled_email_waits_until_the_time(api: Api, connection: psycopg.Connection) -> None:
    email_id = (await api.post("k-1")).json["id"]

    done = await api.call("POST", f"/v1/emails/{email_id}/reschedule", body=LATER)
    wrong = [
        await api.call("POST", f"/v1/emails/{email_id}/reschedule", body={**REASON, "send_at": text})
        for text in ("2026-12-24T18:00:00", "tomorrow", "2999-01-01T00:00:00Z", 5)
    ]
    missing = await api.call("POST", f"/v1/emails/{email_id}/reschedule", body=REASON)
    connection.execute("update email_log set expires_at = wait_until")
    expired = await api.call("POST", f"/v1/emails/{email_id}/reschedule", body=LATER)
    shown = (await api.get(f"/v1/emails/{email_id}")).json["waiting"]

    assert (done.status, done.json | {"send_at": TOMORROW}) == (
        200,
        {"id": email_id, "status": "waiting", "send_at": TOMORROW},
    )
    assert datetime.fromisoformat(done.json["send_at"]) == TOMORROW
    assert (shown["reason"], datetime.fromisoformat(shown["until"])) == ("scheduled", TOMORROW)
    assert column(connection, "wait_until") == {"k-1": TOMORROW}
    assert [(each.status, each.pointers) for each in [*wrong, missing, expired]] == [(422, ["#/send_at"])] * 6


async def test_a_sending_key_changes_single_emails_of_its_tenant_only(api: Api, connection: psycopg.Connection) -> None:
    other_id = (await api.post("other")).json["id"]
    sender, reader = (make_key(connection, tenant_id="shop", scopes=[scope]) for scope in ("send", "read"))
    operator = make_key(connection, tenant_id="shop", scopes=["operate"])
    first, second = [(await api.post(key, token=sender)).json["id"] for key in ("k-1", "k-2")]

    async def cancel(email_id: str, token: str) -> int:
        return (await api.call("POST", f"/v1/emails/{email_id}/cancel", body=REASON, token=token)).status

    assert [await cancel(first, token) for token in (reader, sender)] == [403, 200]
    assert await cancel(second, operator) == 200
    assert await cancel(other_id, sender) == 404
    assert (await api.call("POST", "/v1/emails/cancel", body=REASON, token=sender)).status == 403
    assert column(connection, "status") == {"other": "pending", "k-1": "cancelled", "k-2": "cancelled"}

    test = make_key(connection, tenant_id="shop", scopes=["send"], is_test=True)
    live, own = [(await api.post(key, token=token)).json["id"] for key, token in (("k-3", sender), ("k-4", test))]
    assert [await cancel(each, test) for each in (live, own)] == [404, 200]


async def test_a_filter_or_all_must_be_chosen_and_dry_run_only_counts(api: Api, connection: psycopg.Connection) -> None:
    for number in range(3):
        await api.post(f"k-{number}")
    connection.execute("update email_log set lane = 'bulk' where message_key <> 'k-0'")
    connection.execute("update email_log set tenant_id = 'another' where message_key = 'k-2'")

    async def change(verb: str, **body: Any) -> Any:
        return (await api.call("POST", f"/v1/emails/{verb}", body={**REASON, **body})).json

    unintended = await change("cancel")
    dry = await change("cancel", lane="bulk", dry_run=True)
    wrong = await change("cancel", status="sent")
    unknown = await change("cancel", email_ids=[str(uuid4())] * 2, dry_run=True)
    assert [each["pointer"] for refused in (unintended, wrong) for each in refused["errors"]] == ["#", "#/status"]
    assert (dry["selected"], dry["results"], dry["has_more"], unknown["others"]) == ({"pending": 1}, {}, False, 1)
    assert set(column(connection, "status").values()) == {"pending"}

    for verb, given, selected, result in (
        ("reschedule", {"lane": "bulk", **LATER}, "pending", "rescheduled"),
        ("cancel", {"lane": "bulk", "status": "waiting"}, "waiting", "cancelled"),
        ("cancel", {"all": True}, "pending", "cancelled"),
    ):
        changed = await change(verb, **given)
        assert (changed["selected"], changed["results"]) == ({selected: 1}, {result: 1})
    assert column(connection, "status") == {"k-0": "cancelled", "k-1": "cancelled", "k-2": "pending"}


async def test_a_tenant_polls_its_events_from_a_cursor(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection)
    first = await api.get("/v1/events", token=key)
    assert (first.status, first.json["events"], first.json["has_more"]) == (200, [], False)
    assert connection.execute("select is_on from outgoing_feed").fetchone() == (True,)
    wanted = [str(event_id) for event_id in announce(connection, count=150)]
    announce(connection, "other", 5)

    page = (await api.get(f"/v1/events?after={first.json['next']}", token=key)).json
    rest = (await api.get(f"/v1/events?limit=1000&after={page['events'][41]['cursor']}", token=key)).json

    assert [event["id"] for event in page["events"]] == wanted[:100]
    assert [event["id"] for event in rest["events"]] == wanted[42:]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    event = page["events"][0]
    assert (event["type"], event["data"]["tenant_id"], event["data"]["message_key"]) == ("email.sent", "shop", "key")


async def test_a_tenant_manages_its_webhooks_and_no_others(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection, scopes=OPERATOR)
    other = make_key(connection, scopes=OPERATOR, tenant_id="other")
    body = {"url": "https://shop.example.com/hooks", "events": ["email.bounced"], "reason": "test"}
    made = await api.call("POST", "/v1/webhooks", body=body, token=key)
    path = made.headers["location"]
    assert made.status == 201
    assert made.json["secret"].startswith("whsec_")
    assert (made.json["tenant_id"], made.json["events"], made.json["state"]) == ("shop", ["email.bounced"], "active")
    assert made.json["next_attempt_at"] is None
    again = await api.call("POST", "/v1/webhooks", body={"url": body["url"]}, token=key)
    assert (again.status, again.code) == (409, "webhook-exists")
    assert f"Webhook {made.json['id']} " in again.json["detail"]
    assert (await api.call("POST", "/v1/webhooks", body=body, token=other)).status == 201
    connection.execute("delete from webhook where tenant_id = 'other'")
    without_secret = {name: value for name, value in made.json.items() if name != "secret"}
    assert (await api.get("/v1/webhooks", token=key)).json == {"webhooks": [without_secret]}
    assert (await api.get("/v1/webhooks", token=other)).json == {"webhooks": []}

    since = REASON | {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()}
    bodies = {"test": None, "rotate": REASON, "enable": None, "replay": since, "disable": REASON, "remove": None}
    foreign = [await api.call("POST", f"{path}/{verb}", body=given, token=other) for verb, given in bodies.items()]
    foreign += [await api.get(path, token=other), await api.call("DELETE", path, body=REASON, token=other)]
    assert {(answer.status, answer.code) for answer in foreign} == {(404, "not-found")}
    rotated = await api.call("POST", f"{path}/rotate", body=REASON, token=key)
    assert rotated.json["secret"] not in (made.json["secret"], None)
    assert (await api.call("POST", f"{path}/enable", token=key)).json == without_secret
    changed = {"url": "https://shop.example.com/other", "events": ["email.held", "email.failed"]}
    assert (await api.call("PATCH", path, body=changed, token=other)).code == "not-found"
    assert (await api.call("PATCH", path, body={}, token=key)).code == "invalid-body"
    patched = (await api.call("PATCH", path, body=changed, token=key)).json
    assert patched == without_secret | changed | {"events": ["email.failed", "email.held"]}
    second = (await api.call("POST", "/v1/webhooks", body=body, token=key)).headers["location"]
    assert (await api.call("PATCH", second, body=changed, token=key)).code == "webhook-exists"
    assert (await api.call("PATCH", second, body={"events": ["email.sent"]}, token=key)).json["url"] == body["url"]
    assert (await api.get(f"{path}/refused", token=key)).json == {"refused": [], "next": None}
    assert (await api.call("DELETE", second, token=key)).status == 200
    assert (await api.call("POST", f"{path}/replay", body=since, token=key)).status == 200
    connection.execute("update webhook set url = 'https://127.0.0.1:1/hook'")
    assert (await api.call("POST", f"{path}/test", token=key)).json["is_accepted"] is False
    assert (await api.call("POST", f"{path}/disable", body=REASON, token=key)).json["state"] == "disabled"
    assert (await api.call("DELETE", path, token=key)).status == 200
    assert (await api.get(path, token=key)).status == 404
    assert connection.execute("select reason from operator_audit order by audit_id desc limit 1").fetchone() == (
        "dispatcher webhooks remove",
    )
