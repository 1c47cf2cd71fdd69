"""Operators confirm, release and replay emails over HTTP, within the tenant of the API key."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg

from dispatcher.config import Settings
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.waiting import until_answer

REASON = {"reason": "The provider shows it."}
HELD = "/v1/held/0199c0de-0000-7000-8000-000000000000/confirm"


def set_status(connection: psycopg.Connection, key: str, status: str) -> None:
    """Sets an email's status, and the columns that a worker sets with it."""
    connection.execute(
        "update email_log set status = %s, publish_due_at = null, error_type = 'refused', attempt_count = 1"
        " where message_key = %s",
        [status, key],
    )


def statuses(connection: psycopg.Connection) -> dict[str, str]:
    return dict(connection.execute("select message_key, status from email_log").fetchall())


async def test_held_emails_are_confirmed_or_released(api: Api, connection: psycopg.Connection) -> None:
    ids = [(await api.post(key)).json["id"] for key in ("a", "b", "c")]
    set_status(connection, "a", "held")
    set_status(connection, "b", "held")

    confirmed = await api.call("POST", f"/v1/held/{ids[0]}/confirm", body=REASON)
    released = await api.call("POST", f"/v1/held/{ids[1]}/release", body=REASON)
    neither = await api.call("POST", f"/v1/held/{ids[2]}/confirm", body=REASON)
    unreasoned = await api.call("POST", f"/v1/held/{ids[0]}/confirm", body={"reason": " "})
    odd = await api.call("POST", f"/v1/held/{ids[0]}/confirm", body={"reason": "\U0003d8c8 is no character yet"})

    assert (confirmed.json, released.json["status"]) == ({"id": ids[0], "status": "sent"}, "pending")
    assert (neither.status, neither.code) == (409, "not-held")
    assert (unreasoned.status, unreasoned.pointers) == (422, ["#/reason"])
    assert odd.status == 409
    assert statuses(connection) == {"a": "sent", "b": "pending", "c": "pending"}


async def test_a_replay_sends_the_tenants_failed_emails_again_and_reports_its_progress(
    api: Api, connection: psycopg.Connection
) -> None:
    for key, tenant in (("a", "shop"), ("b", "shop"), ("c", "other")):
        await api.post(key, EMAIL | {"tenant_id": tenant})
        set_status(connection, key, "failed")
    token = make_key(connection, scopes=["operate"])

    made = await api.call("POST", "/v1/replays", body={"error_type": "refused", **REASON}, token=token)

    async def is_done() -> bool:
        return bool((await api.get(made.headers["location"], token=token)).json["state"] == "done")

    assert made.status == 202
    await until_answer(is_done)
    assert (await api.get(made.headers["location"], token=token)).json["outcomes"] == {"replayed": 2}
    assert statuses(connection) == {"a": "pending", "b": "pending", "c": "failed"}


async def test_a_replay_can_be_stopped_only_by_its_tenant(api: Api, connection: psycopg.Connection) -> None:
    for key in ("a", "b", "c"):
        await api.post(key, EMAIL | {"tenant_id": "shop"})
        set_status(connection, key, "failed")
    token, other = (make_key(connection, scopes=["operate"], tenant_id=tenant) for tenant in ("shop", "other"))
    made = await api.call("POST", "/v1/replays", body={"per_second": 0.01, **REASON}, token=token)
    path = made.headers["location"]

    foreign = [await api.get(path, token=other), await api.call("DELETE", path, body=REASON, token=other)]
    unreasoned = await api.call("DELETE", path, body={}, token=token)
    stopped = await api.call("DELETE", path, body={"reason": "too fast"}, token=token)

    assert [answer.status for answer in foreign] == [404, 404]
    assert (unreasoned.status, unreasoned.pointers) == (422, ["#/reason"])
    assert (stopped.status, stopped.json["state"]) in ((200, "stopping"), (200, "stopped"))
    acts = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert acts == [("replay", REASON["reason"]), ("stop", "too fast")]
    assert list(statuses(connection).values()).count("failed") >= 2


async def test_a_pace_out_of_range_is_refused(api: Api) -> None:
    for pace in (1e-9, 0, 0.009, 10_001, True):
        answer = await api.call("POST", "/v1/replays", body={"per_second": pace, **REASON})
        assert (answer.status, answer.pointers) == (422, ["#/per_second"])


