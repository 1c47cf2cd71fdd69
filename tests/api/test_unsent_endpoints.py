"""Applications cancel and reschedule their emails over HTTP; a filter needs an operator's key."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from dispatcher.client import ApiProblem, AsyncClient, Client
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from tests.api.running_api import Api, make_key

REASON = {"reason": "The customer has paid."}
TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
LATER = {"send_at": TOMORROW.isoformat(), **REASON}


def column(connection: psycopg.Connection, name: str) -> dict[str, Any]:
    rows = connection.cursor(row_factory=dict_row).execute("select * from email_log").fetchall()
    return {row["message_key"]: row[name] for row in rows}


async def test_an_email_is_cancelled_and_a_second_time_too(api: Api, connection: psycopg.Connection) -> None:
    email_id = (await api.post("k-1")).json["id"]

    first = await api.call("POST", f"/v1/emails/{email_id}/cancel", body=REASON)
    second = await api.call("POST", f"/v1/emails/{email_id}/cancel", body=REASON)
    rescheduled = await api.call("POST", f"/v1/emails/{email_id}/reschedule", body=LATER)
    shown = (await api.get(f"/v1/emails/{email_id}")).json

    assert (first.status, first.json) == (200, {"id": email_id, "status": "cancelled"})
    assert (second.status, second.json) == (200, first.json)
    assert (rescheduled.status, rescheduled.code, rescheduled.json["email_status"]) == (409, "too-late", "cancelled")
    assert (shown["status"], shown["error_type"], shown["waiting"]) == ("cancelled", "cancelled", None)


@pytest.mark.parametrize(("verb", "body"), [("cancel", REASON), ("reschedule", LATER)])
async def test_too_late_has_the_status_of_the_email(
    api: Api, connection: psycopg.Connection, verb: str, body: object
) -> None:
    email_id = (await api.post("k-1")).json["id"]
    connection.execute("update email_log set status = 'sending', publish_due_at = null")

    late = await api.call("POST", f"/v1/emails/{email_id}/{verb}", body=body)
    unknown = await api.call("POST", f"/v1/emails/0199c0de-0000-7000-8000-000000000000/{verb}", body=body)

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

    assert (done.status, done.json) == (200, {"id": email_id, "status": "waiting"})
    assert (shown["reason"], datetime.fromisoformat(shown["until"])) == ("scheduled", TOMORROW)
    assert column(connection, "wait_until") == {"k-1": TOMORROW}
    assert [(each.status, each.pointers) for each in [*wrong, missing, expired]] == [(422, ["#/send_at"])] * 6


async def test_a_key_that_sends_changes_single_emails_of_its_tenant_only(
    api: Api, connection: psycopg.Connection
) -> None:
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


@pytest.mark.parametrize("path", ["cancel", "reschedule"])
async def test_a_change_of_every_email_must_be_intended(api: Api, connection: psycopg.Connection, path: str) -> None:
    await api.post("k-1")
    body = REASON if path == "cancel" else {**REASON, **LATER}

    refused = await api.call("POST", f"/v1/emails/{path}", body=body)
    dry = await api.call("POST", f"/v1/emails/{path}", body={**body, "dry_run": True})
    assert (refused.status, refused.pointers, dry.json["selected"]) == (422, ["#"], {"pending": 1})
    assert column(connection, "status") == {"k-1": "pending"}

    changed = await api.call("POST", f"/v1/emails/{path}", body={**body, "all": True})
    assert changed.json["selected"] == {"pending": 1}
    assert column(connection, "status") == {"k-1": "cancelled" if path == "cancel" else "waiting"}


async def test_a_filter_counts_with_dry_run_and_changes_without(api: Api, connection: psycopg.Connection) -> None:
    for number in range(3):
        await api.post(f"k-{number}")
    connection.execute("update email_log set lane = 'bulk' where message_key <> 'k-0'")
    connection.execute("update email_log set tenant_id = 'another' where message_key = 'k-2'")
    bulk = {"lane": "bulk", **REASON}

    dry = await api.call("POST", "/v1/emails/cancel", body={**bulk, "dry_run": True})
    moved = await api.call("POST", "/v1/emails/reschedule", body={**bulk, **LATER})
    cancelled = await api.call("POST", "/v1/emails/cancel", body={**bulk, "status": "waiting"})
    wrong = await api.call("POST", "/v1/emails/cancel", body={"status": "sent", **REASON})
    named = await api.call(
        "POST", "/v1/emails/cancel", body={"email_ids": [str(uuid4())] * 2, "dry_run": True, **REASON}
    )

    assert (dry.json["selected"], dry.json["results"], dry.json["has_more"]) == ({"pending": 1}, {}, False)
    assert (moved.json["selected"], moved.json["results"]) == ({"pending": 1}, {"rescheduled": 1})
    assert (cancelled.json["selected"], cancelled.json["results"]) == ({"waiting": 1}, {"cancelled": 1})
    assert (wrong.status, wrong.pointers, named.json["others"]) == (422, ["#/status"], 1)
    assert column(connection, "status") == {"k-0": "pending", "k-1": "cancelled", "k-2": "pending"}


async def test_both_clients_cancel_and_reschedule(api: Api, connection: psycopg.Connection) -> None:
    made = await api.post("k-1"), await api.post("k-2"), await api.post("k-3")
    waiting, cancelled, sent = (each.json["id"] for each in made)
    connection.execute("update email_log set status = 'sent', publish_due_at = null where message_key = 'k-3'")

    def use_client() -> list[Status]:
        with Client(api.url) as client:
            return [
                client.reschedule(waiting, TOMORROW, reason="asked for it"),
                client.cancel(cancelled, reason="has paid"),
            ]

    assert await asyncio.to_thread(use_client) == [Status.WAITING, Status.CANCELLED]
    async with AsyncClient(api.url) as client:
        assert await client.reschedule(waiting, TOMORROW, reason="asked for it") is Status.WAITING
        with pytest.raises(ApiProblem) as refused:
            await asyncio.wait_for(client.cancel(sent, reason="has paid"), 20)
        with pytest.raises(InvalidEmail):
            await client.reschedule(waiting, datetime(2026, 12, 24), reason="no zone")  # noqa: DTZ001

    assert (refused.value.code, refused.value.email_status) == ("too-late", Status.SENT)