async def test_slow_replays_of_one_tenant_do_not_delay_another_tenant(api: Api, connection: psycopg.Connection) -> None:
    ids: dict[str, list[str]] = {"slow": [], "other": []}
    for number, tenant in enumerate([*["slow"] * 6, "other"]):
        ids[tenant].append((await api.post(f"k-{number}", EMAIL | {"tenant_id": tenant})).json["id"])
        set_status(connection, f"k-{number}", "failed")
    slow = {"tenant_id": "slow", "per_second": 0.01, **REASON}
    paths = []
    for first in (0, 2, 4):
        begun = await api.call("POST", "/v1/replays", body={"email_ids": ids["slow"][first : first + 2], **slow})
        paths.append(f"{begun.headers['location']}?tenant_id=slow")
    for path in paths[:2]:
        await until_answer(partial(has, api, path, {"replayed": 1}))

    made = await api.call("POST", "/v1/replays", body={"tenant_id": "other", **REASON})

    await until_answer(lambda: has(api, f"{made.headers['location']}?tenant_id=other", {"replayed": 1}))
    assert await has(api, paths[2], {})


async def test_another_process_resumes_an_interrupted_replay(
    settings: Settings, connection: psycopg.Connection
) -> None:
    async with running(settings) as first:
        for key in ("a", "b", "c"):
            await first.post(key)
            set_status(connection, key, "failed")
        made = await first.call("POST", "/v1/replays", body={"per_second": 0.01, **REASON})
        path = made.headers["location"]
        await until_answer(lambda: has(first, path, {"replayed": 1}))

    async with running(settings) as second:
        interrupted = await until_answer(lambda: interrupted_replay(second, path))
        connection.execute("update email_replay set per_second = null")
        resumed = await second.call("POST", f"{path}/resume", body=REASON)
        again = await second.call("POST", f"{path}/resume", body=REASON)
        await until_answer(lambda: has(second, path, {"replayed": 3}))
        done = await second.call("POST", f"{path}/resume", body=REASON)
        unknown = await second.call("POST", "/v1/replays/4711/resume", body=REASON)

    assert (interrupted["state"], interrupted["is_active"], interrupted["waiting"]) == ("interrupted", False, 2)
    assert [answer.status for answer in (resumed, again, done, unknown)] == [202, 202, 202, 404]
    assert set(statuses(connection).values()) == {"pending"}


async def interrupted_replay(api: Api, path: str) -> Any:
    """The replay, once the API reports it as interrupted; None before. PostgreSQL notices late that the process of the
    replay exited."""
    replay = (await api.get(path)).json
    return None if replay["is_active"] else replay


async def has(api: Api, path: str, outcomes: dict[str, int]) -> bool:
    """Whether a replay has these outcomes."""
    return bool((await api.get(path)).json["outcomes"] == outcomes)


async def test_the_reason_of_a_replay_is_shown_to_whose_key_gave_it_and_to_keys_for_all_tenants(
    api: Api, connection: psycopg.Connection
) -> None:
    own, colleague = (make_key(connection, scopes=["operate"]) for _ in range(2))
    everyone = make_key(connection, scopes=["operate"], tenant_id=None)
    of_tenant = (await api.call("POST", "/v1/replays", body=REASON, token=own)).json
    private = {"tenant_id": "shop", "text": "words of an operator"}
    of_operator = (await api.call("POST", "/v1/replays", body=REASON | private, token=everyone)).json
    paths = [f"/v1/replays/{made['id']}" for made in (of_tenant, of_operator)]

    seen = {
        name: [(await api.get(path, token=token)).json["reason"] for path in paths]
        for name, token in (("own", own), ("colleague", colleague))
    }
    seen["everyone"] = [(await api.get(f"{path}?tenant_id=shop", token=everyone)).json["reason"] for path in paths]

    filters = [
        (await api.get(paths[1] + query, token=token)).json["selection"]
        for query, token in (("", own), ("?tenant_id=shop", everyone))
    ]

    why = REASON["reason"]
    assert (filters[0], filters[1]["text"]) == ({}, private["text"])
    assert seen == {"own": [why, None], "colleague": [why, None], "everyone": [why, why]}


async def test_operator_endpoints_need_the_scope_operate(api: Api, connection: psycopg.Connection) -> None:
    token = make_key(connection)

    for method, path in (("POST", "/v1/replays"), ("GET", "/v1/replays/1"), ("POST", HELD)):
        assert (await api.call(method, path, body=REASON, token=token)).code == "insufficient-scope"


async def test_a_large_body_of_a_decision_is_refused_without_being_read(api: Api) -> None:
    body = {**REASON, "email_ids": ["x" * 300_000]}

    assert (await api.call("POST", "/v1/replays", body=body)).code == "body-too-large"
    assert (await api.call("POST", HELD, body=body)).code == "body-too-large"
